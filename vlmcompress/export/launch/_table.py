"""The launch files by name: which engine they start, how they were checked, and what writes them.

Servers that only differ in their flags are rows of `SERVERS`. No flag is guessed. They were read in SGLang 0.5.23
(`srt/arg_groups/fields`) on 2026-11-22, in llama.cpp (`common/arg.cpp`) on 2026-11-25 and Ollama (`docs/modelfile.mdx`,
`parser/parser.go`) on 2026-11-27; vLLM's and its containers' sources stand in `vllm` and `containers`. What an engine reads
of a checkpoint is `export.readers`' to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from vlmcompress.export.launch import containers, vllm
from vlmcompress.export.launch._script import address, execute, script
from vlmcompress.export.readers import LoadFacts


@dataclass(frozen=True)
class Launcher:
    """One way to start a checkpoint.

    Attributes:
        engine: the engine that is started, by its name in `export.readers`.
        title: the engine's display name, with the version that the files are for.
        checked: how the files were checked.
        files: facts -> path relative to `serve/` -> text.
        command: the command that uses them, run in the checkpoint's folder, in which `{resource}` stands for the name.
        gpus: whether the files are only for NVIDIA GPUs.
        problem: why there are no files although the engine loads the checkpoint, as the end of a sentence.
    """

    engine: str
    title: str
    checked: str
    files: Callable[[LoadFacts], Mapping[str, str]]
    command: str
    gpus: bool = False
    problem: Callable[[LoadFacts], str | None] = lambda facts: None


@dataclass(frozen=True)
class Server:
    """An engine's server: its title, how its flags were checked, and its flags.

    `start` is in shell syntax; `port` the default one; `flags` for every checkpoint; then by name the engine's own for the
    context length, an FP8 cache, the number of GPUs and running the checkpoint's code, empty where it has none.
    """

    title: str
    checked: str
    start: str
    port: int
    flags: Callable[[LoadFacts], list[str]] = lambda facts: []
    length: str = ""
    cache: tuple[str, ...] = ()
    gpus: str = ""
    code: str = ""


SERVERS = {
    "llamacpp": Server(
        "llama.cpp",
        "the files are loaded by our tests in llama.cpp's server (xllamacpp); flags by hand on 2026-11-25",
        'llama-server --model "$MODEL/model.gguf" --mmproj "$MODEL/mmproj.gguf"',
        8080,
        lambda facts: [
            *("--alias", facts.name, "--jinja"),
            *(
                ["--image-min-tokens", f"{limits[0]}", "--image-max-tokens", f"{limits[1]}"]
                if (limits := facts.image_tokens)
                else ()
            ),
        ],
    ),
    "sglang": Server(  # radix (prefix) caching and structured output are on by default
        "SGLang 0.5.23",
        "flags read by SGLang 0.5.23's own parser and source, by hand on 2026-11-22; not run",
        'python3 -m sglang.launch_server --model-path "$MODEL"',
        30000,
        lambda facts: [
            *("--served-model-name", facts.name),
            *("--limit-mm-data-per-request", json.dumps({"image": vllm.IMAGES, "video": 0})),
            # Without it Qwen3-VL's table of positions is resampled otherwise where the encoder runs in CUDA graphs
            # (models/qwen3_vl.py: _torch_interp_indices); other models do not read it.
            "--enable-precise-embedding-interpolation",
        ],
        length="--context-length",
        cache=("--kv-cache-dtype", "fp8_e4m3"),
        gpus="--tp-size",
        code="--trust-remote-code",
    ),
}

# There is no TEMPLATE: since 0.30 Ollama runs `llama-server`, which renders chats by the template in model.gguf.
_MODELFILE = """# {name} in Ollama. Written by vlmcompress; edit it freely.
FROM ../model.gguf
FROM ../mmproj.gguf
REQUIRES 0.30.0
{parameters}"""
SAMPLED = {"temperature": 1.0, "top_k": 50.0, "top_p": 1.0, "min_p": 0.0}
"""Sampling settings of the same name in transformers and Ollama -> transformers' default; Ollama's differ."""

_OPENVINO = "ask_openvino.py"  # not openvino.py, which the script itself would import
_SCRIPT = '''"""{name} in OpenVINO: python serve/{file} "What is shown?" IMAGE ...

