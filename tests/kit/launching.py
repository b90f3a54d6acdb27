"""Facts of made-up checkpoints for launch files, files written to a folder, and programs that say how they were called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from vlmcompress.export import launch, readers
from vlmcompress.export.readers import LoadFacts, Machine, Reducer

QWEN = "Qwen2_5_VLForConditionalGeneration"
MACHINES = {
    "h100": Machine("H100", 80, (9, 0)),
    "a100": Machine("A100", 80, (8, 0)),
    "b200": Machine("B200", 192, (10, 0)),
    "cpu": Machine("CPU", None, None),
}


def group(
    kind: str, bits: int, strategy: str, size: int | None = None, inputs: dict | None = None, **extra: Any
) -> dict:
    """A config group of compressed-tensors."""
    weights = {
        "type": kind,
        "num_bits": bits,
        "strategy": strategy,
        "group_size": size,
        "symmetric": True,
        "dynamic": False,
    }
    packing = "pack-quantized" if kind == "int" and inputs is None else f"{kind}-quantized"
    return {"weights": weights, "input_activations": inputs, "format": packing, "targets": ["Linear"]} | extra


def quantized(*groups: dict, **extra: Any) -> dict:
    """A `quantization_config` of compressed-tensors."""
    named = {f"group_{number}": config for number, config in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": []} | extra


TOKEN8 = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC8 = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
INT8 = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
LOCAL4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "dynamic": "local", "symmetric": True}
FORMATS: dict[str, dict | None] = {
    "bf16": None,
    "w4-g128": quantized(group("int", 4, "group", 128)),
    "w4-g64": quantized(group("int", 4, "group", 64)),
    "w3": quantized(group("int", 3, "group", 128)),
    "int8": quantized(group("int", 8, "channel", None, INT8)),
    "w4a8": quantized(group("int", 4, "channel", None, INT8)),
    "fp8": quantized(group("float", 8, "channel", None, TOKEN8), kv_cache_scheme={"num_bits": 8, "type": "float"}),
    "mxfp4": quantized(
        group(
            "float",
            4,
            "group",
            32,
            {"type": "float", "num_bits": 4, "strategy": "group", "dynamic": True, "symmetric": True},
        )
    ),
    "embeddings": quantized(
        group("int", 8, "channel", None, targets=["re:(?:model.embed_tokens)$", "VocabParallelEmbedding"]),
        group("int", 4, "group", 128),
    ),
    "fp8-static": quantized(group("float", 8, "channel", None, STATIC8)),
    "nvfp4": quantized(group("float", 4, "tensor_group", 16, LOCAL4)),
    "mixed": quantized(group("int", 4, "group", 128), group("int", 8, "group", 128, targets=["re:.*mlp.*"])),
    "nvfp4-fp8": quantized(
        group("float", 4, "tensor_group", 16, LOCAL4, targets=["re:.*mlp.*"]),
        group("float", 8, "channel", None, TOKEN8, targets=["re:.*attn.*"]),
    ),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "gptq-v2": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq_v2"},
    "gptq-v2-asym": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "gptq-mixed": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "dynamic": {"+:.*down.*": {"bits": 8}, "-:.*visual.*": {}},
    },
    "gptq-2": {"quant_method": "gptq", "bits": 2, "group_size": 128, "sym": True},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": "FP8"},
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "gguf": {"quant_method": "gguf", "bits": 4, "group_size": 32},
    "openvino": {"quant_method": "openvino", "bits": 4, "group_size": 128},
    "unheard-of": {"quant_method": "quip"},
}
REDUCERS = {
    "blind": Reducer("divprune:0.5", takes_shares=False, served=True),
    "on demand": Reducer("divprune:0.5,keep_max=1", takes_shares=True, served=True),
    "unserved": Reducer("fastv:0.5", takes_shares=False, served=False),
}


def facts(
    form: str = "bf16",
    *,
    name: str = "my-model",
    architecture: str = QWEN,
    machine: str | None = None,
    reducer: str | None = None,
    weights: int = 10**10,
    heads: int = 28,
    **config: Any,
) -> LoadFacts:
    """Facts of a checkpoint, read from a config as `read` reads it."""
    prefix = "Vlmcompress" if reducer else ""
    text = {"max_position_embeddings": 32768, "num_attention_heads": heads}
    content = {"architectures": [prefix + architecture], "text_config": text} | config
    if FORMATS[form]:
        content["quantization_config"] = FORMATS[form]
    return readers.gather_facts(
        content,
        name,
        weights=weights,
        machine=MACHINES[machine] if machine else None,
        reducer=REDUCERS[reducer] if reducer else None,
    )


def written(folder: Path, facts: LoadFacts) -> Path:
    """Write all launch files into `folder`/serve and return that."""
    for place, text in launch.render_launch_files(facts).items():
        path = folder / "serve" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "serve"


def called(script: Path, *arguments: str, **environment: str) -> tuple[str, list[str], dict[str, str]]:
    """Run a script with every program replaced by one that prints how it was called: program, arguments, environment."""
    programs = script.parents[1] / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("vllm", "python3", "llama-server"):
        (programs / name).write_text(f"#!/bin/sh\nprintf '%s\\0' {name} \"$@\"\nprintf '\\n'\nenv -0\n")
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", str(script), *arguments], env=path | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(arguments)}: {done.stderr}"
    output, _, variables = done.stdout.partition("\0\n")
    program, *flags = output.split("\0")
    return program, flags, dict(line.split("=", 1) for line in variables.split("\0") if "=" in line)
