"""A manifest as small as one can be."""

from __future__ import annotations

from typing import Any

from vlmcompress.export.manifest import SCHEMA_VERSION


def manifest(**keys: Any) -> dict[str, Any]:
    """The content of the file, with `keys` in it."""
    model = dict.fromkeys(("family", "source", "config_sha256", "headers_sha256"), "x")
    about = {"schema_version": SCHEMA_VERSION, "created_by": {}, "model": model, "recipe": {}, "seed": None}
    size = {"weights_before": 2, "weights_after": 1}
    return about | {"calibration": None, "errors": {}, "warnings": [], "size": size, "files": {}} | keys
