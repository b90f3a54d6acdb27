"""The reducer that a checkpoint carries: the `vlmcompress` block of its config.json, and the architecture that goes with it.

    "architectures": ["VlmcompressLlavaForConditionalGeneration"],
    "vlmcompress": {"schema": 1, "model_type": "llava", "reduce": {"method": "dart", "keep": 0.5, "pivots": 8, ...}}

A reducer that keeps a number of tokens that depends on the image, but can be told one (`dymu`), has next to `reduce` a
`count`: a regression that computes the number from the image's pixels (`methods.TokenCounter`).

Only our plugin registers that architecture, so a vLLM without it refuses the checkpoint by that name instead of serving it
unreduced. transformers goes by `model_type` and looks at neither: `from_pretrained` gives the model with all its visual
tokens, and `hooks.attach_carried` reduces them as the block says.

A checkpoint may come from anywhere: everything in the block is checked, nothing in it is code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmcompress.reduction import choice
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.methods import TokenCounter, read_counter
from vlmcompress.utils.errors import UserError

KEY = "vlmcompress"
SCHEMA = 1
PREFIX = "Vlmcompress"
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
    """Return a checkpoint's `config` with a reducer in it, in place of the one that it may have had.

    UserError for a reducer that cannot be carried.
    """
    _check_reducer(reducer, f"reduce {reducer}", "learn them first")
    block = {"schema": SCHEMA, "model_type": config["model_type"], "reduce": reducer.plain()}
    block |= {"count": count.plain()} if count else {}
    names = [PREFIX + name.removeprefix(PREFIX) for name in config["architectures"]]
    return {**config, "architectures": names, KEY: block}


def read_reducer(config: Mapping[str, Any]) -> CarriedReducer | None:
    """Read the reducer from a checkpoint's config.json; None if it carries none. UserError for a block that is not right."""
    block, names = config.get(KEY), config.get("architectures") or []
    marked = [name for name in names if isinstance(name, str) and name.startswith(PREFIX)]
    if block is None and not marked:
        return None
    if not isinstance(block, Mapping):
        fault = "is missing" if block is None else "is no mapping"
        raise UserError(
            f"{_WHERE} {fault}, which {marked[0] if marked else 'a reduced checkpoint'} needs; export it again"
        )
    if len(marked) != len(names) or not marked:
        raise UserError(f"{_WHERE} is there but architectures is {names!r}, which serves all tokens; export it again")
    _check_schema(block)
    if odd := sorted((block.keys() ^ _REQUIRED) - _OPTIONAL, key=str):
        raise UserError(f"{_WHERE}: '{odd[0]}' is {'unknown' if odd[0] in block else 'missing'}; export it again")
    if block["model_type"] != config.get("model_type"):
        raise UserError(
            f"{_WHERE} is for model_type {block['model_type']!r}, the model's is {config.get('model_type')!r}; export it again"
        )
    if not isinstance(block["reduce"], Mapping):
        raise UserError(f"{_WHERE}.reduce is no mapping; export it again")
    reducer = choice.reducer_of_setting(block["reduce"], f"{_WHERE}.reduce")
    _check_reducer(reducer, f"{_WHERE}.reduce", "export it again")
    count = read_counter(block["count"], f"{_WHERE}.count") if "count" in block else None
    if count and not reducer.takes_count:
        raise UserError(f"{_WHERE}.count is there but '{reducer.method}' takes none; export it again")
    return CarriedReducer(block["model_type"], reducer, count)


def _check_reducer(reducer: ReducerChoice, where: str, remedy: str) -> None:
    """Refuse a reducer that has not learned its thresholds."""
    if reducer.options.learns and not reducer.has_thresholds:
        raise UserError(f"{where} has no thresholds, which '{reducer.method}' needs; {remedy}")


def _check_schema(block: Mapping[str, Any]) -> None:
    schema = block.get("schema")
    if type(schema) is not int or schema < 1:
        raise UserError(f"{_WHERE}.schema is {schema!r}, should be {SCHEMA}; export it again")
    if schema > SCHEMA:
        raise UserError(f"{_WHERE}.schema is {schema}, this vlmcompress reads up to {SCHEMA}; upgrade it")
