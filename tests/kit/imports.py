"""What a file imports, read from its source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def imported(file: Path) -> list[str]:
    """What a file imports, also within functions: `a.b` and `a.b.c` for `from a.b import c`."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names
