"""Run llm-compressor's own GPTQ, AWQ and AutoRound on a decoder as its users do: its modifiers, its pipeline, its defaults.

Only three things are ours: the mappings (the stock ones don't resolve on LLaVA, where names of the vision tower match,
too), the samples, and the number format, so that results that are compared have as many bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from compressed_tensors.quantization import disable_quantization
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import Tensor
from torch.utils.data import DataLoader

from vlmcompress import models
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.models import VLM, Group
from vlmcompress.numerics import weight_only
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
    linears = [exactly(linear) for group in groups for linear in group.linears]
    scheme = int8.SCHEME.scheme(int8.Options()) if name == "int8" else weight_only(bits, group_size, symmetric)
    config = compressed_tensors.quantization_config([(scheme, linears)], ignore=[])
    recipe: list[Modifier]
    if name == "gptq":
        recipe = [GPTQModifier(config_groups=config["config_groups"])]
    elif name == "int8":
        norms = [group for group in groups if group.smooth and group.smooth_kind == "norm"]
        pairs = [([exactly(linear) for linear in group.linears], exactly(group.smooth)) for group in norms]
        smooth = SmoothQuantModifier(smoothing_strength=0.8, mappings=pairs)
        recipe = [smooth, GPTQModifier(config_groups=config["config_groups"])]
    elif name in AUTOROUND:
        recipe = [
            AutoRoundModifier(config_groups=config["config_groups"], enable_torch_compile=False, **AUTOROUND[name])
        ]
    else:
        awq = AWQModifier(mappings=mappings_of(groups))
        recipe = [awq, QuantizationModifier(config_groups=config["config_groups"])]
    run_oneshot(vlm, batches, recipe)
    if name in AUTOROUND:
        vlm.model.float().apply(disable_quantization)


def mappings_of(groups: Sequence[Group]) -> list[AWQMapping]:
    """AWQ's mappings of the groups that can be smoothed."""
    pairs = [(group.smooth, (*group.linears, *group.kept)) for group in groups if group.smooth]
    return [AWQMapping(exactly(op), [exactly(name) for name in names]) for op, names in pairs]


def run_oneshot(vlm: VLM, batches: list[dict[str, Tensor]], recipe: list[Modifier]) -> None:
    """Run the calibration set through llm-compressor's sequential pipeline, a subgraph per decoder block, sample by sample.

    Args:
        batches: from `encode`, one sample each, all with the same keys; `modality` becomes its `loss_mask`.
        recipe: the modifiers to run.
    """
    if not torch.accelerator.is_available():  # pinning memory raises where there is nothing to copy to
        IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None
    items = [
        {**{k: v for k, v in batch.items() if k != "modality"}, "loss_mask": batch["modality"]} for batch in batches
    ]
    oneshot(
        model=vlm.model,
        processor=vlm.processor,
        recipe=recipe,
        dataset=DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0]),
        num_calibration_samples=len(items),
        sequential_targets=[type(vlm.model.get_submodule(models.decoder_layers(vlm.model, vlm.spec)[0])).__name__],
        use_loss_mask=True,
        pipeline="sequential",
    )


def exactly(name: str | None) -> str:
    """llm-compressor's pattern for one name."""
    return f"re:^{re.escape(name or '')}$"
