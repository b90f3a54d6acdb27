"""SGLang's OpenAI-compatible server, as a shell script.

Flags, architectures and formats were read in SGLang 0.5.23 (`srt/arg_groups/fields`, `srt/models`,
`layers/quantization/compressed_tensors`) on 2026-11-22: weight-only integers of 4 or 8 bits in pack-quantized form,
INT8 and FP8 activations with 8-bit weights, NVFP4; scales of an FP8 KV cache are those of the checkpoint. Radix
(prefix) caching and structured output are on by default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from vlmcompress.export.launch._template import server_script
from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "sglang", True
TITLE = "SGLang 0.5.23"
CHECKED = "flags read by SGLang 0.5.23's own parser and source, by hand on 2026-11-22; not run"


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`sglang.sh`."""
    flags = ["--served-model-name", facts.name, "--limit-mm-data-per-request", json.dumps({"image": 4, "video": 0})]
    flags += ["--chunked-prefill-size", "8192", "--grammar-backend", "xgrammar", "--enable-metrics"]
    cache = ["--kv-cache-dtype", "fp8_e4m3"] if facts.kv_fp8 else []
    address = '--host "${HOST:-127.0.0.1}" --port "${PORT:-30000}"'
    start = 'python3 -m sglang.launch_server --model-path "$MODEL"'
    names = {"length": "--context-length", "gpus": "--tp-size"}
    return {"sglang.sh": server_script(facts, TITLE, start, flags, address, cache=cache, **names)}
