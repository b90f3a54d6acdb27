"""Observe queries, keys and values of the vision tower's attention, as vLLM quantizes them: after RoPE, before the product.

vLLM 0.32 can compute the tower's attention in FP8 (`--mm-encoder-attn-dtype fp8`; `mm_encoder_attention.py`). It stores
 `x / s` as float8_e4m3 with one scale `s` each for q, k and v of a layer, and takes the scales from a JSON file, or computes
 them while serving: from the maximum over the last 16 inputs, of signed values (no `abs`), so that it clips where the largest
 magnitude is negative. Here `s = MARGIN * max|x| / 448` over all calibration images. The margin is that of files that vLLM
 writes itself; in a float format it costs next to nothing and leaves room for other images.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.models import VLM, ModelSpec
from vlmcompress.models.devices import sent
from vlmcompress.numerics import FLOAT8_MAX
from vlmcompress.quantization.calibration.block_inputs import capture_block_inputs
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent

MARGIN = 1.5
_NAME = "vlmcompress_observed"  # registered name of the observing attention function
_PARTS = ("q", "k", "v")
Scales = dict[str, dict[str, float]]


def attention_scales(vlm: VLM, samples: list[dict[str, Tensor]], progress: Progress = silent) -> Scales:
    """Scales of each layer of the tower, by the layer's name in vLLM: `{"q", "k", "v"}` -> positive number.

    Args:
        samples: from `encode`, one sample each; several workers share them out.
    """
    with _watched(vlm.model, vlm.spec) as largest:
        capture_block_inputs(vlm, samples, progress)
    scales = {}
    for name, magnitudes in largest.items():
        pooled = distributed.all_max(magnitudes.cpu())
        if not pooled.all():
            raise UserError("vision_attention needs images, and the calibration data have none; name some with --calib")
        layer = f"{vlm.spec.engine_name(name)}.attn"
        scales[layer] = dict(zip(_PARTS, (pooled * (MARGIN / FLOAT8_MAX)).tolist(), strict=True))
    return scales


@contextmanager
def _watched(model: nn.Module, spec: ModelSpec) -> Iterator[dict[str, Tensor]]:
    """Within the context, attention module of the tower -> the largest magnitudes of q, k and v so far, float32 `[3]`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    blocks = model.get_submodule(spec.vision_layers)
    modules = {
        f"{spec.vision_layers}.{index}.{spec.tower.attention}": block.get_submodule(str(spec.tower.attention))
        for index, block in blocks.named_children()
    }
    largest = {name: torch.zeros(len(_PARTS)) for name in modules}
    names = {module: name for name, module in modules.items()}
    configs: list[Any] = list({id(module.config): module.config for module in modules.values()}.values())
    before = [config._attn_implementation for config in configs]
    if len(set(before)) > 1:
        raise ValueError(
            f"the tower's blocks have different attention implementations: {', '.join(sorted(set(before)))}"
        )

    def show(module: nn.Module, *states: Any, **kwargs: Any) -> Any:
        call_largest = torch.stack([state.detach().abs().amax().float() for state in states[:3]])
        largest[names[module]] = torch.maximum(sent(largest[names[module]], call_largest.device), call_largest)
        # `eager` is no entry of transformers' table, but a function in the module's own file.
        eager: Any = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        return ALL_ATTENTION_FUNCTIONS.get_interface(before[0], eager)(module, *states, **kwargs)

    # transformers looks up its attention function by `config._attn_implementation` in each call, and calls it with q, k and v
    # after RoPE. Only the private mapping allows removing a registered name.
    AttentionInterface.register(_NAME, show)
    try:
        for config in configs:
            config._attn_implementation = _NAME
        yield largest
    finally:
        for config, old in zip(configs, before, strict=True):
            config._attn_implementation = old
        AttentionInterface._global_mapping.pop(_NAME)
