"""Read vLLM's source without importing it: whether a class, an attribute or a function exists, and its parameters.

Importing vLLM's models takes seconds in each process and looks for devices; parsing a file takes hundredths of a second.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "vllm"


@dataclass(frozen=True)
class Parameters:
    """Names of a function's parameters except `self` and `cls`. `required`: without default; `rest`: accepts any others."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    rest: bool


class Source:
    """The package in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}
        self._files: dict[str, Path | None] = {}

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The definition of `Class.method`, `Class.attribute` or `name`, with its module; None if there is none.

        Imported names are looked up in their module, inherited members in the base classes. An attribute is a name in the
        class body, or one that a method sets as `self.attribute` or registers as a buffer.
        """
        first, _, rest = name.partition(".")
        definition = self._top(module, first)
        if definition is None or not rest:
            return definition
        where, node = definition
        return self._member(where, node, rest) if isinstance(node, ast.ClassDef) else None

    def _top(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        for node in _statements(self._tree(module)):
            if isinstance(node, ast.ImportFrom):
                file = self._file(module)
                inside = _absolute(module, node, file is not None and file.name == "__init__.py")
                in_package = inside.startswith(f"{PACKAGE}.")
                for alias in node.names:
                    if name == (alias.asname or alias.name):  # names of other packages are assumed to exist
                        return (
                            self._top(inside.removeprefix(f"{PACKAGE}."), alias.name) if in_package else (module, node)
                        )
                    if (
                        alias.name == "*"
                        and in_package
                        and (starred := self._top(inside.removeprefix(f"{PACKAGE}."), name))
                    ):
                        return starred
            elif name in _named(node):
                return module, node
        return None

    def _member(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        # In the order in which Python finds it: the class body, what methods set on `self`, and the base classes.
        for statement in _statements(node):
            if name in _named(statement):
                return module, statement
        for inner in ast.walk(node):
            if name in _set_on_self(inner):
                return module, inner
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base  # Generic[...]
            parent = self._top(module, base.id) if isinstance(base, ast.Name) else None
            if parent and isinstance(parent[1], ast.ClassDef) and (member := self._member(parent[0], parent[1], name)):
                return member
        return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            path = self._file(module)
            self._trees[module] = ast.parse(path.read_text(encoding="utf-8")) if path else None
        return self._trees[module]

    def _file(self, module: str) -> Path | None:
        if module not in self._files:
            place = self._folder.joinpath(*module.split("."))
            files = place.with_suffix(".py"), place / "__init__.py"
            self._files[module] = next((file for file in files if file.is_file()), None)
        return self._files[module]


def parameters(node: ast.AST) -> Parameters | None:
    """The parameters of a function, or of a class's own `__init__` or fields; None for anything else."""
    if isinstance(node, ast.ClassDef):
        inits = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
        node = next(inits, node)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    args = node.args
    placed, placed_defaults = [*args.posonlyargs, *args.args], len(args.defaults)
    needed = [arg.arg for arg in placed[: len(placed) - placed_defaults]]
    needed += [arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    all_names = [arg.arg for arg in (*placed, *args.kwonlyargs)]
    selves = {"self", "cls"} & set(all_names[:1])
    names, required = (tuple(name for name in group if name not in selves) for group in (all_names, needed))
    return Parameters(names, required, rest=args.kwarg is not None)


def _statements(node: ast.AST | None) -> Iterator[ast.stmt]:
    """The statements of a module or a class, including those within `if` and `try`."""
    for part in getattr(node, "body", ()):
        yield part
        if isinstance(part, ast.If | ast.Try):
            yield from _statements(part)
            yield from (*part.orelse, *getattr(part, "finalbody", ()))
            for handler in getattr(part, "handlers", ()):
                yield from _statements(handler)


def _named(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _set_on_self(node: ast.AST) -> set[str]:
    """The attributes that a statement in a method sets, or the buffer that it registers."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {part.attr for target in targets for part in ast.walk(target) if _of_self(part)}  # type: ignore[attr-defined]
    if isinstance(node, ast.Call) and _of_self(node.func) and node.func.attr == "register_buffer":  # type: ignore[attr-defined]
        names |= {part.value for part in node.args[:1] if isinstance(part, ast.Constant)}
    return names


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _absolute(module: str, node: ast.ImportFrom, package: bool) -> str:
    """The full name of an imported module, for absolute and relative imports."""
    if not node.level:
        return node.module or ""
    parts = [PACKAGE, *module.split(".")]
    parts = parts[: len(parts) - node.level + package]
    return ".".join([*parts, *([node.module] if node.module else [])])
