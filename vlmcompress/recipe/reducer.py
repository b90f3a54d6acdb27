"""A reducer with its options, as it is written on the command line and in recipes.

    --reduce dart:0.25                      the share that is kept
    --reduce dart:0.25,pivots=8             and other options
    --reduce dymu:thresholds=FILE.json      what `vlmcompress thresholds` wrote
    reduce: {method: dart, keep: 0.25, pivots: 8}

`keep: auto` is the method's own default. Shares may be written as fractions (`1/3`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from vlmcompress import reducers
from vlmcompress.common import yaml_files
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.recipe.layers import Layer
from vlmcompress.reducers import REGISTRY, Grid


@dataclass(frozen=True)
class ReducerChoice:
    """A method and its `Options`."""

    method: str
    options: Any

    @property
    def module(self) -> ModuleType:
        """The method's module."""
        return REGISTRY.get(self.method)

    @property
    def asks(self) -> bool:
        """Whether it has to be shown the question."""
        return "query" in self.module.NEEDS or bool(getattr(self.options, "text_pivots", 0))

    @property
    def takes_count(self) -> bool:
        """Whether it keeps as many tokens of an image as it is told, instead of as many as the image asks for."""
        return hasattr(self.module, "merge") and self.module.COUNT == "adaptive"

    @property
    def learnt(self) -> bool:
        """Whether its options hold numbers that were learnt."""
        return isinstance(getattr(self.options, "thresholds", None), tuple)

    @property
    def asked_for(self) -> ReducerChoice:
        """The same as one asks for it, without what it has learnt since."""
        return (
            dataclasses.replace(self, options=dataclasses.replace(self.options, thresholds=None))
            if self.learnt
            else self
        )

    @property
    def label(self) -> str:
        """As the command line has it, without the numbers that it has learnt."""
        return f"{self.asked_for} (learnt thresholds)" if self.learnt else str(self)

    def plain(self) -> dict[str, Any]:
        """As a recipe has it, with every option."""
        return {"method": self.method, **dataclasses.asdict(self.options)}

    def __str__(self) -> str:
        """As the command line has it; only the share and what differs from the defaults."""
        default = type(self.options)()
        given = {name: value for name, value in dataclasses.asdict(self.options).items() if name != "keep"}
        parts = [_share(self.options.keep)] if hasattr(self.options, "keep") else []
        parts += [f"{name}={_yaml_text(value)}" for name, value in given.items() if value != getattr(default, name)]
        return f"{self.method}:{','.join(parts)}" if parts else self.method

    def too_small(self, grid: Grid) -> bool:
        """Whether the share of such a grid would be no token, so that it is kept whole."""
        return reducers.too_small(self.module, grid, self.options)


def parse(text: str) -> ReducerChoice:
    """What `--reduce` says. UserError for a method or option that is none, or a value that is wrong."""
    where = f"--reduce {text}"
    values = split(text, where)
    return choose(values.pop("method"), values, where)


def split(text: str, where: str) -> dict[str, Any]:
    """`dart:0.25,pivots=8` as a recipe's mapping, its values not checked. `where` begins the message of UserErrors."""
    method, _, rest = text.partition(":")
    values: dict[str, Any] = {"method": method.strip()}
    for number, part in enumerate(re.split(r",(?![^\[]*\])", rest) if rest else []):
        key, equals, value = part.partition("=")
        if not equals:
            if number:
                raise UserError(f"{where}: '{part}' is no setting; write METHOD:KEEP,OPTION=VALUE")
            key, value = "keep", part
        if key.strip() in values:
            raise UserError(f"{where}: '{key.strip()}' is given twice; remove one")
        values[key.strip()] = yaml_files.parse(value, where)
    return values


def read(given: Any, where: str = "reduce") -> ReducerChoice:
    """What a recipe's `reduce` says: a mapping with `method` and options, or the command line's form."""
    if isinstance(given, str):
        return parse(given)
    if not isinstance(given, Mapping) or not isinstance(given.get("method"), str):
        raise UserError(f"{where} is {given!r}; write it like {{method: dart, keep: 0.5}}")
    return choose(given["method"], {key: value for key, value in given.items() if key != "method"}, where)


