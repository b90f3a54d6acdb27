"""The choice of a reducer with its options, in the forms of the command line and of recipes.

    --reduce dart:0.25                      the share that is kept
    --reduce dart:0.25,pivots=8             and other options
    --reduce dymu:thresholds=FILE.json      what `vlmcompress learn-reducer` wrote
    reduce: {method: dart, keep: 0.25, pivots: 8}

`--reduce resize:0.5` makes images smaller instead, which is the recipe's key `resize`; given before a reducer, both are done:

    --reduce resize:0.5 --reduce coverage:0.5
    reduce: [resize:0.5, coverage:0.5]

`keep: auto` is the method's own default. Shares may be written as fractions (`1/3`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from vlmcompress.reduction.resize import METHOD as RESIZE
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import yaml_files
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.identity import sha256
from vlmcompress.utils.registry import REDUCERS
from vlmcompress.utils.settings import Layer

if TYPE_CHECKING:  # its modules import torch
    from vlmcompress.reduction.methods import Grid, Reducer


# Earlier reducer -> what does its work, no worse by docs/results.md.
RETIRED = {
    "tome": "dymu, which learns where tokens merge",
    "scope": "coverage",
    "pyramiddrop": "fastv",
    "cdpruner": "coverage, or divprune",
    "dyrate": "fastv, which drops tokens once, before the answer",
    "litevlm": "coverage; a request may set its own share of tokens",
    "relevance": "coverage",
    "pevlm": "evs for videos, which drops tokens",
}
# Earlier option of a method -> its value now, with which checkpoints of before name it.
RETIRED_OPTIONS: dict[str, dict[str, Any]] = {
    "coverage": {"temperature": 0.2, "similar": 0.6},
    "dart-llm": {"pivots": 4, "text_pivots": 4},
    "visionzip": {"contextual": 10 / 64, "merge": "sum"},
    **{method: {"similar": 0.6} for method in ("dart", "divprune", "evs", "learned", "random", "uniform")},
}


@dataclass(frozen=True)
class ReducerChoice:
    """A reducer with its options, by the name of its method."""

    method: str
    reducer: Reducer

    @property
    def takes_shares(self) -> bool:
        """Whether a request to vLLM may set the share of tokens that its images keep."""
        return self.reducer.keep_max is not None

    @property
    def takes_count(self) -> bool:
        """Whether the number of kept tokens depends on the image but can be set by the caller."""
        return self.reducer.COUNT == "adaptive" and self.reducer.STAGE == "encoder"

    @property
    def has_thresholds(self) -> bool:
        """Whether the options hold learned thresholds."""
        return self.reducer.has_thresholds

    def with_thresholds(self, thresholds: tuple[float, ...] | None) -> ReducerChoice:
        """This reducer with these thresholds (None: without). Unchanged where the method learns none."""
        return ReducerChoice(self.method, self.reducer.with_thresholds(thresholds))

    @property
    def label(self) -> str:
        """The reducer in the command line's form, without learned thresholds."""
        return f"{self.with_thresholds(None)} (learned thresholds)" if self.has_thresholds else str(self)

    def file_hash(self) -> str:
        """SHA-256 of the options' file (a scorer or thresholds); "" where there is none."""
        named = [
            Path(name) for name in (self.reducer.scorer, self.reducer.thresholds) if isinstance(name, str) and name
        ]
        return sha256(named[0]) if named and named[0].is_file() else ""

    def plain(self) -> dict[str, Any]:
        """The reducer as a recipe's mapping: all options of the method, and shared options that are not at their
        default.

        So older versions without `merge` can read it when `merge` is unused.
        """
        common = {field.name: field.default for field in dataclasses.fields(self.reducer) if field.kw_only}
        settings = self.reducer.settings()
        chosen = {key: value for key, value in settings.items() if key not in common or value != common[key]}
        return {"method": self.method, **chosen}

    def __str__(self) -> str:
        """Write the reducer in the command line's form: the share, and options that differ from their defaults.

        File hashes are left out.
        """
        default = type(self.reducer)()
        settings = {name: value for name, value in self.reducer.settings().items() if name not in ("keep", "sha256")}
        parts = [] if self.reducer.keep is None else [_share(self.reducer.keep)]
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
        parts += [f"{name}={texts[name]}" for name, value in settings.items() if value != getattr(default, name)]
        return f"{self.method}:{','.join(parts)}" if parts else self.method

    def requested(self, keep: Any) -> float:
        """Check the share, or number of tokens, that a request sets for its images. ValueError if it may not set it."""
        from vlmcompress.reduction.methods import LEAST_SHARE, MOST

        most = self.reducer.keep_max
        if most is None:
            raise ValueError(f"{self} has no 'keep_max', up to which requests may set 'keep'; leave it out")
        number = type(keep) in (int, float)
        if not number or not (LEAST_SHARE <= keep <= most or (1 < keep <= MOST and keep == int(keep))):
            raise ValueError(
                f"'keep' must be a share above 0 and at most {most:g}, or a number of tokens from 2, got {reprlib.repr(keep)}"
            )
        return float(keep)

    def keeping(self, keep: float, tokens: int) -> ReducerChoice:
        """This reducer with what a request set: a share or, above 1, the most tokens that an image of `tokens` keeps."""
        share = keep if keep <= 1 else min(keep / tokens, self.reducer.keep_max or 1)
        options: Any = self.reducer
        return ReducerChoice(self.method, dataclasses.replace(options, keep=share))

    @property
    def largest(self) -> ReducerChoice:
        """This reducer with the largest share that a request may set, for which vLLM reserves memory."""
        most = self.reducer.keep_max
        return self if most is None else self.keeping(most, 1)

    def left(self, grid: Grid, blocks: int) -> list[int] | None:
        """Count a grid's tokens in each of a language model's `blocks`; None where that depends on what the image shows."""
        count, first = self.reducer.budget(grid), self.reducer.layer or 0
        return None if count is None else [math.prod(grid)] * first + [count] * (blocks - first)

    def too_small(self, grid: Grid) -> bool:
        """Whether the kept share of such a grid rounds to no token, so that all tokens stay."""
        from vlmcompress.reduction.methods import too_small

        return too_small(self.reducer, grid)


