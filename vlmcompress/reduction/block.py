"""The reducer that a checkpoint carries: the `vlmcompress` block of its config.json, and the architecture that goes with it.

    "architectures": ["VlmcompressLlavaForConditionalGeneration"],
    "vlmcompress": {"schema": 1, "model_type": "llava", "reduce": {"method": "dart", "keep": 0.5, "pivots": 8, ...}}

For a reducer whose number of kept tokens depends on the image but can be set (`dymu`), the block also has `count`: a
regression that computes the number from the image's pixels (`methods.TokenCounter`).

Only our plugin registers that architecture, so a vLLM without it refuses the checkpoint by that name instead of serving it
unreduced. transformers uses `model_type` and ignores both: `from_pretrained` returns the model with all visual tokens, and
`hooks.attach_carried` attaches the reducer of the block.

Checkpoints are not trusted: everything in the block is validated, and nothing in it is executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.reduction import choice
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.support import PREFIX
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:  # whose modules import torch
    from vlmcompress.reduction.methods import TokenCounter

KEY = "vlmcompress"
SCHEMA = 1
_REQUIRED, _OPTIONAL = {"schema", "model_type", "reduce"}, {"count"}
_WHERE = f"config.json: {KEY}"


@dataclass(frozen=True)
class CarriedReducer:
    """The content of the block: the `model_type`, the reducer, and `count`, which computes how many tokens an image keeps."""

    model_type: str
    reducer: ReducerChoice
    count: TokenCounter | None = None


def config_with_reducer(
    config: Mapping[str, Any], reducer: ReducerChoice, count: TokenCounter | None = None
) -> dict[str, Any]:
    """Return a checkpoint's `config` with this reducer, which replaces an existing one.

    Raises UserError for a reducer that a checkpoint cannot carry.
    """
    _require_thresholds(reducer, f"reduce {reducer}", "learn them first")
    block = {"schema": SCHEMA, "model_type": config["model_type"], "reduce": reducer.plain()}
    block |= {"count": count.plain()} if count else {}
    names = [PREFIX + name.removeprefix(PREFIX) for name in config["architectures"]]
    return {**config, "architectures": names, KEY: block}


def read_reducer(config: Mapping[str, Any]) -> CarriedReducer | None:
    """Read the reducer from a checkpoint's config.json; None if it has none. Raises UserError for an invalid block."""
    block, names = config.get(KEY), config.get("architectures") or []
    marked = [name for name in names if isinstance(name, str) and name.startswith(PREFIX)]
    if block is None and not marked:
        return None
    if not isinstance(block, Mapping):
        problem = "is missing" if block is None else "is no mapping"
        raise UserError(
            f"{_WHERE} {problem}, which {marked[0] if marked else 'a reduced checkpoint'} needs; export it again"
        )
    if len(marked) != len(names) or not marked:
        raise UserError(f"{_WHERE} is there but architectures is {names!r}, which serves all tokens; export it again")
    schema = block.get("schema")
    if type(schema) is not int or schema < 1:
        raise UserError(f"{_WHERE}.schema is {schema!r}, should be {SCHEMA}; export it again")
    if schema > SCHEMA:
        raise UserError(f"{_WHERE}.schema is {schema}, this vlmcompress reads up to {SCHEMA}; upgrade it")
    if odd := sorted((block.keys() ^ _REQUIRED) - _OPTIONAL, key=str):
        raise UserError(f"{_WHERE}: '{odd[0]}' is {'unknown' if odd[0] in block else 'missing'}; export it again")
    if block["model_type"] != config.get("model_type"):
        raise UserError(
            f"{_WHERE} is for model_type {block['model_type']!r}, the model's is {config.get('model_type')!r}; export it again"
        )
    if not isinstance(block["reduce"], Mapping):
        raise UserError(f"{_WHERE}.reduce is no mapping; export it again")
    reducer = choice.reducer_of_setting(block["reduce"], f"{_WHERE}.reduce")
    _require_thresholds(reducer, f"{_WHERE}.reduce", "export it again")
    count = None
    if "count" in block:
        from vlmcompress.reduction.methods import read_counter

        count = read_counter(block["count"], f"{_WHERE}.count")
    if count and not reducer.takes_count:
        raise UserError(f"{_WHERE}.count is there but '{reducer.method}' takes none; export it again")
    return CarriedReducer(block["model_type"], reducer, count)


def takes_shares(folder: Path) -> bool:
    """Whether a checkpoint carries a reducer whose share of visual tokens requests may set. UserError as `read_reducer`."""
    carried = read_reducer(json_files.read(folder / "config.json"))
    return carried is not None and carried.reducer.takes_shares


def _require_thresholds(reducer: ReducerChoice, where: str, remedy: str) -> None:
    """Raise UserError for a reducer without its learned thresholds."""
    if reducer.reducer.LEARNS and not reducer.has_thresholds:
        raise UserError(f"{where} has no thresholds, which '{reducer.method}' needs; {remedy}")
