"""Plug folders: a file's name is its recipe name.

A family of plug-ins is a package folder (`vlmcompress.quantizers`, ...). Each module in it whose name has no leading
underscore is one entry, under its file name with `_` written as `-`. Third parties join through entry points of the
group with the package's name; a name that exists already is an error, never a silent override.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType

from vlmcompress.errors import UserError, did_you_mean


class Registry:
    """The entries of one plug folder; modules are imported only when asked for.

    Args:
        package: dotted name of the folder, e.g. `vlmcompress.quantizers`; also the entry-point group.
        noun: what one entry is called in messages, e.g. `scheme`.
    """

    def __init__(self, package: str, noun: str):
        self.package = package
        self.noun = noun

    @functools.cached_property
    def _modules(self) -> dict[str, str]:
        """Recipe name -> dotted module name."""
        folder = importlib.import_module(self.package)
        found = {
            info.name.replace("_", "-"): f"{self.package}.{info.name}"
            for info in pkgutil.iter_modules(folder.__path__)
            if not info.name.startswith("_")
        }
        for point in entry_points(group=self.package):
            if point.name in found:
                raise UserError(f"entry point '{point.value}' takes the {self.noun} name '{point.name}', which exists")
            found[point.name] = point.value
        return dict(sorted(found.items()))

    def names(self) -> list[str]:
        """All names, sorted, without importing anything."""
        return list(self._modules)

    def get(self, name: str) -> ModuleType:
        """The module behind `name`. Raises `UserError` with the closest name when there is none."""
        if name not in self._modules:
            raise UserError(f"unknown {self.noun} '{name}'{did_you_mean(name, self._modules)}")
        return importlib.import_module(self._modules[name])
