"""Low-rank adapters (LoRA, arXiv 2106.09685, equation 3) of a frozen language model: trained apart, added on assembly."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RANKS = {"q_proj": 16, "k_proj": 16, "v_proj": 16, "o_proj": 16, "gate_proj": 8, "up_proj": 8, "down_proj": 8}


class Adapted(nn.Module):
    """A frozen linear layer plus ``B A x``, with ``A [rank, in]`` random and ``B [out, rank]`` zero at the start."""

    def __init__(self, linear: nn.Linear, rank: int):
        super().__init__()
        out, width = linear.weight.shape
        self.weight, self.bias = linear.weight, linear.bias
        self.a = nn.Parameter(torch.randn(rank, width) * width**-0.5)
        self.b = nn.Parameter(torch.zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.a), self.b)


def adapt(layers: nn.ModuleList) -> None:
    """Put an adapter next to each linear layer of the decoder blocks, in place; weights are frozen."""
    for block in layers:
        for parameter in block.parameters():
            parameter.requires_grad_(False)
        for part in (block.self_attn, block.mlp):
            for name, rank in RANKS.items():
                if hasattr(part, name):
                    setattr(part, name, Adapted(getattr(part, name), rank))


def adapters(layers: nn.ModuleList) -> dict[str, Adapted]:
    """The adapters by the names of their layers."""
    return {name: module for name, module in layers.named_modules() if isinstance(module, Adapted)}


@torch.no_grad()
def merge(layers: nn.ModuleList, trained: dict[str, Tensor]) -> None:
    """Add the products ``B A`` to the weights of plain layers; ``trained`` has ``NAME.a`` and ``NAME.b``."""
    for name, module in layers.named_modules():
        if f"{name}.a" in trained:
            module.weight += trained[f"{name}.b"].float() @ trained[f"{name}.a"].float()
