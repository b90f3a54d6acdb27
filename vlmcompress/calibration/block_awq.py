"""AWQ's scale search as published: by the error of the block's output, re-running the block for every candidate.

llm-compressor's own `AWQModifier` does it, with mappings scoped to the decoder (its defaults match the vision towers of
several families). It leaves its traces in the model it works on, so it gets a copy, of which only the smoothed
parameters are taken over. Twice the memory and many times the arithmetic of the Gram form; it is here
to compare with.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch import Tensor

from vlmcompress import models
from vlmcompress.calibration.sequential import run_oneshot
from vlmcompress.exporters import compressed_tensors
from vlmcompress.models import VLM, Group
from vlmcompress.numerics import Scheme


@torch.no_grad()
def smooth_blocks(
    vlm: VLM, blocks: list[list[Group]], batches: list[dict[str, Tensor]], scheme: Scheme, grid: int, duo: bool
) -> None:
    """Smooth the decoder of `vlm.model` in place for quantization with `scheme`.

    Args:
        grid: candidates per group.
        duo: weight magnitudes join in, as in `quantizers.awq`.
    """
    own = replace(vlm, model=copy.deepcopy(vlm.model))
    groups = [group for block in blocks for group in block]
    mappings = [
        AWQMapping(_exactly(group.smooth), [_exactly(name) for name in group.linears])
        for group in groups
        if group.smooth
    ]
    linears = [name for group in groups for name in group.linears]
    config = compressed_tensors.quantization_config([(scheme, [_exactly(name) for name in linears])], ignore=[])
    recipe = [
        AWQModifier(mappings=mappings, n_grid=grid, duo_scaling=duo),
        QuantizationModifier(config_groups=config["config_groups"]),
    ]
    with _no_pinning():
        run_oneshot(own, batches, recipe, models.layer_class(vlm.model, vlm.spec))
    smoothed = dict(own.model.named_parameters())
    for name in {*linears, *(group.smooth for group in groups if group.smooth)}:
        for path, parameter in vlm.model.get_submodule(name).named_parameters(prefix=name, recurse=False):
            parameter.copy_(smoothed[path])


@contextlib.contextmanager
def _no_pinning() -> Iterator[None]:
    """Without an accelerator: don't pin host memory, which is for copies to one and raises where there is none."""
    original = IntermediatesCache.pin_memory
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = original  # type: ignore[method-assign]


def _exactly(name: str | None) -> str:
    return f"re:^{re.escape(name or '')}$"
