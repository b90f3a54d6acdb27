"""Unchecked settings: finding recipe files, reading `--set`, and merging the settings of several places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vlmcompress.utils import yaml_files
from vlmcompress.utils.errors import UserError, did_you_mean

Layer = tuple[str, Mapping[str, Any]]
"""The name of a source of settings, as used in messages, and its nested settings."""


def merge(layers: Iterable[Layer]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge nested mappings, where the first that gives a key wins; also return dotted key -> name of its layer."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def fill(into: dict[str, Any], layer: Mapping[str, Any], prefix: str, origin: str) -> None:
        for key, value in layer.items():
            dotted = f"{prefix}{key}"
            if isinstance(value, Mapping) and isinstance(into.setdefault(key, {}), dict) and dotted not in origins:
                fill(into[key], value, f"{dotted}.", origin)
            elif key not in into:
                into[key] = value
                origins[dotted] = origin

    for origin, layer in layers:
        fill(values, layer, "", origin)
    return values, origins


def assign(values: dict[str, Any], setting: str) -> None:
    """Set `key.sub=value` of the command line in nested `values`; the value is YAML. Raises `UserError` for bad syntax."""
    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {setting} is not of the form key.sub=value")
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {setting}: '{part}' has a value already and no keys below it")
    values[parts[-1]] = yaml_files.parse_yaml(text, f"--set {key}")


def folders() -> list[Path]:
    """Folders of the bundled recipes: in the package when installed, next to it in a checkout."""
    here = Path(__file__).parents[1]
    return [folder for folder in (here / "recipes", here.parent / "recipes") if folder.is_dir()]


def bundled_recipes() -> dict[str, Path]:
    """Map the names of the bundled recipes to their files."""
    return {path.stem: path for folder in folders() for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, given by path or by the name of a bundled recipe. Raises `UserError` if there is none."""
    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        if not path.exists():
            raise UserError(f"recipe {path} does not exist{did_you_mean(path.stem, bundled_recipes())}")
        return path
    if path.name not in bundled_recipes():
        raise UserError(f"no bundled recipe is called '{path}'{did_you_mean(path.name, bundled_recipes())}")
    return bundled_recipes()[path.name]
