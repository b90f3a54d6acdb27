"""Plug folders: a file's name is its recipe name.

Each module of such a package (`vlmcompress.quantization.schemes`, ...) whose name has no leading underscore is one entry,
named like its file with `-` for `_`. In folders with a contract class the entry is an instance of a subclass of it, under
one name in every module (`Registry.entry`):

    class Unlike(Reducer):
        NEEDS = frozenset({"features"})  # literals of the class, which are read without importing the module
        ...

    REDUCER = Unlike()

Third parties add entries by entry points of the group with the package's name; a duplicate name is an error, never a
silent override. An entry may declare aliases, in lower case, as a literal: `ALIASES = ("w4a16",)`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import pkgutil
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vlmcompress.utils.errors import UserError, did_you_mean

_ROOT = Path(__file__).parents[2]  # what holds the package


class Registry:
    """The entries of one plug folder, whose modules are imported on first use. `in` and `for` go by their names.

    Args:
        package: dotted name of the folder, e.g. `vlmcompress.quantization.schemes`; also the entry-point group.
        noun: word for an entry in messages, e.g. `scheme`.
        table: entries by name, if `package` is one module that holds all of them instead of a folder of modules.
        entry: name of the object in each module that is the entry, e.g. `REDUCER`; None: the module itself.
    """

    def __init__(self, package: str, noun: str, table: Mapping[str, Any] | None = None, entry: str | None = None):
        self.package = package
        self.noun = noun
        self.table = table or {}
        self.entry = entry
        # importing it would bring torch along
        self._folder = Path(__file__).parents[1].joinpath(*package.split(".")[1:])

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        """Map each entry's recipe name to its dotted module name."""
        modules = dict.fromkeys(self.table, self.package) | {
            info.name.replace("_", "-"): f"{self.package}.{info.name}"
            for info in pkgutil.iter_modules([str(self._folder)])
            if not info.name.startswith("_")
        }
        for point in entry_points(group=self.package):
            if point.name in modules:
                raise UserError(f"entry point '{point.value}' takes the {self.noun} name '{point.name}', which exists")
            modules[point.name] = point.value
        return dict(sorted(modules.items()))

    def names(self) -> list[str]:
        """All names, sorted, without importing anything."""
        return list(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def name(self, text: str) -> str:
        """The name of the entry that `text` denotes: in any case, with `_` for `-`, or by an alias; else `text` itself."""
        if text in self._modules:
            return text
        plain = text.strip().lower().replace("_", "-")
        return plain if plain in self._modules else self._by_alias.get(plain, text)

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other names of an entry."""
        return tuple(self.constant(name, "ALIASES") or ())

    @functools.cached_property
    def _by_alias(self) -> dict[str, str]:
        return {alias: name for name in self._modules for alias in self.aliases(name)}

    def require(self, name: str) -> None:
        """Raise `UserError` with the closest name if there is no entry of this name."""
        if name not in self._modules:
            raise UserError(f"unknown {self.noun} '{name}'{did_you_mean(name, self._modules)}")

    def get(self, name: str) -> Any:
        """The entry (object, module or table row) of `name`; its contract is in the folder. Raises `UserError` as `require`."""
        self.require(name)
        if name in self.table:
            return self.table[name]
        module = importlib.import_module(self._modules[name])
        if self.entry is None:
            return module
        if not hasattr(module, self.entry):
            raise UserError(
                f"{self.noun} '{name}': {module.__name__} does not define {self.entry}; see CONTRIBUTING.md"
            )
        return getattr(module, self.entry)

    def summary(self, name: str) -> str:
        """The first sentence of an entry's docstring, read from its file without importing it."""
        tree = self._tree(name)
        text = ast.get_docstring(tree) if tree else importlib.import_module(self._modules[name]).__doc__
        paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].rstrip(".")

    def outline(self, name: str) -> Any:
        """An entry; one of the package's own as an object with its literals, inherited ones too, without importing it."""
        tree = self._tree(name)
        return self.get(name) if tree is None else _outline(tree, self.entry)

    def constant(self, name: str, constant: str) -> Any:
        """The value of a literal of an entry, read without importing it; None if the entry does not define it."""
        return getattr(self.outline(name), constant, None)

    def _tree(self, name: str) -> ast.Module | None:
        """The syntax tree of one of the package's own modules; None for an entry point."""
        package, _, module = self._modules[name].rpartition(".")
        return _parsed(self._folder / f"{module}.py") if package == self.package else None


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _outline(tree: ast.Module, entry: str | None) -> SimpleNamespace:
    """The literals of a module by name, with those of the class of its `entry` and of that class's bases."""
    literals = _literals(tree.body)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == entry:
            literals |= _of_class(tree, ast.unparse(node.value.func))
    return SimpleNamespace(**literals)


def _of_class(tree: ast.Module, name: str) -> dict[str, Any]:
    """The literals of the class `name` that a module defines, or imports from another one of this package."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            inherited = [_of_class(tree, ast.unparse(base).partition("[")[0]) for base in reversed(node.bases)]
            return dict(ChainMap(_literals(node.body), *reversed(inherited)))
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            file = _ROOT.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            return _of_class(_parsed(file), name) if file.is_file() else {}
    return {}


def _literals(body: Sequence[ast.stmt]) -> dict[str, Any]:
    literals: dict[str, Any] = {}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value: Any = node.value  # `frozenset({...})` is a literal here, too
            as_set = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "frozenset"
            with contextlib.suppress(ValueError):
                content = [] if as_set and not value.args else ast.literal_eval(value.args[0] if as_set else value)
                literals[getattr(target, "id", "")] = frozenset(content) if as_set else content
    return literals


# The entries of every plug folder. They are declared here as the folders import torch, which listing names must not.
SCHEMES = Registry("vlmcompress.quantization.schemes", "scheme", entry="SCHEME")
REDUCERS = Registry("vlmcompress.reduction.methods", "reducer", entry="REDUCER")
FORMATS = Registry("vlmcompress.export.formats", "format", entry="FORMAT")
FAMILIES = Registry("vlmcompress.models.families", "model family")
LLAMACPP = Registry("vlmcompress.export.gguf.families", "family of llama.cpp", entry="FAMILY")
OPENVINO = Registry("vlmcompress.export.openvino.families", "family of OpenVINO", entry="FAMILY")
TRACKERS = Registry("vlmcompress.evaluation.trackers", "tracker")
VERBS = Registry("vlmcompress.cli", "verb")
