"""Machines to serve on, as data: what vLLM 0.32 runs there, with which kernel, and what to take instead of the rest.

A file here is one machine, its name is the target's name; `TARGET` is all it holds. Formats are named by `format_key`:

    w4a16  w8a16  wNa16 (2, 3, 5, 6, 7 bits)      integer weights, 16-bit activations
    w8a8-int  w8a8-fp                              8-bit weights and activations
    w4a8-int                                       4-bit weights, 8-bit activations
    w8a8-fp-static                                 with fixed activation scales; the kernel of w8a8-fp unless refused
    w8a8-fp-block                                  with a scale per 128 x 128 weights
    w4a4-fp  w4a16-fp                              NVFP4: 4-bit floats with an FP8 scale per 16 weights
    w4a4-mx  w4a16-mx  w8a8-mx                     MXFP4 and MXFP8: floats with a power of two per 32 weights
    w4a8-fp                                        4-bit integer weights, FP8 activations

A format is in one of three places: it runs (`kernels`); it runs and rounds activations for nothing, as vLLM computes in
16 bits, so that it is refused with the reason (`kernels` and `weight_only`); or it does not run (`refused`). Kernels are
vLLM 0.32's own choice: `scripts/measure/kernel_choice.py` asks it with a pretended platform, docs/measurements.md has the
table, and `tests/recipe/test_kernels.py` holds the files here to it. Only those of the CPU build were run. Attention is read
from `v1/attention/backends`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import TARGETS as REGISTRY

Goal = Literal["memory", "throughput"]
_NO_PARTS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Limit:
    """Shapes `[out, in]` that a kernel takes: multiples of these numbers in both sides and the group size."""

    out_multiple: int = 1
    in_multiple: int = 1
    group_multiple: int = 1

    def problem(self, out_features: int, in_features: int, group: int) -> str | None:
        """The reason why a matrix of this shape does not run, or None."""
        if in_features % self.in_multiple:
            return f"in_features {in_features} is not a multiple of {self.in_multiple}"
        if out_features % self.out_multiple:
            return f"out_features {out_features} is not a multiple of {self.out_multiple}"
        if group > 0 and group % self.group_multiple:
            return f"group_size {group} is not a multiple of {self.group_multiple}"
        return None


@dataclass(frozen=True)
class Target:
    """One machine.

    Attributes:
        title: its name for people.
        memory: GB of device memory, as sold; None: depends on the machine.
        capability: CUDA compute capability; None: not a CUDA device.
        architecture: AMD's name of the architecture; None: not an AMD GPU.
        bandwidth: GB/s of device memory; None: depends on the machine.
        rates: type of the operands (bf16, fp8, int8, fp4) -> dense matrix arithmetic in 10^12 operations a second; types that
            the machine lacks, or for which no source was found, are left out.
        schemes: goal -> scheme that suits it best; `None` -> scheme to take without a goal.
        kernels: format -> the kernel that vLLM picks.
        weight_only: format -> why it is computed in 16 bits there all the same, naming the alternative; it has a kernel.
        refused: format -> why it does not run, naming the alternative.
        limits: format -> shapes that its kernel takes.
        experts_refused: why it runs no quantized experts of a mixture; None: it does.
        head_sizes: sizes of an attention head that run; None: no limit known.
        kv_fp8: what an FP8 KV cache needs; `kv_fp8_refused`: the reason why there is none; `kv_instead`: what is better there.
        vision_attention_fp8: what FP8 attention in the vision tower needs there; empty: vLLM has none.
    """

    title: str
    memory: float | None
    capability: tuple[int, int] | None
    schemes: Mapping[Goal | None, str]
    kernels: Mapping[str, str]
    bandwidth: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    architecture: str | None = None
    weight_only: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    experts_refused: str | None = None
    head_sizes: frozenset[int] | None = None
    kv_fp8: str = ""
    kv_fp8_refused: str | None = None
    kv_instead: str = ""
    vision_attention_fp8: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.capability is None and self.architecture is None

    def kernel(self, key: str) -> str | None:
        """The kernel that vLLM picks for a format, or None where it does not run."""
        if key in self.refused:
            return None
        return self.kernels.get(key, self.kernels.get(key.removesuffix("-static")))

    def refusal(self, key: str) -> str | None:
        """The reason why this machine does not run the format, or why it gains nothing; None when it runs with gain.

        The reason names an alternative. Formats that run weight-only have a `kernel` all the same: a checkpoint that exists
        can be served.
        """
        reason = self.refused.get(key) or self.weight_only.get(key)
        if reason:
            return f"{self.title} {reason}"
        if self.kernel(key):
            return None
        return f"{self.title} has no known kernel for {key}; use {self.schemes[None]}"

    def experts_refusal(self, scheme: Any) -> str | None:
        """The reason why this machine does not run experts of a mixture in a `numerics.Scheme`, or None.

        What vLLM's kernels for experts lack everywhere was asked of vLLM 0.32 with a pretended platform, as for linear layers:
        `fused_moe/oracle/w4a8_int8.py` (Arm only), `int_wna16.py`, `compressed_tensors_moe_w8a8_fp8.py`.
        """
        if scheme is None:
            return None
        key, weights = format_key(scheme), scheme.weights
        why = self.experts_refused
        if key == "w4a8-int":
            why = "has no kernel for experts of 4 bits with 8-bit activations; use 16-bit activations (awq, gptq, mbq)"
        elif key == "w8a16" and not weights.symmetric:
            why = "runs experts of 8 bits with symmetric weights only; use --set options.symmetric=true"
        elif key == "w8a8-fp-static" and weights.group == -1:
            why = "wants one scale for a matrix of an expert whose inputs have one; use --set options.weights=tensor, or fp8"
        return f"{self.title} {why}" if why else None


def get(name: str) -> Target:
    """Look a target up by its name. Raises `UserError` with the closest name when there is none."""
    return REGISTRY.get(REGISTRY.name(name)).TARGET


def format_key(scheme: Any) -> str:
    """The format of a `numerics.Scheme`; `bf16` for None, the scheme that quantizes nothing."""
    if scheme is None:
        return "bf16"
    weights, activations = scheme.weights, scheme.activations
    if weights.mx:
        return f"w{weights.bits}a{activations.bits if activations else 16}-mx"
    if activations is None:
        if weights.kind == "float":
            return f"w{weights.bits}a16-fp"
        return f"w{weights.bits}a16" if weights.bits in (4, 8) else "wNa16"
    kind = "int" if activations.kind == "int" else "fp" if activations.dynamic else "fp-static"
    kind = "fp-block" if weights.rows > 1 else kind
    return f"w{weights.bits}a{activations.bits}-{kind}"


def default_scheme(name: str, goal: Goal | None) -> str:
    """The scheme a target is served best with."""
    return get(name).schemes[goal]


def refuse(
    name: str,
    scheme: Any,
    kv_cache: str | None = None,
    parts: Mapping[str, Any] = _NO_PARTS,
    vision_attention: str | None = None,
) -> None:
    """Raise `UserError` with the first of `refusals`."""
    for reason in refusals(name, scheme, kv_cache, parts, vision_attention):
        raise UserError(reason)


def refusals(
    name: str,
    scheme: Any,
    kv_cache: str | None = None,
    parts: Mapping[str, Any] = _NO_PARTS,
    vision_attention: str | None = None,
) -> list[str]:
    """All reasons why the target can't run what is asked for; empty if it can.

    Args:
        scheme: number formats of the decoder's linear layers; `parts`: those of other parts of the model, by their names.
        kv_cache, vision_attention: "fp8" for a KV cache and for the tower's attention in FP8, or None.
    """
    target = get(name)
    reasons = [target.refusal(format_key(scheme))]
    reasons += [f"{part}: {reason}" for part, other in parts.items() if (reason := target.refusal(format_key(other)))]
    if kv_cache:
        reasons.append(target.kv_fp8_refused)
    if vision_attention and not target.vision_attention_fp8:
        reasons.append(f"{target.title} has no FP8 attention for vision towers in vLLM; leave --vision-attention out")
    return [reason for reason in reasons if reason]
