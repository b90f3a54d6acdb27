"""Names and examples have the field's words: each forbidden word with what to write instead (see CONTRIBUTING, "Style")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.kit.places import ROOT

# Names that say how a thing came, not what it is: refused as whole names of variables and parameters.
VAGUE = {
    *("one", "found", "own", "asked", "given", "known", "more", "how", "wanted"),
    *("told", "seen", "shown", "learnt", "behind", "beside", "asks", "worth", "gone"),
}

# Dialect: refused as a part of any name.
DIALECT = {
    "learnt": "learned", "unlearnt": "untrained", "asks": "query_aware", "handed": "passed", "beside": "next_to",
    "standing": "state", "worth": "score", "residues": "residual", "fault": "problem", "faults": "problems",
    "refusal": "problem",
}  # fmt: skip


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


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every function, class and attribute that is set; tests' own names are sentences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("test_"):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def parts(name: str) -> set[str]:
    """The words of a name, in small letters."""
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def name_problems(tree: ast.AST, file: str) -> list[str]:
    """Names to change, with their lines."""
    names = [(line, name) for line, name in bound(tree)]
    vague = [f"{line} {name}" for line, name in names if name in VAGUE]
    dialect = [
        f"{line} {name}: {DIALECT[word]}"
        for line, name in (*names, *defined(tree))
        for word in parts(name) & DIALECT.keys()
    ]
    return vague + dialect


@pytest.mark.parametrize("folder", ["vlmcompress", "scripts", "tests", "eval"])
def test_names_say_what_a_thing_is(folder: str) -> None:
    names = [
        f"{file.relative_to(ROOT)}:{problem}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for problem in name_problems(ast.parse(file.read_text()), file.name)
    ]
    assert not names, f"{len(names)} names to change: {names[:20]}"


def test_problems_have_one_word() -> None:
    """What a user must change is returned by `..._problem(s)` and raised by `require_...`; no other name says "no"."""
    functions = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in sorted((ROOT / "vlmcompress").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and {"check", "checked", "refuse"} & {node.name.strip("_").split("_")[0]}
    ]
    assert not functions, functions


def test_examples_use_the_same_words() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            assert not name_problems(ast.parse(code), page.name)


def test_names_of_tests_are_plain() -> None:
    """They state what happens; these words stood for "reported", "named", "requested", "after", "next to" and "continues"."""
    dialect = {"said", "told", "asked", "ours", "behind", "beside", "gone"}
    names = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and parts(node.name) & dialect
    ]
    assert not names, names