def choose(method: str, values: Mapping[str, Any], where: str) -> ReducerChoice:
    """The method with these options. `where` begins the message of the UserError that anything wrong raises."""
    try:
        cls = REGISTRY.get(method).Options
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    hints, checked = typing.get_type_hints(cls), {}
    for key, value in values.items():
        if key not in hints:
            share = key == "keep"
            what = "has no share to keep" if share else f"has no option '{key}'"
            close = f"; its options are {', '.join(hints)}" if share else did_you_mean(str(key), hints)
            raise UserError(f"{where}: '{method}' {what}{close}")
        if key == "keep" and value == "auto":
            continue
        checked[key] = _typed(value, hints[key], f"{where}: '{method}': {key}")
    try:
        return ReducerChoice(method, cls(**checked))
    except ValueError as error:
        raise UserError(f"{where}: '{method}': {error}") from error


def layered(layers: Sequence[Layer]) -> list[Layer]:
    """The layers of a recipe, first one strongest, with `reduce` as a mapping in each, ready to be merged.

    A layer that names a method starts anew: options of weaker layers belong to another reducer and are left out.
    """
    found: list[Layer] = []
    named = False
    for origin, layer in layers:
        given = layer.get("reduce")
        if isinstance(given, str):
            given = split(given, f"{origin}: reduce {given}")
        if named or "reduce" not in layer:
            layer = {key: value for key, value in layer.items() if key != "reduce"}
        else:
            layer = {**layer, "reduce": given}
            named = not isinstance(given, Mapping) or "method" in given
        found.append((origin, layer))
    return found


def merged(given: Any, origins: Mapping[str, str]) -> ReducerChoice | None:
    """The reducer that merged settings name; None for none. UserError for one that is none, or an option that is wrong.

    Args:
        given: the merged value of `reduce`.
        origins: dotted key of a recipe -> where its value came from.
    """
    if given is None:
        return None
    origin = next((origin for key, origin in origins.items() if f"{key}.".startswith("reduce.")), "default")
    return read(given, f"{origin}: reduce")


def calibrated(reducer: ReducerChoice | None) -> ReducerChoice | None:
    """The reducer that a calibration runs behind: None where there is none, or one within the language model.

    Of the latter every block sees the same kinds of tokens as without it, those behind its layer fewer of them.
    """
    return reducer if reducer and reducer.module.STAGE != "llm" else None


def same(known: ReducerChoice | None, asked: ReducerChoice | None) -> bool:
    """Whether a reducer is the one that is asked for, apart from what it has learnt or will read from a file."""
    if known is None or asked is None or known.method != asked.method:
        return known is asked
    mine, wanted = known.plain(), asked.plain()
    if not isinstance(wanted.get("thresholds"), tuple | list):
        wanted["thresholds"] = mine.get("thresholds")
    return {**mine, "thresholds": mine.get("thresholds")} == wanted


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` as the option's type; fractions become numbers."""
    try:
        if hint is float and isinstance(value, str) and (found := re.fullmatch(r"(\d+)/([1-9]\d*)", value.strip())):
            value = int(found[1]) / int(found[2])
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except (ValueError, TypeError, OverflowError) as error:  # ValidationError is a ValueError
        kind = {float: "a number", int: "a whole number", str: "a word", bool: "true or false"}.get(
            hint, "a list of numbers"
        )
        raise UserError(f"{where} is {reprlib.repr(value)}, should be {kind}") from error


def _share(keep: float) -> str:
    """`0.25`, or a fraction where only that says it in a few digits: `1/3`."""
    close = Fraction(keep).limit_denominator(100)
    fraction = f"{close.numerator}/{close.denominator}"
    return next((text for text in (f"{keep:g}", fraction) if float(Fraction(text)) == keep), repr(keep))


def _yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
