"""LMDeploy's OpenAI-compatible server with its TurboMind engine, as a shell script.

Flags, architectures and formats were read in LMDeploy 0.18.0 (`cli/serve.py`, `turbomind/supported_models.py`,
`turbomind/converter.py`) on 2026-11-22: its reader looks at `config_groups.group_0` alone and takes pack-quantized
4-bit integers in groups of 32 or 128; AWQ and GPTQ in groups of 128 (GPTQ symmetric). It falls back to its PyTorch
engine without asking where TurboMind does not know the architecture, so those are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.launch._facts import Facts
from vlmcompress.launch._template import server_script

TITLE = "LMDeploy 0.18.0"
CHECKED = "flags read by LMDeploy 0.18.0's own parser and source, by hand on 2026-11-22; not run"

ARCHITECTURES = {
    *("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "InternVLForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "InternVLChatModel"),
}
SIZES = {"compressed-tensors": (32, 128), "awq": (128,), "gptq": (128,)}


def refusal(facts: Facts) -> str | None:
    """The reason why TurboMind does not load it: the reducer, the architecture, or a format."""
    absent = f"its TurboMind engine does not know {facts.architecture or 'this architecture'}"
    if reason := facts.unsupported_by(ARCHITECTURES, absent):
        return reason
    if facts.method is None:
        return None
    if facts.method not in SIZES:
        return f"its TurboMind engine does not read the format {facts.method}"
    groups = facts.groups or {}
    if len(groups) != 1 or (facts.method == "compressed-tensors" and "group_0" not in groups):
        return "it reads one config group, named group_0"
    (group,) = groups.values()
    packed = facts.method != "compressed-tensors" or group.packing == "pack-quantized"
    sizes = SIZES[facts.method]
    if (group.kind, group.bits, group.activations) != ("int", 4, None) or group.size not in sizes or not packed:
        return f"of {facts.method} it reads 4-bit integers in groups of {' or '.join(map(str, sizes))} only"
    if facts.method == "gptq" and (not group.symmetric or group.packing == "gptq_v2"):
        return "of gptq it reads symmetric weights only, with the zero points of version 1"
    return None


def files(facts: Facts) -> Mapping[str, str]:
    """`lmdeploy.sh`."""
    flags = ["--backend", "turbomind", "--model-name", facts.name, "--enable-prefix-caching"]
    flags += ["--model-format", facts.method] if facts.method else []
    address = '--server-name "${HOST:-127.0.0.1}" --server-port "${PORT:-23333}"'
    start = 'lmdeploy serve api_server "$MODEL"'
    return {"lmdeploy.sh": server_script(facts, TITLE, start, flags, address, length="--session-len", gpus="--tp")}


def command(facts: Facts) -> str:
    """The line that starts it, from the checkpoint's folder."""
    return "sh serve/lmdeploy.sh"
