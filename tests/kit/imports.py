"""What a file imports, read from its source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.kit.places import ROOT

# From these a model, another process or an engine can be reached.
WAYS = {
    *("subprocess", "transformers", "vllm", "llmcompressor", "lm_eval", "ray"),
    *("vlmcompress.models", "vlmcompress.evaluation.doctor", "vlmcompress.training", "vlmcompress.quantization.plan"),
    *(f"vlmcompress.quantization.{name}" for name in ("allocate", "inputs", "run")),
    *("vlmcompress.engines", "vlmcompress.api", "vlmcompress.cli"),
    "eval.demo",
}


STATEMENT = re.compile(r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([^\n]*))", re.MULTILINE)


@cache
def imported(file: Path) -> list[str]:
    """What a file imports, also within functions and in text: `a.b` and `a.b.c` for `from a.b import c`."""
    names = []
    for module, parts, modules in STATEMENT.findall(file.read_text()):
        listed = [name.split()[0] for name in re.sub(r"[()]|#.*", "", parts or modules).split(",") if name.strip()]
        names += [module, *(f"{module}.{name}" for name in listed)] if module else listed
    return names


@cache
def reaches(file: Path) -> bool:
    """Whether a module imports one of `WAYS`, itself or through `tests.kit`."""
    for name in imported(file):
        parts = name.split(".")
        if WAYS & {".".join(parts[:end]) for end in range(1, len(parts) + 1)}:
            return True
        inside = ROOT.joinpath(*parts)
        sources = [inside.with_suffix(".py"), inside / "__init__.py"] if parts[0] == "tests" else []
        if any(source.exists() and reaches(source) for source in sources):
            return True
    return False
