"""Which part may import which: algorithms know only torch, the engine and llm-compressor stay where they belong."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "vlmcompress").rglob("*.py"))
PURE = {"torch", *sys.stdlib_module_names}


def imported(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, wherever the statement stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def inside(path: Path, *folders: str) -> bool:
    return any(path.is_relative_to(ROOT / "vlmcompress" / folder) for folder in folders)


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dependencies(path):
    for name in imported(path):
        where = f"{path.relative_to(ROOT)} imports {name}"
        if below(name, "vllm"):
            assert inside(path, "engines/vllm"), where
        if below(name, "llmcompressor"):
            assert inside(path, "calibration") or path.name in ("pipeline.py", "modifiers.py"), where
        assert not below(name, "eval", "tests", "scripts"), where
        if inside(path, "quantizers", "reducers", "allocation") or path.stem in (
            "numerics",
            "balance",
            "stats",
            "kv_range",
            "reservoir",
        ):
            pure = {"numerics", "balance", "stats", "reservoir", "registry", path.parent.name}  # and each other
            allowed = below(name, *(f"vlmcompress.{module}" for module in pure))
            assert name.split(".")[0] in PURE or allowed, where
        if path.stem == "predict":
            allowed = below(name, "vlmcompress.numerics", "vlmcompress.quantizers", "vlmcompress.statistics.inputs")
            assert name.split(".")[0] in PURE or allowed, where
        if inside(path, "models", "exporters", "targets"):
            assert not below(name, "vlmcompress.compression.quantize", "vlmcompress.cli", "vlmcompress.calibration"), (
                where
            )
        if path.name not in ("cli.py", "__main__.py"):
            assert not below(name, "vlmcompress.cli"), where


@pytest.mark.parametrize("folder", ["vlmcompress", "tests", "eval", "scripts"])
def test_files_and_functions_are_short(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path.relative_to(ROOT)} has more than 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.relative_to(ROOT)}: {node.name} is over 60 lines"
