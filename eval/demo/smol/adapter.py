"""Low-rank adapters (LoRA, arXiv 2106.09685, equation 3) of a language model, trained apart, added on assembly."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def merge(layers: nn.ModuleList, trained: dict[str, Tensor]) -> None:
    """Add the products ``B A`` to the weights of plain layers; ``trained`` has ``NAME.a`` and ``NAME.b``."""
    for name, module in layers.named_modules():
        if f"{name}.a" in trained:
            module.weight += trained[f"{name}.b"].float() @ trained[f"{name}.a"].float()
