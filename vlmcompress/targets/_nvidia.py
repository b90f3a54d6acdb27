"""What NVIDIA generations have in common. vLLM 0.32 on CUDA falls back to Humming for integer formats Marlin lacks."""

from __future__ import annotations

from vlmcompress.targets import Target

_WEIGHT_ONLY = {"bf16": "BF16", "w4a16": "Marlin", "w8a16": "Marlin", "wNa16": "Humming"}
_FP8_WEIGHT_ONLY = (
    "has no FP8 tensor cores: FP8 checkpoints run weight-only there; use int8 for throughput or awq for memory"
)
# vLLM's `compressed_tensors_w4a8_int.py` asks for a kernel of the type int4: CUTLASS W4A8 has it for FP8 activations, Machete,
# Marlin and Triton don't, and Humming (optional) says nothing of the type.
_NO_W4A8 = {
    "w4a8-int": "has no kernel for 4-bit weights with INT8 activations in vLLM; use 16-bit activations (awq, gptq, mbq)"
}

# A100 and GeForce 30.
AMPERE = Target(
    title="Ampere",
    memory=None,
    capability=(8, 0),
    schemes={None: "awq", "memory": "awq", "throughput": "int8"},
    kernels={**_WEIGHT_ONLY, "w8a8-int": "CUTLASS INT8"},
    refused={**_NO_W4A8, "w8a8-fp": _FP8_WEIGHT_ONLY},
    kv_fp8="FlashInfer only (--attention-backend FLASHINFER), heads of 64, 128, 256 or 512",
)

# L40S and GeForce 40.
ADA = Target(
    title="Ada",
    memory=None,
    capability=(8, 9),
    schemes={None: "fp8", "memory": "awq", "throughput": "fp8"},
    kernels={**_WEIGHT_ONLY, "w8a8-int": "CUTLASS INT8", "w8a8-fp": "CUTLASS FP8"},
    refused=_NO_W4A8,
    kv_fp8="FlashInfer or Triton attention",
)

# H100 and H200. Machete takes group -1, 64 or 128 with in % 64 = 0 and out % 128 = 0; Humming takes the rest.
HOPPER = Target(
    title="Hopper",
    memory=None,
    capability=(9, 0),
    schemes={None: "fp8", "memory": "awq", "throughput": "fp8"},
    kernels={
        **_WEIGHT_ONLY,
        "w4a16": "Machete, else Humming",
        "w8a16": "Machete, else Humming",
        "w8a8-int": "CUTLASS INT8",
        "w8a8-fp": "CUTLASS FP8",
    },
    refused=_NO_W4A8,
    kv_fp8="FlashAttention 3",
)

# B200. CUTLASS has no INT8 kernel from here on.
BLACKWELL = Target(
    title="Blackwell",
    memory=None,
    capability=(10, 0),
    schemes={None: "fp8", "memory": "awq", "throughput": "fp8"},
    kernels={**_WEIGHT_ONLY, "w8a8-fp": "CUTLASS FP8"},
    refused={**_NO_W4A8, "w8a8-int": "has no INT8 matrix kernel in vLLM; use fp8 for throughput or awq for memory"},
    kv_fp8="FlashInfer",
)