def parse_reducer(text: str) -> ReducerChoice:
    """Read the reducer from the value of `--reduce`. UserError for an unknown method or option, or a wrong value."""
    where = f"--reduce {text}"
    values = split(text, where)
    if values["method"] == RESIZE:
        raise UserError(f"{where}: {RESIZE} is not a token reducer but a processor setting, which `quantize` writes")
    return make_choice(values.pop("method"), values, where)


def compared(texts: Sequence[str]) -> tuple[Resize | None, list[ReducerChoice]]:
    """Read several `--reduce` values to be compared: a `resize`, if any, and reducers."""
    where = "--reduce"
    stages = [split(text, f"{where} {text}") for text in texts]
    resizes = [values for values in stages if values["method"] == RESIZE]
    if len(resizes) > 1:
        raise UserError(f"{where}: {RESIZE} is given {len(resizes)} times; give it once")
    others = [parse_reducer(text) for text, values in zip(texts, stages, strict=True) if values["method"] != RESIZE]
    try:
        return (
            Resize(**{key: value for key, value in resizes[0].items() if key != "method"}) if resizes else None
        ), others
    except ValidationError as error:
        problem = error.errors()[0]
        key = "".join(f" {part}" for part in problem["loc"])
        raise UserError(f"{where} {RESIZE}:{key} {problem['msg'].removeprefix('Value error, ')}") from error


def split(text: str, where: str) -> dict[str, Any]:
    """Read `dart:0.25,pivots=8` as a recipe's mapping, values unchecked. `where` begins the message of UserErrors."""
    method, _, rest = text.partition(":")
    values: dict[str, Any] = {"method": method.strip()}
    for number, part in enumerate(re.split(r",(?![^\[]*\])", rest) if rest else []):
        key, equals, value = part.partition("=")
        if not equals:
            if number:
                raise UserError(f"{where}: '{part}' is not a setting; write METHOD:KEEP,OPTION=VALUE")
            key, value = "keep", part
        if key.strip() in values:
            raise UserError(f"{where}: '{key.strip()}' is given twice; remove one")
        values[key.strip()] = yaml_files.parse_yaml(value, where)
    return values


def reducer_of_setting(setting: Any, where: str = "reduce") -> ReducerChoice:
    """Read the reducer from a recipe's `reduce`: a mapping with `method` and options, or the command line's form."""
    if isinstance(setting, str):
        return parse_reducer(setting)
    if not isinstance(setting, Mapping) or not isinstance(setting.get("method"), str):
        raise UserError(f"{where} is {setting!r}; write it like {{method: dart, keep: 0.5}}")
    return make_choice(setting["method"], {key: value for key, value in setting.items() if key != "method"}, where)


