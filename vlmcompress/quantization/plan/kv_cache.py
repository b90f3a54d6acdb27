"""Types of the cache of keys and values in vLLM 0.32: their sizes and risks.

vLLM computed scales of an FP8 cache itself (`--calculate-kv-scales`) until 0.28 (pull request #49389); since then only a
checkpoint's scales are calibrated. Where queries and keys are normalized (QK norm: Qwen3-VL, Gemma 3) their size is bounded;
models without lose most by 8 bits (verl pull request #4435, Qwen2.5), and `fp8_e5m2` silently gives Qwen2-VL and Qwen2.5-VL
wrong answers (vLLM issue #41343), so measure its effect. Other sources: vLLM 0.32 `config/cache.py`,
`v1/attention/backends/triton_attn.py` (a scale in float32 for each token and head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vlmcompress.models import Source
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.targets import Target
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.messages import Check


@dataclass(frozen=True)
class Width:
    """Bytes of a number (None: those of the model's type) and of a scale for each token and head."""

    number: int | None
    scale: int = 0


TYPES = {
    "auto": Width(None),
    "bf16": Width(2),
    "fp8": Width(1),
    "fp8_e4m3": Width(1),
    "fp8_e5m2": Width(1),
    "fp8_per_token_head": Width(1, 4),
    "int8_per_token_head": Width(1, 4),
}
FLAGS = {"bf16": "bfloat16"}
"""Name of a type on vLLM's command line, where it is another."""
_CALIBRATED = "with scales from the calibration samples; vLLM has computed none itself since 0.28"
_RISK = (
    ". This model does not normalize queries and keys (no QK norm), and an FP8 cache has broken such models: "
    "compare the answers with `vlmcompress eval`, and never serve it with fp8_e5m2"
)


def width(name: str) -> Width:
    """What a type takes. UserError for an unknown one."""
    if name not in TYPES:
        raise UserError(f"--kv-cache {name[:40]}: no such type{did_you_mean(name, TYPES)}")
    return TYPES[name]


def has_scales(config: dict[str, Any]) -> bool:
    """Whether a checkpoint says that it brings scales for an FP8 cache."""
    quantization = config.get("quantization_config") or {}
    return bool(quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"))


def normalizes(model: nn.Module) -> bool:
    """Whether a model (its meta model will do) normalizes queries and keys in its decoder."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    names = {name.rpartition(".")[2] for name, _ in decoder.named_modules()}
    return bool(names & {"q_norm", "q_layernorm"}) and bool(names & {"k_norm", "k_layernorm"})


def remarks(name: str, normalized: bool, target: Target | None, scales: bool) -> list[str]:
    """What to know of the chosen type, or what to try instead where none was chosen, a line each.

    Args:
        name: a key of `TYPES`.
        normalized: whether the model normalizes queries and keys.
        scales: whether the checkpoint brings scales for an FP8 cache, or will.
    """
    risky = (
        "the model does not normalize queries and keys (no q_norm, k_norm): measure the answers with vlmcompress eval"
    )
    ampere = target is not None and target.capability == (8, 0)
    if name == "fp8_e5m2":
        return [
            "fp8_e5m2 has two bits of mantissa and no scales, and is known to spoil Qwen2-VL and Qwen2.5-VL; use fp8"
        ]
    if name.startswith("fp8") and not name.endswith("head"):
        lines = [] if normalized else [f"FP8 cache: {risky}"]
        if target and target.no_kv_fp8:
            lines.append(f"FP8 cache: {target.no_kv_fp8}")
        elif target and target.kv_fp8:
            lines.append(f"FP8 cache on {target.title}: {target.kv_fp8}")
        if not scales:
            lines.append(
                "FP8 cache: without scales in the checkpoint vLLM takes 1.0; quantize with --kv-cache fp8 calibrates them, "
                "which since vLLM 0.28 nothing else does"
            )
        if ampere:
            lines.append(
                "FP8 cache: A100 has no FP8 arithmetic; int8_per_token_head needs no scales and runs in Triton"
            )
        return lines
    if name not in ("auto", "bf16"):
        return []
    if ampere:
        return [
            "--kv-cache int8_per_token_head would hold about twice the tokens: no scales to calibrate, runs on A100 in Triton"
        ]
    if target and target.no_kv_fp8:
        return []
    return [
        "--kv-cache fp8 would hold about twice the tokens, with scales that quantize calibrates"
        + ("" if normalized else f"; but {risky}")
    ]


def kv_cache_check(recipe: Recipe, source: Source, target: Target, everywhere: bool) -> Check:
    """What vLLM needs for an FP8 KV cache on the target; what there is to gain where the recipe has none.

    Args:
        everywhere: whether every decoder block has a quantized layer, without which no scales are stored.
    """
    title, risk = "vllm: KV cache", "" if normalizes(source.meta_model) else _RISK
    if recipe.kv_cache:
        instead = f". Better there: {target.kv_instead}" if target.kv_instead else ""
        needs = target.no_kv_fp8 or f"FP8 {_CALIBRATED}. Runs in {target.kv_fp8}{instead}{risk}"
        return Check(title, not target.no_kv_fp8, needs)
    if target.kv_instead:
        return Check(title, True, f"16 bits; to halve it, {target.kv_instead}")
    if target.no_kv_fp8 or not everywhere:
        return Check(title, True, "16 bits")
    return Check(title, True, f"16 bits; --kv-cache fp8 halves it {_CALIBRATED}{risk}")
