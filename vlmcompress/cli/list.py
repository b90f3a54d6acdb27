"""List the names of schemes, reducers, targets, formats and more."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.registry import FAMILIES, FORMATS, REDUCERS, SCHEMES, Registry
from vlmcompress.utils.text import table

GROUP = "look first"
PLACE = 14
Entries = list[dict[str, Any]]
# `resize` is written like a reducer on the command line, but is a setting of the processor.
_RESIZE: dict[str, Any] = {
    "name": "resize",
    "about": "Make images smaller before the encoder, alone or before a reducer.",
    "stage": "processor",
    "count": "measured",
    "served": True,
    **dict.fromkeys(("vllm", "why_not", "no_better_than")),
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=tuple(KINDS))


def run(args: argparse.Namespace) -> Outcome:
    """List all names, or those of one kind."""
    entries = {kind: find() for kind, find in KINDS.items() if args.what in (None, kind)}
    text = "\n\n".join(f"{what}\n{table([_row(entry) for entry in rows])}" for what, rows in entries.items())
    return OK, entries, text


def _registered(registry: Registry) -> Entries:
    entries = [{"name": name, "about": registry.summary(name)} for name in registry.names()]
    for entry in entries:
        also = [*registry.aliases(entry["name"]), *(registry.constant(entry["name"], "PRESETS") or ())]
        if also:
            entry["about"] += f" (also {', '.join(also)})"
    return entries


def _targets() -> Entries:
    from vlmcompress.recipe import targets

    entries = []
    for name in targets.REGISTRY.names():
        machine = targets.get_target(name)
        default, throughput = machine.schemes[None], machine.schemes["throughput"]
        schemes = default if throughput == default else f"{default} by default, {throughput} for throughput"
        entries.append({"name": name, "about": f"{machine.title}: {schemes}"})
    return entries


def _recipes() -> Entries:
    from vlmcompress.utils.settings import bundled_recipes

    lines = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in bundled_recipes().items()}
    return [{"name": name, "about": line.lstrip("# ")} for name, line in lines.items()]


def _reducers() -> Entries:
    from vlmcompress.reduction.support import served

    keys = {"stage": "STAGE", "count": "COUNT", "served": "SERVED", "why_not": "WHY_NOT"}
    keys |= {"no_better_than": "NO_BETTER_THAN"}
    reducers = [
        {"name": name, "about": REDUCERS.summary(name), "vllm": served(name)}
        | {key: REDUCERS.constant(name, constant) for key, constant in keys.items()}
        for name in REDUCERS.names()
    ]
    return sorted([*reducers, _RESIZE], key=lambda entry: entry["name"])


def _suites() -> Entries:
    from vlmcompress.evaluation.accuracy import catalogue

    return [{"name": name, "about": catalogue.about_task(name)} for name in catalogue.task_names()]


def _gates() -> Entries:
    from vlmcompress.evaluation.accuracy import gate

    return [{"name": name, "about": gate.about_gate(name)} for name in gate.gate_names()]


KINDS: dict[str, Callable[[], Entries]] = {
    "schemes": lambda: _registered(SCHEMES),
    "targets": _targets,
    "families": lambda: _registered(FAMILIES),
    "recipes": _recipes,
    "formats": lambda: _registered(FORMATS),
    "reducers": _reducers,
    "suites": _suites,
    "gates": _gates,
}


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The table row of an entry; reducers have more columns."""
    if "stage" not in entry:
        return entry["name"], entry["about"]
    families = entry["vllm"]
    if families is None:
        return entry["name"], entry["stage"], f"{entry['count']} count", "by the processor", entry["about"]
    where = ", ".join(families) if len(families) <= 3 else f"{len(families)} families"
    where = f"vLLM: {where}" if families else "transformers only"
    weak = f" [measured: no better than {entry['no_better_than']}]" if entry["no_better_than"] else ""
    return entry["name"], entry["stage"], f"{entry['count']} count", where, entry["about"] + weak