def make_choice(method: str, values: Mapping[str, Any], where: str) -> ReducerChoice:
    """Check a method and its options. `where` begins the message of the UserError that anything wrong raises."""
    if method in RETIRED and method not in REDUCERS:
        raise UserError(f"{where}: there is no reducer '{method}' any more; take {RETIRED[method]}")
    try:
        cls = type(REDUCERS.get(method))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    types = typing.get_type_hints(cls)
    hints, checked = {name: types[name] for name in cls().settings()}, {}
    for key, value in values.items():
        if key not in hints and key in (retired := RETIRED_OPTIONS.get(method, {})):
            if value != retired[key]:
                raise UserError(f"{where}: '{method}' has no option '{key}' any more, it is always {retired[key]}")
            continue
        if key not in hints:
            share = key == "keep"
            what = "has no share to keep" if share else f"has no option '{key}'"
            names = [field.name for field in dataclasses.fields(cls) if not field.kw_only]
            close = f"; its options are {', '.join(names)}" if share else did_you_mean(str(key), hints)
            raise UserError(f"{where}: '{method}' {what}{close}")
        if key == "keep" and value == "auto":
            continue
        checked[key] = _typed(value, hints[key], f"{where}: '{method}': {key}")
    try:
        return ReducerChoice(method, cls(**checked))
    except ValueError as error:
        raise UserError(f"{where}: '{method}': {error}") from error


def layered(layers: Sequence[Layer]) -> list[Layer]:
    """Prepare the layers of a recipe, first one strongest, for merging: `reduce` as a mapping in each, `resize` next to it.

    A layer that names a method drops the options of weaker layers, which belong to another reducer.
    """
    prepared: list[Layer] = []
    named = False
    for origin, layer in layers:
        setting = layer.get("reduce")
        rest = {key: value for key, value in layer.items() if key != "reduce"}
        if not named and "reduce" in layer:
            resize, reduce = _stages(setting, f"{origin}: reduce")
            if resize is not None and "resize" in rest:
                raise UserError(f"{origin}: resize is given twice, once as a reducer; remove one")
            rest |= {} if resize is None else {"resize": resize}
            rest |= {"reduce": reduce} if reduce is not None or resize is None else {}
            named = not isinstance(reduce, Mapping) or "method" in reduce
        prepared.append((origin, rest))
    return prepared


def _stages(setting: Any, where: str) -> tuple[Any, Any]:
    """Split `reduce` into the recipe's `resize` and its reducer, as mappings or None."""
    stages = setting if isinstance(setting, list) else [setting]
    every = [split(stage, f"{where} {stage}") if isinstance(stage, str) else stage for stage in stages]
    names = [stage.get("method") if isinstance(stage, Mapping) else None for stage in every]
    if names.count(RESIZE) > 1 or len(every) - names.count(RESIZE) > 1:
        both = " and ".join(map(str, names))
        raise UserError(f"{where}: {both} do not go together; a recipe has {RESIZE} and one other reducer")
    if RESIZE not in names:
        return None, every[0] if every else None
    if names[0] != RESIZE:
        raise UserError(f"{where}: {RESIZE} works on images, before {names[0]}; name it first")
    return {key: value for key, value in every[0].items() if key != "method"}, (every[1] if len(every) > 1 else None)


def merged_reducer(setting: Any, origins: Mapping[str, str]) -> ReducerChoice | None:
    """The reducer of merged settings, or None. UserError for an unknown method or wrong option.

    Args:
        setting: the merged value of `reduce`.
        origins: dotted key of a recipe -> where its value came from.
    """
    if setting is None:
        return None
    origin = next((origin for key, origin in origins.items() if f"{key}.".startswith("reduce.")), "default")
    return reducer_of_setting(setting, f"{origin}: reduce")


def calibrated(reducer: ReducerChoice | None) -> ReducerChoice | None:
    """The reducer to calibrate with: the given one if it acts before the language model, else None.

    A reducer within the language model only makes the blocks' tokens fewer.
    """
    return reducer if reducer and reducer.reducer.STAGE != "llm" else None


def same(reducer: ReducerChoice | None, other: ReducerChoice | None) -> bool:
    """Whether two reducers are the same, ignoring numbers that are learned or read from a file."""
    if reducer is None or other is None or other.has_thresholds:
        return reducer == other
    return reducer.with_thresholds(None) == other.with_thresholds(None)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Convert `value` to the option's type; fractions like `1/3` become numbers."""
    try:
        if (
            hint in (float, float | None)
            and isinstance(value, str)
            and (fraction := re.fullmatch(r"(\d+)/([1-9]\d*)", value.strip()))
        ):
            value = int(fraction[1]) / int(fraction[2])
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except (ValueError, TypeError, OverflowError) as error:  # ValidationError is a ValueError
        kinds: dict[Any, str] = {
            float: "a number",
            float | None: "a number",
            int: "a whole number",
            str: "a word",
            bool: "true or false",
        }
        words = " or ".join(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else None
        kind = words or kinds.get(hint, "a list of numbers")
        raise UserError(f"{where} is {reprlib.repr(value)}, should be {kind}") from error


def _share(keep: float) -> str:
    """Write a share as `0.25`, or as a fraction like `1/3` where a decimal of few digits would not be exact."""
    close = Fraction(keep).limit_denominator(100)
    fraction = f"{close.numerator}/{close.denominator}"
    return next((text for text in (f"{keep:g}", fraction) if float(Fraction(text)) == keep), repr(keep))
