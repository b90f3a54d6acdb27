"""What a file imports, read from its source."""

from __future__ import annotations

import ast
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


@cache
def imported(file: Path) -> list[str]:
    """What a file imports, also within functions: `a.b` and `a.b.c` for `from a.b import c`."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
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
