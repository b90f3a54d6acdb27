"""Which engines load a checkpoint: a table of engines and formats, and functions that query it.

    facts = gather_facts(config, "OUT")  # from config.json
    engine_support("sglang", facts).reason  # "of gptq-v2 it reads only 4 and 8 bits without zero points"; None: it loads it

`doctor`, `check`, `serve`, `eval`, `bench`, model cards, launch files and the tables in docs/exporting.md use it. The table is
in `_table.py`: a new engine is a new entry there. `vlmcompress.recipe.targets` has the formats that each machine runs.
Nothing here imports torch or reads more than config.json.
"""

# ruff: noqa: F401  # what is imported here is what the package offers

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmcompress.export.readers._facts import LoadFacts, Machine, QuantizedGroup, Reducer, gather_facts, plain_name
from vlmcompress.export.readers._table import ENGINES, Cell, EngineFormats
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

_EVAL = {"vllm": "vllm", "hf": "transformers", "llamacpp": "llamacpp", "openvino": "openvino", "mlx": "mlx"}
"""Name of an engine in `eval` -> its name in the table."""


@dataclass(frozen=True)
class EngineSupport:
    """Whether an engine loads a checkpoint.

    Attributes:
        title: the engine's name.
        reason: why it does not, as the end of a sentence about it; None: it does.
        needs: packages required besides the engine, by their names for pip.
        notes: sentences about pitfalls.
        loader: whether only `vlmcompress.models.open_model` loads it.
        evidence: `run: TEST OR SCRIPT` or `read: SOURCE`; empty if the format is not in the table.
    """

    title: str
    reason: str | None = None
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    loader: bool = False
    evidence: str = ""


def engine_support(engine: str, facts: LoadFacts) -> EngineSupport:
    """Whether an engine, by its name in `ENGINES`, loads a checkpoint with these facts."""
    row = ENGINES[engine]
    cell = row.formats.get(facts.format, row.other.format(facts.format))
    if isinstance(cell, str):
        return EngineSupport(row.title, cell)
    traits = [name for name in ("zero_points", "embeddings", "experts") if getattr(facts, name)]
    needs = next((cell.instead[trait] for trait in traits if trait in cell.instead), cell.needs)
    if facts.reducer and row.reducers == "served":
        needs = (*needs, "vlmcompress")
    return EngineSupport(
        row.title,
        _lacking(row, facts) or _unread(cell, facts),
        needs,
        tuple(cell.notes[trait] for trait in traits if trait in cell.notes),
        any(trait in cell.loader for trait in traits),
        cell.evidence,
    )


def verdicts(facts: LoadFacts) -> dict[str, EngineSupport]:
    """The verdict of each engine, by its name."""
    return {name: engine_support(name, facts) for name in ENGINES}


def readers_summary(facts: LoadFacts) -> str:
    """A line that lists the engines that load a checkpoint, with the reason if vLLM does not. `UserError` if none does."""
    every = verdicts(facts)
    loads = {name: each for name, each in every.items() if each.reason is None}
    if not loads:
        raise UserError(f"no engine is known to load it; vLLM: {every['vllm'].reason}; write another format by export")
    texts = [
        each.title
        + (" by vlmcompress.models.open_model" if each.loader else "")
        + (f" ({', '.join(each.needs)})" if each.needs else "")
        + (", by its source" if each.evidence.startswith("read") else "")
        for each in loads.values()
    ]
    without = "" if "vllm" in loads else f"not vLLM: {every['vllm'].reason}; "
    return without + "; ".join(texts)


def require_readable(folder: str | Path, engines: Sequence[str], remedy: str = "") -> None:
    """Raise `UserError` for a checkpoint that none of `engines` is known to load, before they start.

    Formats and engines that are not in the table are not checked, nor is a folder without a config.json.

    Args:
        engines: names in `ENGINES` or on the command line of `eval`.
        remedy: end of the message; empty: suggest the engines of `eval` that load it.
    """
    try:
        config = json_files.read(Path(folder) / "config.json")
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    facts = gather_facts(config, "model")  # without its reducer, which engines refuse with the method's reason
    # `hf, divprune:0.5` is transformers with a reducer
    names = [_EVAL.get(name.partition(",")[0], name) for name in engines]
    in_table = all(name in ENGINES for name in names) and any(facts.format in row.formats for row in ENGINES.values())
    each = [engine_support(name, facts) for name in names] if in_table else []
    if not in_table or any(answer.reason is None for answer in each):
        return
    if not remedy:
        loading = [name for name in _EVAL if engine_support(_EVAL[name], facts).reason is None]
        take = f"take eval --engine {' or '.join(loading)} (--baseline-engine, if it is the baseline), or "
        remedy = f"{take if loading else ''}write another format with vlmcompress export"
    raise UserError(f"{each[0].title} does not load {folder}: {each[0].reason}; {remedy}")


def served_name(folder: str | Path) -> str:
    """The name of a checkpoint on a server: that of its folder, in characters that need no quoting."""
    return plain_name(Path(folder).resolve().name) or "model"


def _lacking(row: EngineFormats, facts: LoadFacts) -> str | None:
    """Why an engine does not load a checkpoint in any number format: its reducer or architecture; None: it may load it."""
    if facts.reducer:
        if row.reducers == "none" or (
            isinstance(row.reducers, tuple) and facts.reducer.label.partition(":")[0] not in row.reducers
        ):
            return f"it does not know the reducer {facts.reducer.label}"
        if row.reducers == "served" and not facts.reducer.served:
            return f"the reducer {facts.reducer.label} runs in transformers only"
    if row.architectures is not None and facts.architecture not in row.architectures:
        return row.absent.format(facts.architecture or "this architecture")
    return None


def _unread(cell: Cell, facts: LoadFacts) -> str | None:
    """Why an engine does not load a checkpoint in one of its formats; None: it loads it."""
    groups = facts.groups
    whole = any(group.whole for group in groups.values())
    read_all = (
        (not cell.takes or all(any(numbers.holds(group) for numbers in cell.takes) for group in groups.values()))
        and (cell.several or not facts.several)
        and (cell.vocabulary or not facts.embeddings)
        and (cell.kept_layers or not facts.kept_layers)
        and not (cell.first and set(groups) - {cell.first})
    )
    if not read_all:
        return f"of {facts.format} it reads only {cell.text}"
    if not cell.whole and len(groups) > 1 and whole:
        return "it reads several config groups only where all of them are aimed at names"
    if facts.experts and cell.experts is not None and facts.architecture not in cell.experts:
        return f"of {facts.format} it reads no experts of {facts.architecture}"
    return cell.lacking.get(facts.architecture)
