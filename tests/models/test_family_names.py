"""A family is one file in each plug folder: nothing else in the package goes by a family's name."""

from __future__ import annotations

import ast

from tests.kit.places import ROOT
from vlmcompress.models import all_specs

PACKAGE = ROOT / "vlmcompress"
PLUGS = ("models/families", "export/gguf/families", "export/openvino/families", "engines/vllm/plugin")
"""Folders with a file for each family."""


def test_no_code_goes_by_a_familys_name() -> None:
    """String literals that are a family's name or a model type, whole; docstrings and messages may speak of families."""
    listed = {name for spec in all_specs() for name in (spec.family, *spec.model_types)}
    names = listed | {name.replace("-", "_") for name in listed} | {name.replace("_", "-") for name in listed}
    places = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(path.is_relative_to(PACKAGE / plug) for plug in PLUGS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not places, "move it into the family's file, as a field of its spec:\n" + "\n".join(places)
