"""A Python in which most packages are hidden, as on a machine that has torch and transformers and little else."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FINDER = '''
"""Packages that are not found where they are installed; in another folder of the path they are."""
import sys, sysconfig
from importlib.machinery import PathFinder

class Finder(PathFinder):
    hidden = frozenset({names!r})
    installed = tuple(map(sysconfig.get_path, ("purelib", "platlib")))

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if spec is None or name.partition(".")[0] not in cls.hidden:
            return spec
        places = [spec.origin or "", *(spec.submodule_search_locations or ())]
        return None if any(place.startswith(cls.installed) for place in places) else spec

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
'''


def hiding(folder: Path, output: Iterable[str], brought: Iterable[str] = ()) -> str:
    """Make a folder for PYTHONPATH under which only `output` modules, and what these require, are found; returns PYTHONPATH.

    `brought`: modules that are hidden whatever requires them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_FINDER.format(names=sorted(hidden(output) | {*brought})))
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))


def hidden(output: Iterable[str]) -> set[str]:
    """Installed modules that belong neither to the packages of `output` modules nor to what these require."""
    owners = {
        module: {str(canonicalize_name(name)) for name in names}
        for module, names in importlib.metadata.packages_distributions().items()
    }
    kept, waiting = {"vlmcompress"}, {name for module in output for name in owners.get(module, ())}
    while waiting:
        name = waiting.pop()
        kept.add(name)
        waiting |= _required(name) - kept
    return {module for module, names in owners.items() if not names & kept}


def _required(name: str) -> set[str]:
    try:
        lines = importlib.metadata.requires(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return set()
    requirements = (Requirement(line) for line in lines)
    return {
        str(canonicalize_name(requirement.name))
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
