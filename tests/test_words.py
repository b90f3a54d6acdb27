"""Names say what a thing is: locals and parameters that only say how it came are refused (see CONTRIBUTING, "Style")."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.places import ROOT

BANNED = {"one", "found", "own", "asked", "given", "known", "more", "how", "wanted", "told", "seen"}
FOLDERS = sorted(
    {file.parent for name in ("vlmcompress", "scripts", "tests", "eval") for file in (ROOT / name).rglob("*.py")}
)


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every variable, attribute of a class, parameter and `as` of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_names_say_what_a_thing_is(folder: Path) -> None:
    banned = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in sorted(folder.glob("*.py"))
        for line, name in bound(ast.parse(file.read_text()))
        if name in BANNED
    ]
    assert not banned, f"{len(banned)} names to mend: {banned[:20]}"


def test_every_way_to_bind_a_name_counts() -> None:
    source = """
import json as more
def f(asked, *own, given=1, **known):
    for one in (seen := [how for how in asked]): pass
    with open(one) as found: pass
    try: pass
    except ValueError as told: pass
    match one:
        case [wanted, *_]: pass
"""
    assert {name for _, name in bound(ast.parse(source))} >= BANNED
