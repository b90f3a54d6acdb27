"""A Modelfile, from which `ollama create` makes a model, for checkpoints written as GGUF.

Instructions are those of Ollama's `docs/modelfile.mdx` and `parser/parser.go`, read on 2026-11-27. There is no TEMPLATE: since
0.30 Ollama runs `llama-server`, which renders chats by the template in model.gguf, and a Go template would replace that.
Sampling is what transformers does by default with the checkpoint's generation_config.json; Ollama's defaults differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "llamacpp", False
TITLE = "Ollama 0.30 or newer"
CHECKED = "read by our tests with a parser of its format; not run in Ollama"
FILE = """# {name} in Ollama. Written by vlmcompress; edit it freely.
FROM ../model.gguf
FROM ../mmproj.gguf
REQUIRES 0.30.0
{parameters}"""
SAMPLED = {"temperature": 1.0, "top_k": 50.0, "top_p": 1.0, "min_p": 0.0}
"""Sampling settings of the same name in transformers and Ollama -> transformers' default."""


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`Modelfile`."""
    settings = facts.generation
    chosen = {name: settings.get(name, default) for name, default in SAMPLED.items()}
    chosen = chosen if settings.get("do_sample") else {"temperature": 0.0}
    if penalty := settings.get("repetition_penalty"):
        chosen |= {"repeat_penalty": penalty, "repeat_last_n": -1}  # of all tokens, as in transformers
    lines = [f"PARAMETER {name} {value:g}\n" for name, value in chosen.items()]
    lines += [f'PARAMETER stop "{text}"\n' for text in facts.stops]
    return {"Modelfile": FILE.format(name=facts.name, parameters="".join(lines))}


def command(facts: LoadFacts) -> str:
    """The line that makes a model of it, from the checkpoint's folder."""
    return f"ollama create {facts.resource} -f serve/Modelfile"
