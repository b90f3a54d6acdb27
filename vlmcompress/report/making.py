"""Describe how a candidate was made (`results.Made`) in rows of a report's table."""

from __future__ import annotations

import json

from vlmcompress.results import Made, Side

_PREFIX = {"float": "seen behind unquantized blocks", "quantized": "seen behind quantized blocks"}


def rows(side: Side) -> list[tuple[str, str]]:
    """Make rows (what, how) on how a checkpoint was made; empty where nothing is known."""
    carried = side.made.reducer if side.made else ""
    attached = ", attached for this run; the checkpoint does not carry it" * (side.reducer != carried)
    reducer = ("visual-token reducer", side.reducer + attached if side.reducer else "")
    if side.made is None:
        return [reducer] if side.reducer else []
    found = [*_weights(side.made), ("images made smaller", side.made.resize), reducer, *_origin(side.made)]
    return [row for row in found if row[1]] + [("warning", line) for line in side.made.warnings]


def _weights(made: Made) -> list[tuple[str, str]]:
    options = (f"{name} {_plain(value)}" for name, value in made.options.items())
    return [
        ("original", made.source + f" ({made.family})" * bool(made.family)),
        ("scheme", ", ".join([made.scheme, *options])),
        ("stored as", "; ".join(made.formats) or "weights as they were"),
        ("bits per weight", f"{made.bits:g} with scales, shared out among groups of layers" if made.bits else ""),
        ("vision tower", {"bf16": "16 bit, as it was"}.get(made.vision, made.vision)),
        ("KV cache", made.kv_cache or "16 bit"),
        ("layers left in 16 bits", ", ".join(made.skip)),
    ]


def _origin(made: Made) -> list[tuple[str, str]]:
    return [
        ("calibration data", _calibration(made)),
        ("seed", "" if made.seed is None else str(made.seed)),
        ("made with", ", ".join(f"{package} {version}" for package, version in made.versions.items())),
    ]


def _calibration(made: Made) -> str:
    data = made.calibration
    if data is None:
        return "none: each weight was rounded on its own"
    parts = [f"{data.samples:,} samples of {data.source}"]
    if data.images is not None:
        parts.append(f"{data.images:,} different images")
    if data.text:
        parts.append(f"{data.text:,} of the samples are text alone, from {data.text_source}")
    if data.tokens:
        parts.append(", ".join(f"{count:,} {kind}" for kind, count in data.tokens.items()) + " tokens")
    return "; ".join([*parts, *([_PREFIX[data.prefix]] if data.prefix in _PREFIX else [])])


def _plain(value: object) -> str:
    """Write an option's value for a reader."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | dict):
        return json.dumps(value)
    return "none" if value is None else str(value)
