"""What the contract of folders in pyproject.toml cannot say of imports.

`lint-imports` (in `scripts/test`) keeps imports going down from folder to folder. Here: no circle between files, algorithms
know only torch, the engine and llm-compressor stay where they belong, private modules stay within their package.
"""

from __future__ import annotations

import ast
import sys

import grimp
import pytest

from tests.kit.imports import WAYS
from tests.kit.places import ROOT

PACKAGE = ROOT / "vlmcompress"
GRAPH = grimp.build_graph("vlmcompress", include_external_packages=True)
GRAPH.remove_import(
    importer="vlmcompress", imported="vlmcompress.api"
)  # the public interface, which is imported lazily
MODULES = sorted(name for name in GRAPH.modules if name.startswith("vlmcompress"))
PURE = {"torch", "typing_extensions", *sys.stdlib_module_names}
KNOWN = ("numerics", "utils.registry", "utils.errors")
"""What algorithms may import of the package, next to their own folder."""


def imports(module: str) -> set[str]:
    """What a module imports, wherever the statement stands."""
    return GRAPH.find_modules_directly_imported_by(module)


def below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_modules_that_exclude_a_test_from_quick_exist():
    assert {name for name in WAYS if name.startswith("vlmcompress.")} <= {*MODULES}


def test_the_root_holds_the_interface_alone():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "api"}


def test_where_the_engine_may_be_imported():
    importers = GRAPH.find_modules_that_directly_import("vllm")
    assert importers and all(below(module, "vlmcompress.engines.vllm") for module in importers), importers
    assert "llmcompressor" not in GRAPH.modules


@pytest.mark.parametrize("folder", ["quantization.schemes", "reduction.methods", "numerics"])
def test_algorithms_know_only_torch(folder):
    """And files of kernels Triton, which are imported where there is a GPU."""
    for module in MODULES:
        if below(module, f"vlmcompress.{folder}"):
            for name in imports(module):
                inside = below(name, f"vlmcompress.{folder}", *(f"vlmcompress.{package}" for package in KNOWN))
                kernels = name.split(".")[0] == "triton" and module.endswith("_kernels")
                assert inside or kernels or name.split(".")[0] in PURE, f"{module} imports {name}"


def test_private_modules_stay_within_their_package():
    for module in MODULES:
        for name in imports(module):
            package, _, last = name.rpartition(".")
            private = name.startswith("vlmcompress.") and last.startswith("_") and not last.startswith("__")
            assert not private or below(module, package), f"{module} imports {name}"


def test_no_circle_between_files():
    """Removing, again and again, what imports nothing that is left, removes everything."""
    left = {module: {name for name in imports(module) if name in MODULES} for module in MODULES}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"in circles, or above one: {sorted(left)}"


def test_every_import_is_a_declared_dependency():
    for module in MODULES:
        assert not any(below(name, "eval", "tests", "scripts") for name in imports(module)), module


def test_no_test_imports_a_test():
    """What tests share is in `tests/kit`, which is imported by its whole name."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    bare = {path.stem for path in files} - sys.stdlib_module_names
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                inside = name.split(".")[0] == "tests"
                assert below(name, "tests.kit") if inside else name not in bare, f"{file.relative_to(ROOT)}: {name}"
