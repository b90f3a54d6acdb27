"""AMD Instinct MI300X with 192 GB (ROCm, gfx942).

Figures: AMD Instinct MI300X data sheet, without sparsity. Kernels: those that vLLM 0.32 picks by itself; with AITER
(`VLLM_ROCM_USE_AITER=1` and AMD's package) it has faster ones for FP8 and INT8. FP8 weights are in the format of OCP on disk;
vLLM makes AMD's (e4m3fnuz) of them when it loads.
`kernels/linear/mixed_precision/triton_w4a16.py`: 4-bit only, groups of 32, 64, 128 or whole rows, out % 8 = 0.
`kernels/linear/nvfp4/emulation.py`: NVFP4 is undone before each product.
"""

from __future__ import annotations

from vlmcompress.recipe.targets import Limit, Target

_ONLY_4_BITS = "runs weight-only integers at 4 bits only; use awq or gptq with 4 bits, or fp8"
TARGET = Target(
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
        "w4a4-fp": "has no FP4 matrix cores: vLLM undoes NVFP4 before each product; "
        "use fp8 for throughput or gptq-plus for memory",
        "w8a8-mx": "has no kernel for MXFP8: vLLM undoes it when it loads the weights; use fp8",
    },
    refused={
        "w8a16": _ONLY_4_BITS,
        "wNa16": _ONLY_4_BITS,
        "w4a8-int": "has no kernel for 4-bit weights with INT8 activations; use 16-bit activations (awq, gptq, mbq)",
        "w4a16-fp": "has no kernel for NVFP4 weights with 16-bit activations; use gptq-plus",
        **dict.fromkeys(("w4a4-mx", "w4a16-mx"), "has no kernel for MXFP4 without AMD's package quark; use gptq-plus"),
        "w4a8-fp": "has no kernel for 4-bit weights with FP8 activations; use fp8, or gptq-plus for memory",
    },
    limits={"w4a16": Limit(out_multiple=8, group_multiple=32)},
    bandwidth=5300,
    rates={"bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9},
    kv_fp8="Triton or ROCm attention",
    vision_attention_fp8="AITER (VLLM_ROCM_USE_AITER=1)",
)
