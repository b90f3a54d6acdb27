"""Run llm-compressor's own GPTQ, AWQ and AutoRound on a decoder as its users do: its modifiers, its pipeline, its defaults.

Only three things are ours: the mappings (the stock ones don't resolve on LLaVA, where names of the vision tower match,
too), the samples, and the number format, so that results that are compared have as many bits.
"""

from __future__ import annotations

import re

import torch
from compressed_tensors.quantization import disable_quantization
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import Tensor

from vlmcompress import models
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.models import VLM
from vlmcompress.numerics import weight_only
from vlmcompress.quantization.calibration.block_search import run_oneshot
from vlmcompress.quantization.schemes import int8

AUTOROUND = {"autoround": {}, "autoround light": {"iters": 50, "lr": 5e-3}}  # of `auto_round.cli.main.RECIPES`


@torch.no_grad()
def run_stock(
    vlm: VLM,
    batches: list[dict[str, Tensor]],
    name: str,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = False,
) -> None:
    """Quantize the decoder of `vlm.model` in place with `gptq`, `awq`, `autoround` (200 iterations a block, its default), its
    setting `light` (50, with a learning rate of 5e-3), or with `int8`: SmoothQuant and then GPTQ to W8A8, as llm-compressor's
    example has it.

    The model keeps llm-compressor's wrappers, which round the weights (and of `int8` the inputs) when it runs; AutoRound's
    weights are rounded (in BF16), and stay as it left them, because its wrappers have no zero points.
    """
    batches = [batch | {"modality": batch["modality"].clamp(max=1)} for batch in batches]  # AWQ's loss is of tokens 1
    groups = models.resolve_groups(vlm.model, vlm.spec)
    linears = [_exactly(linear) for group in groups for linear in group.linears]
    scheme = int8.SCHEME.scheme(int8.Options()) if name == "int8" else weight_only(bits, group_size, symmetric)
    config = compressed_tensors.quantization_config([(scheme, linears)], ignore=[])
    recipe: list[Modifier]
    if name == "gptq":
        recipe = [GPTQModifier(config_groups=config["config_groups"])]
    elif name == "int8":
        norms = [group for group in groups if group.smooth and group.smooth_kind == "norm"]
        pairs = [([_exactly(linear) for linear in group.linears], _exactly(group.smooth)) for group in norms]
        smooth = SmoothQuantModifier(smoothing_strength=0.8, mappings=pairs)
        recipe = [smooth, GPTQModifier(config_groups=config["config_groups"])]
    elif name in AUTOROUND:
        recipe = [
            AutoRoundModifier(config_groups=config["config_groups"], enable_torch_compile=False, **AUTOROUND[name])
        ]
    else:
        mappings = [
            AWQMapping(_exactly(group.smooth), [_exactly(linear) for linear in group.linears])
            for group in groups
            if group.smooth
        ]
        recipe = [AWQModifier(mappings=mappings), QuantizationModifier(config_groups=config["config_groups"])]
    if not torch.accelerator.is_available():  # pinning memory raises where there is nothing to copy to
        IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None
    run_oneshot(vlm, batches, recipe, models.layer_class(vlm.model, vlm.spec))
    if name in AUTOROUND:
        vlm.model.float().apply(disable_quantization)


def _exactly(name: str | None) -> str:
    return f"re:^{re.escape(name or '')}$"
