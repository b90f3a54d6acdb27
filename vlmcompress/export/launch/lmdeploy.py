"""LMDeploy's OpenAI-compatible server with its TurboMind engine, as a shell script.

Flags, architectures and formats were read in LMDeploy 0.18.0 (`cli/serve.py`, `turbomind/supported_models.py`,
`turbomind/converter.py`) on 2026-11-22: its reader looks at `config_groups.group_0` alone and takes pack-quantized
4-bit integers in groups of 32 or 128; AWQ and GPTQ in groups of 128 (GPTQ symmetric). It falls back to its PyTorch
engine silently if TurboMind does not support the architecture, so such models are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.export.launch._template import server_script
from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "lmdeploy", True
TITLE = "LMDeploy 0.18.0"
CHECKED = "flags read by LMDeploy 0.18.0's own parser and source, by hand on 2026-11-22; not run"


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`lmdeploy.sh`."""
    flags = ["--backend", "turbomind", "--model-name", facts.name, "--enable-prefix-caching"]
    flags += ["--model-format", facts.method] if facts.method else []
    address = '--server-name "${HOST:-127.0.0.1}" --server-port "${PORT:-23333}"'
    start = 'lmdeploy serve api_server "$MODEL"'
    return {"lmdeploy.sh": server_script(facts, TITLE, start, flags, address, length="--session-len", gpus="--tp")}
