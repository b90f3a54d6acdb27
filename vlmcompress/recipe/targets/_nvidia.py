"""What NVIDIA generations have in common: the kernels that vLLM 0.32 picks there, as `tests/recipe/test_kernels.py` asks it.

In the order in which vLLM tries them, of those that it takes anywhere: Machete (Hopper; whole rows and groups of 64 or 128,
in % 64 = 0, out % 128 = 0), Marlin (whole rows and groups of 32, 64 or 128; 8 bits symmetric only), and Humming, a package
that vLLM's wheel for CUDA requires and that takes all integers.
"""

from __future__ import annotations

from vlmcompress.recipe.targets import Limit, Target

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
# `compressed_tensors_w4a8_int.py` hands the kernel 16-bit activations; `compressed_tensors_wNa8.py`, for packed weights, tells
# Humming to round them, but Marlin or Machete is picked before it.
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
_ROUNDS = {
    "w4a16-mx": "rounds the inputs of MXFP4 weights, whatever the checkpoint says of them; use --set options.activations=4"
}
_BLOCKS = "w8a8-fp-block"


def _with(fast: str, *reasons: dict[str, str]) -> dict[str, str]:
    """Reasons that name the scheme for throughput."""
    return {key: reason.format(fast=fast) for part in reasons for key, reason in part.items()}


_TOWER = "cuDNN 9.17.1 or later in FlashInfer"  # `is_flashinfer_cudnn_fp8_prefill_attn_supported`

# A100, A10G, GeForce 30 and Jetson Orin.
AMPERE = Target(
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
    refused=_with("int8", _ON_HOPPER),
    kv_fp8="FlashInfer only (--attention-backend FLASHINFER), heads of 64, 128, 256 or 512",
    kv_instead="serve with --kv-cache-dtype int8_per_token_head (Triton attention; it needs no scales)",
)

# L40S and GeForce 40.
ADA = Target(
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
    refused=_with("fp8", _ON_HOPPER),
    kv_fp8="FlashInfer or Triton attention",
)

# H100 and H200.
HOPPER = Target(
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

# B200 and GB200. vLLM picks its CUTLASS kernel for INT8 and then dies in it: "Int8 not supported on SM100. Use FP8 quantization
# instead, or run on older arch" (`csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp`; vllm #54311).
BLACKWELL = Target(
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
    refused={
        **_with("fp8", _ON_HOPPER),
        **_ROUNDS,
        "w8a8-int": "ends in an error when vLLM starts, as its CUTLASS kernel has no INT8 there; use fp8 for throughput or awq "
        "for memory (an INT8 checkpoint that exists starts with VLLM_DISABLED_KERNELS=CutlassInt8ScaledMMLinearKernel, "
        "in a Triton kernel)",
    },
    kv_fp8="FlashInfer",
    vision_attention_fp8=_TOWER,
)

_SMALL_FP4 = {"w4a4-fp": "FlashInfer CUTLASS", "w4a16-fp": "Marlin", "w8a8-mx": "FlashInfer CUTLASS"}

# GeForce 50: small enough that 4 bits are the better default.
BLACKWELL_GEFORCE = Target(
    title="Blackwell GeForce",
    memory=None,
    capability=(12, 0),
    schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={**BLACKWELL.kernels, **_SMALL_FP4},
    weight_only=_W4A8,
    refused=BLACKWELL.refused,
    kv_fp8="FlashInfer or Triton attention",
    vision_attention_fp8=_TOWER,
)

# Jetson Thor: its memory is so slow beside its arithmetic that 4 bits are the better default.
THOR = Target(
    title="Blackwell Jetson",
    memory=None,
    capability=(11, 0),
    schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "fp8"},
    kernels={**BLACKWELL.kernels, **_SMALL_FP4, _BLOCKS: "CUTLASS block FP8"},
    weight_only=_W4A8,
    refused=BLACKWELL.refused,
    kv_fp8="FlashInfer or Triton attention",
    vision_attention_fp8=_TOWER,
)
