"""TensorRT-LLM's OpenAI-compatible server with its PyTorch backend: a shell script and its YAML options.

Options, architectures and formats were read in TensorRT-LLM's repository (`cli/serve.py`,
`models/quant_config_utils.py`, `docs/source/models/supported-models.md`, `features/guided-decoding.md`, snapshots of
2026) on 2026-11-22. Of compressed-tensors it reads FP8 by channel with activations by token, FP8 in blocks of 128,
and NVFP4, and several groups only if their targets are names. It checks only the bits of 8-bit weights and not their
type, so that it would read INT8 as FP8; INT8 is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.export.launch._template import documents, server_script
from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "tensorrt-llm", True
TITLE = "TensorRT-LLM"
CHECKED = "options checked against TensorRT-LLM's source by hand on 2026-11-22, not run"

NO_REUSE = {"Gemma3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
"""Architectures that its table of features says No or N/A to KV cache reuse of, and not Yes to chunked prefill."""


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`tensorrt-llm.sh` and its options, `tensorrt-llm.yaml`."""
    reuse = facts.architecture not in NO_REUSE
    options = {
        "kv_cache_config": {"enable_block_reuse": reuse, "free_gpu_memory_fraction": 0.9},
        "enable_chunked_prefill": reuse,
        "guided_decoding_backend": "xgrammar",
    }
    address = '--host "${HOST:-127.0.0.1}" --port "${PORT:-8000}"'
    settings = '--config "$(dirname -- "$0")/tensorrt-llm.yaml"'
    start = 'trtllm-serve "$MODEL" --backend pytorch'
    names = {"length": "--max_seq_len", "gpus": "--tp_size", "code": "--trust_remote_code"}
    text = "# Options of trtllm-serve --config; the type of the KV cache is read from config.json.\n"
    return {
        "tensorrt-llm.sh": server_script(facts, TITLE, start, [], settings, address, **names),
        "tensorrt-llm.yaml": text + documents(options),
    }
