"""The cache that `vlmcompress plan` works out from a config is the one that vLLM logs when it starts.

Each shape is a tiny model with random weights of its own (`load_format=dummy`): what it caches is that of its config. vLLM
starts with each of them in one process, in 1 GiB, and its lines "KV cache size: N tokens, Maximum concurrency for L tokens
per request: X" are compared with our N and X.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers as T

from tests.kit import tiny
from tests.kit.tiny import qwen3_vl
from tests.kit.tiny._text import GQA
from tests.kit.tiny.qwen2_5_vl import TOKEN_IDS
from vlmcompress.engines.vllm import environment, interpreter, served_model
from vlmcompress.engines.vllm.served_model import read_served_model
from vlmcompress.evaluation.capacity import cache_pool, weight_bytes
from vlmcompress.models import quiet_transformers
from vlmcompress.recipe.targets import get_target

LENGTH, BATCHED = 1536, 1024
KEYS = {"auto": None, "fp8": 1}
WORKER = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
for job in json.loads(sys.argv[1]):
    print("SHAPE", job.pop("name"), flush=True)
    model = LLM(load_format="dummy", enforce_eager=True, **job)
    model.llm_engine.engine_core.shutdown()
    del model
"""
LINE = re.compile(r"KV cache size: ([\d,]+) tokens, Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")


@dataclass(frozen=True)
class Shape:
    """One model: the family whose processor it has, what its text config has instead, the type of its cache, and who drafts."""

    family: str
    text: dict
    cache: str = "auto"
    speculative: tuple[str, int] | None = None


ROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 10000.0}
WIDE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 7}
LONG = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 13}
PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
DELTA = {
    "mamba_ssm_dtype": "float32",  # as released models have it; without it vLLM's choice depends on the processor
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}
MTP = {"mtp_num_hidden_layers": 1}
SHAPES = {
    "every head its own keys": Shape("llava", {}),
    "wide, grouped heads": Shape("qwen2_5_vl", {**WIDE, "rope_parameters": ROPE}),
    "the same in FP8": Shape("qwen2_5_vl", {**WIDE, "rope_parameters": ROPE}, "fp8"),
    "windows in all blocks": Shape("llava_next", {"num_hidden_layers": 3, "sliding_window": 256}),
    "windows in 11 of 13": Shape("gemma3", {**LONG, "sliding_window": 192, "layer_types": (PATTERN * 3)[:13]}),
    "short convolutions": Shape("lfm2_vl", {}),
    "Gated DeltaNet in 3 of 4": Shape("qwen3_5", {**DELTA, "num_hidden_layers": 4}),
    "the same, drafting by mtp": Shape("qwen3_5", {**DELTA, **MTP, "num_hidden_layers": 4}, speculative=("mtp", 2)),
}


def folder(shape: Shape, into: Path) -> Path:
    """Write config and processor of a shape, without weights."""
    if shape.family == "qwen3_5":
        return _qwen3_5(shape, into)
    with quiet_transformers():
        tiny.build(shape.family, into)
    (into / "model.safetensors").unlink()
    config = json.loads((into / "config.json").read_text())
    if "num_hidden_layers" in shape.text:
        config["text_config"].pop("layer_types", None)
    config["text_config"].update(shape.text)
    if "out_hidden_size" in config["vision_config"]:
        config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    (into / "config.json").write_text(json.dumps(config))
    return into


def _qwen3_5(shape: Shape, into: Path) -> Path:
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0, "mrope_interleaved": True}
    text = {**GQA, "head_dim": 32, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}, **shape.text}
    vision = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 128}
    config = T.Qwen3_5Config(
        text_config={**text, "dtype": "bfloat16"},
        vision_config={**vision, "num_position_embeddings": 256},
        architectures=["Qwen3_5ForConditionalGeneration"],
        dtype="bfloat16",
        **TOKEN_IDS,
    )
    with quiet_transformers():
        config.save_pretrained(into)
        qwen3_vl.processor().save_pretrained(into)
    return into


def ours(shape: Shape, path: Path, space: int) -> tuple[int, str]:
    """Tokens of the cache and requests at once, as vLLM writes them, from config.json alone."""
    import torch

    with torch.device("meta"):
        model = T.AutoModelForImageTextToText.from_config(T.AutoConfig.from_pretrained(path))
    usual = cache_pool.defaults(get_target("cpu"))
    described, drafts = served_model.describe(model), shape.speculative[1] if shape.speculative else 0
    if shape.speculative:
        described = weight_bytes.speculation_of(read_served_model(path), *shape.speculative).added(described)
    layers = described.layers(1, KEYS[shape.cache], drafts=drafts)
    pool = cache_pool.pool(layers, usual.block, usual.kernel, drafts=drafts)
    flight = usual.batches * BATCHED
    requests = float(pool.requests(space, LENGTH, flight))
    return int(requests * LENGTH), f"{requests:.2f}"


def theirs(shapes: dict[str, Shape], paths: dict[str, Path], gib: int) -> dict[str, tuple[int, str]]:
    """What vLLM logs for each shape."""
    jobs = [
        {
            "name": name,
            "model": str(paths[name]),
            "max_model_len": LENGTH,
            "max_num_batched_tokens": BATCHED,
            "kv_cache_dtype": shape.cache,
            "limit_mm_per_prompt": {"image": 1, "video": 0},
            "speculative_config": shape.speculative
            and dict(zip(("method", "num_speculative_tokens"), shape.speculative, strict=True)),
        }
        for name, shape in shapes.items()
    ]
    variables = {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_LOGGING_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}
    command = [interpreter(), "-c", WORKER, json.dumps(jobs)]
    done = subprocess.run(
        command, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    parts = dict(part.split("\n", 1) for part in done.stdout.split("SHAPE ")[1:])
    figures = {}
    for name in shapes:
        line = LINE.search(parts.get(name, ""))
        if line is None or done.returncode:
            raise AssertionError(f"vLLM did not start with '{name}':\n{done.stdout[-4000:]}")
        assert line[2] == f"{LENGTH:,}", line[0]
        figures[name] = (int(line[1].replace(",", "")), line[3])
    return figures


@pytest.mark.engine
@pytest.mark.slow
def test_plan_is_what_vllm_logs(tmp_path):
    """All shapes: windows, FP8 where the CPU build has such a cache (AVX-512), short convolutions, Gated DeltaNet, drafts."""
    fp8 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    shapes = {name: shape for name, shape in SHAPES.items() if fp8 or shape.cache == "auto"}
    paths = {name: folder(shape, tmp_path / str(index)) for index, (name, shape) in enumerate(shapes.items())}
    planned = {name: ours(shape, paths[name], cache_pool.GIB) for name, shape in shapes.items()}
    assert planned == theirs(shapes, paths, 1)
