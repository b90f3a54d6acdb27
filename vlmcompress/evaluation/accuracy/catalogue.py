"""The names of the bundled suites, read from their files without importing lm-eval, which takes seconds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # not every build of PyYAML has the former
    """Reads `!function` and other tags as plain text."""


_Loader.add_multi_constructor("!", lambda loader, _suffix, node: loader.construct_scalar(node))


def task_names() -> list[str]:
    """Names of the bundled tasks and groups."""
    return sorted(_bundled())


def about_task(name: str) -> str:
    """Description of a bundled suite from its own file: how it is scored."""
    return str(_bundled()[name].get("metadata", {}).get("scoring", ""))


def folders() -> list[Path]:
    """Folders of the bundled tasks: in the package when installed, next to it in a checkout."""
    package = Path(__file__).parents[2]
    return [folder for folder in (package / "tasks", package.parent / "eval" / "tasks") if folder.is_dir()]


@functools.cache
def _bundled() -> dict[str, dict[str, Any]]:
    """Name -> content of the file, for each bundled task or group."""
    files = [_read(file) for folder in folders() for file in sorted(folder.rglob("*.yaml"))]
    named = {content.get("group") or content.get("task"): content for content in files}
    return {name: content for name, content in named.items() if isinstance(name, str)}


def _read(file: Path) -> dict[str, Any]:
    """Read a task file, merged over the file that it includes."""
    content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    base = _read(file.parent / content["include"]) if "include" in content else {}
    metadata = {**base.get("metadata", {}), **content.get("metadata", {})}
    return {**base, **content, "metadata": metadata}