Written by vlmcompress; edit it freely. MODEL and DEVICE (CPU, GPU) may be set in the environment.
"""

import os
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from PIL import Image

os.environ.setdefault("VISION_PREPROCESS", "CPP")  # images scaled as transformers scales them
model = Path(os.environ.get("MODEL", Path(__file__).parents[1]))
question, *paths = sys.argv[1:]
images = [openvino.Tensor(np.array(Image.open(path).convert("RGB"))[None]) for path in paths]
pipeline = openvino_genai.VLMPipeline(model, os.environ.get("DEVICE", "CPU"))
answer = pipeline.generate(question, images=images, max_new_tokens=256, do_sample=False)
print(answer.texts[0])
'''


def _server(name: str, facts: LoadFacts) -> dict[str, str]:
    """The script of a row of `SERVERS`."""
    server = SERVERS[name]
    flags = server.flags(facts)
    flags += [server.length, str(facts.max_len)] if server.length and facts.max_len else []
    flags += server.cache if facts.kv_fp8 else ()
    flags += [server.gpus, str(facts.gpus)] if server.gpus and facts.gpus > 1 else []
    flags += [server.code] if server.code and facts.code else []
    command = execute(server.start, flags, address(server.port))
    return {f"{name}.sh": script(f"{facts.name} in {server.title}", command)}


def _ollama(facts: LoadFacts) -> dict[str, str]:
    """A Modelfile, which samples as transformers does by default with the checkpoint's generation_config.json."""
    settings = facts.generation
    chosen = {name: settings.get(name, default) for name, default in SAMPLED.items()}
    chosen = chosen if settings.get("do_sample") else {"temperature": 0.0}
    if penalty := settings.get("repetition_penalty"):
        chosen |= {"repeat_penalty": penalty, "repeat_last_n": -1}  # of all tokens, as in transformers
    lines = [f"PARAMETER {name} {value:g}\n" for name, value in chosen.items()]
    lines += [f'PARAMETER stop "{text}"\n' for text in facts.stops]
    return {"Modelfile": _MODELFILE.format(name=facts.name, parameters="".join(lines))}


_MANIFESTS = "structure and vLLM's flags checked in our tests, not run"
_LAUNCHERS = {
    **{
        name: Launcher(
            name, server.title, server.checked, partial(_server, name), f"sh serve/{name}.sh", gpus=name != "llamacpp"
        )
        for name, server in SERVERS.items()
    },
    "compose": Launcher(
        "vllm", "Docker Compose", _MANIFESTS, containers.compose, "docker compose -f serve/compose.yaml up", gpus=True
    ),
    "kubernetes": Launcher(
        "vllm", "Kubernetes", _MANIFESTS, containers.kubernetes, "kubectl apply -f serve/kubernetes.yaml", gpus=True
    ),
    "ollama": Launcher(
        "llamacpp",
        "Ollama 0.30 or newer",
        "its instructions read in Ollama's documentation by hand on 2026-11-27; not run in Ollama",
        _ollama,
        "ollama create {resource} -f serve/Modelfile",
    ),
    "openvino": Launcher(
        "openvino",
        "OpenVINO GenAI",
        "run by our tests in openvino_genai 2026.4 on a CPU",
        lambda facts: {_OPENVINO: _SCRIPT.format(name=facts.name, file=_OPENVINO)},
        f'python serve/{_OPENVINO} "What is shown?" IMAGE',
    ),
    "vllm": Launcher("vllm", vllm.TITLE, "executed by our tests on vLLM's CPU build", vllm.scripts, "sh serve/vllm.sh"),
    "vllm-split": Launcher(
        "vllm",
        f"{vllm.TITLE}, encode, prefill and decode apart",
        "encode and prefill-decode executed by our tests on vLLM's CPU build, the others read by vLLM's own parser",
        vllm.split,
        'export STORE="$(mktemp -d -p /dev/shm)"; sh serve/vllm-split.sh encode & sh serve/vllm-split.sh prefill-decode',
        problem=vllm.split_problem,
    ),
}
LAUNCHERS: Mapping[str, Launcher] = dict(sorted(_LAUNCHERS.items()))
