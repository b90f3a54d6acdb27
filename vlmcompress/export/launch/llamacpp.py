"""llama.cpp's OpenAI-compatible server, as a shell script, for checkpoints written as GGUF.

Flags are those of `llama-server` (llama.cpp, `common/arg.cpp`, read on 2026-11-25); the two files were loaded by the package
`xllamacpp` 2026.10, which has the same server inside. Images have as many tokens as the checkpoint's processor gives them:
llama.cpp has limits of its own for families whose images keep their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlmcompress.export.launch._template import execute, script
from vlmcompress.export.readers import LoadFacts

ENGINE, GPUS = "llamacpp", False
TITLE = "llama.cpp"
CHECKED = "the files are loaded by our tests in llama.cpp's server (xllamacpp); flags by hand on 2026-11-25"


def files(facts: LoadFacts) -> Mapping[str, str]:
    """`llamacpp.sh`."""
    flags = ["--alias", facts.name, "--jinja"]
    address = '--host "${HOST:-127.0.0.1}" --port "${PORT:-8080}"'
    start = 'llama-server --model "$MODEL/model.gguf" --mmproj "$MODEL/mmproj.gguf"'
    return {"llamacpp.sh": script(f"{facts.name} in {TITLE}", execute(start, flags, address))}
