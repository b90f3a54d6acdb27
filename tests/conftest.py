"""`--quick` leaves out every test module from which a model, another process or an engine can be reached by imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.kit.places import ROOT

WAYS = {
    *("subprocess", "transformers", "vllm", "llmcompressor", "lm_eval"),
    *("vlmcompress.models", "vlmcompress.planning", "vlmcompress.compression", "vlmcompress.diagnosis"),
    *("vlmcompress.engines", "vlmcompress.api", "vlmcompress.modifiers", "vlmcompress.commands", "vlmcompress.cli"),
    "eval.demo",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only modules that use no model, process or engine")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Such modules are not even imported, as that alone takes most of a minute for all of them."""
    quick = config.getoption("--quick") and collection_path.match("test_*.py")
    return True if quick and reaches(collection_path) else None


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


def imported(file: Path) -> list[str]:
    """What a file imports, also within functions: `a.b` and `a.b.c` for `from a.b import c`."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
