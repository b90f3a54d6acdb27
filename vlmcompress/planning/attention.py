"""What a recipe means for attention: an FP8 KV cache for the decoder, FP8 arithmetic in the vision tower.

vLLM made scales of an FP8 cache itself (`--calculate-kv-scales`) until 0.28 (vllm PR #49389); a checkpoint's are the only
calibrated ones since. Where queries and keys are normalized (QK norm: Qwen3-VL, Gemma 3) their size is bounded; where they are
not, an FP8 cache has broken models (Qwen2.5-VL: vllm #41343 with `fp8_e5m2`, verl PR #4435), so what is made of them
has to be measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from vlmcompress import models
from vlmcompress.common.messages import Finding
from vlmcompress.common.registry import FAMILIES
from vlmcompress.models import Source
from vlmcompress.planning.kv_types import normalizes
from vlmcompress.recipe import Recipe
from vlmcompress.targets import Target

_CALIBRATED = "with scales from the calibration samples; vLLM has made none itself since 0.28"
_RISK = (
    ". This model does not normalize queries and keys (no QK norm), and an FP8 cache has broken such models: "
    "compare the answers with `vlmcompress eval`, and never serve it with fp8_e5m2"
)


def cache_finding(recipe: Recipe, source: Source, target: Target, everywhere: bool) -> Finding:
    """What vLLM needs for an FP8 KV cache on the target; what there is to gain where the recipe has none.

    Args:
        everywhere: whether every decoder block has a quantized layer, without which no scales are stored.
    """
    title, risk = "vllm: KV cache", "" if normalizes(source.meta_model) else _RISK
    if recipe.kv_cache:
        needs = target.kv_fp8_refused or f"FP8 {_CALIBRATED}. Runs in {target.kv_fp8}{_instead(target)}{risk}"
        return Finding(title, not target.kv_fp8_refused, needs)
    if target.kv_instead:
        return Finding(title, True, f"16 bits; to halve it, {target.kv_instead}")
    if target.kv_fp8_refused or not everywhere:
        return Finding(title, True, "16 bits")
    return Finding(title, True, f"16 bits; --kv-cache fp8 halves it {_CALIBRATED}{risk}")


def _instead(target: Target) -> str:
    return f". Better there: {target.kv_instead}" if target.kv_instead else ""


def tower_finding(target: Target) -> Finding:
    """Whether vLLM computes a vision tower's attention in FP8 on the target."""
    needs = target.vision_attention_fp8
    missing = f"{target.title} has no FP8 attention for vision towers in vLLM; leave --vision-attention out"
    return Finding("vllm: vision attention", bool(needs), f"FP8 with {needs}" if needs else missing)


def tower_problems(recipe: Recipe, source: Source) -> Iterator[str]:
    """Why vLLM can't compute the tower's attention in FP8 as the recipe asks for it."""
    if recipe.vision_attention is None:
        return
    if source.spec.vision_attention is None:
        able = [name for name in FAMILIES.names() if models.REGISTRY.get(name).SPEC.vision_attention]
        yield (
            f"vision_attention: vLLM has no FP8 attention for the vision tower of {source.spec.family}, only for "
            f"{', '.join(able)}; leave it out"
        )
    if recipe.engine != "vllm":
        yield f"vision_attention: {recipe.engine} does not read its scales, vLLM alone does; leave it out"
