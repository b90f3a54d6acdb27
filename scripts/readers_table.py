#!/usr/bin/env python
"""Print the table in docs/exporting.md of who loads what, from `vlmcompress.export.readers`, which everything else reads, too.

scripts/readers_table.py    prints it; a test compares it with the page
"""

from __future__ import annotations

from vlmcompress.export.readers import ENGINES, Cell, EngineFormats


def rows(engine: EngineFormats) -> list[str]:
    """A row of each cell, which may stand for several formats."""
    formats: dict[str, list[str]] = {}
    cells = {repr(cell): cell for cell in engine.formats.values() if isinstance(cell, Cell)}
    for name, cell in engine.formats.items():
        if isinstance(cell, Cell):
            formats.setdefault(repr(cell), []).append(f"`{name}`")
    return [row(engine, ", ".join(names), cells[key]) for key, names in formats.items()]


def row(engine: EngineFormats, names: str, cell: Cell) -> str:
    """Engine, formats, what is read of them, what it takes, and how that is known."""
    text = "; ".join([cell.text, *cell.notes.values(), *(experts(cell))])
    takes = "; ".join(
        [
            ", ".join(cell.needs),
            *(f"with {trait.replace('_', ' ')} `{needs[0]}`" for trait, needs in cell.instead.items()),
        ]
    )
    return f"| {engine.title} {engine.version} | {names} | {text} | {takes} | {cell.evidence.partition(':')[0]} |"


def experts(cell: Cell) -> list[str]:
    """What is said of mixtures of experts, where not all are read."""
    if cell.experts is None:
        return []
    return [f"experts of {', '.join(map(short, sorted(cell.experts)))} alone" if cell.experts else "no experts"]


def families(engine: EngineFormats) -> list[str]:
    """Lines on the architectures that an engine has, or lacks in a format."""
    lines = []
    if engine.architectures is not None:
        lines.append(f"* {engine.title} has {', '.join(short(name) for name in sorted(engine.architectures))}.")
    lacking: dict[str, list[str]] = {}
    for name, cell in engine.formats.items():
        for architecture, reason in cell.lacking.items() if isinstance(cell, Cell) else ():
            lacking.setdefault(f"{short(architecture)} ({reason})", []).append(f"`{name}`")
    lines += [f"* {engine.title} does not load {what} in {', '.join(formats)}." for what, formats in lacking.items()]
    return lines


def short(architecture: str) -> str:
    """An architecture's name without what all of them end in."""
    return f"`{architecture.removesuffix('ForConditionalGeneration')}`"


def main() -> None:
    print("| engine | format | reads | takes | evidence |\n|---|---|---|---|---|")
    print("\n".join(line for engine in ENGINES.values() for line in rows(engine)))
    print("\n" + "\n".join(line for engine in ENGINES.values() for line in families(engine)))


if __name__ == "__main__":
    main()
