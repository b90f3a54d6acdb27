#!/usr/bin/env python
"""Print the reference of recipe keys, made from the types that check them; `docs/recipes.md` is what it prints.

    scripts/recipe_reference.py > docs/recipes.md

Names, types, defaults and limits come from the classes, what a key means from their docstrings: its `Attributes:` section
where it has one, the whole docstring above the table where it has none.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vlmcompress.quantization import schemes
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods._base import ShareReducer
from vlmcompress.reduction.methods._selecting import SelectingReducer

INTRO = """\
# Recipe keys

A recipe decides what `vlmcompress quantize` writes. It is a YAML file; on the command line `--set options.damp=0.1` sets
the key `damp` below `options`, and the most used keys have flags (`--scheme`, `--target`, `--reduce`, ...). The first of
these wins: command line, recipe file, target, default. `--dry-run` shows every key, its value and its origin.

```yaml
# 4 bits for an A100, half of each image's tokens, calibrated on your questions
target: a100
scheme: awq
options:
  group_size: 128
reduce:
  method: divprune
  keep: 0.5
calibrate:
  data: questions.jsonl
  samples: 256
```

`--recipe` takes a file or a name of `vlmcompress list recipes`. **Paths in a recipe file are relative to its folder**,
those of flags and `--set` to the current one; images that a data file names are relative to the data file. Schemes are
explained in [quantization](quantization.md), reducers in [visual tokens](visual-tokens.md).
`scripts/recipe_reference.py` prints this page from the classes that check a recipe.
"""

SHARED = """\
`keep` is the share of the tokens that stay. `keep_max` is the largest that [a request may
set](serving.md#tokens-on-demand); by default none may. {sharing} take it. Methods that select tokens ({selecting}) also take
`merge`, `none` (the default:
the others are dropped) or `nearest` (each is averaged into the selected token of highest cosine to it, where that is at
least 0.6).
"""


def page() -> str:
    """Render the whole page."""
    parts = {name: _model(field.annotation) for name, field in Recipe.model_fields.items()}
    nested = {name: part for name, part in parts.items() if part}
    sections = [INTRO, "## The recipe\n", _table(Recipe)]
    for name, part in nested.items():
        sections += [f"## `{name}`\n", f"{_plain(_summary(part))}\n", _table(part)]
    sections += ["## `options`: of each scheme\n", _options(schemes.REGISTRY)]
    reducers = {name: methods.REGISTRY.get(name) for name in methods.REGISTRY.names()}
    selecting, sharing = (
        ", ".join(f"`{name}`" for name, reducer in reducers.items() if isinstance(reducer, kind))
        for kind in (SelectingReducer, ShareReducer)
    )
    sections += ["## `reduce`: options of each reducer, next to `method`\n"]
    sections += [SHARED.format(selecting=selecting, sharing=sharing), _options(methods.REGISTRY)]
    return "\n".join(sections).rstrip() + "\n"


def _model(annotation: Any) -> type[BaseModel] | None:
    """The class of a field's nested keys, if it has any."""
    choices = typing.get_args(annotation) or (annotation,)
    return next((choice for choice in choices if isinstance(choice, type) and issubclass(choice, BaseModel)), None)


def _options(registry: Any) -> str:
    """Render a section for each entry of a registry: its summary, its options' docstring, and their table."""
    rows = []
    for name in registry.names():
        entry = registry.get(name)
        options = getattr(entry, "OPTIONS", type(entry))
        presets = registry.constant(name, "PRESETS") or ()
        also = [f"`{alias}`" for alias in (*registry.aliases(name), *presets)]
        named = f" Also {', '.join(also)}." if also else ""
        rows += [f"### `{name}`\n", f"{_plain(registry.summary(name))}.{named}\n"]
        if dataclasses.fields(options):
            meaning = re.sub(r"^`keep`: share of the tokens(; |\.$)", "", _plain(inspect.getdoc(options) or ""))
            rows += [f"{meaning} Defaults: {_defaults(options)}.\n".lstrip()]
    return "\n".join(rows)


def _defaults(options: type) -> str:
    """List options with their defaults, and with their types where a default does not show it."""
    hints, texts = typing.get_type_hints(options), []
    for name, default, _ in _fields(options):
        plain = hints[name] is Any or type(getattr(options, name, None)) is hints[name]
        texts.append(f"`{name}` {default}" + ("" if plain else f" ({_type(hints[name])})"))
    return ", ".join(texts)


def _table(cls: type) -> str:
    """Render a table with a row for each key: name, type, default and meaning, from the class's `Attributes:` section."""
    meanings = _attributes(cls)
    hints = typing.get_type_hints(cls)
    rows = []
    for name, default, limits in _fields(cls):
        rows.append([f"`{name}`", _type(hints[name], limits), default, _plain(meanings.get(name, ""))])
    head = ["key", "type", "default", "meaning"]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _fields(cls: type) -> Iterable[tuple[str, str, str]]:
    """List name, default and limits of each field of a pydantic model or a dataclass."""
    if issubclass(cls, BaseModel):
        for name, field in cls.model_fields.items():
            limits = [_limit(bound) for bound in field.metadata]
            yield name, "required" if field.is_required() else _value(field.default), ", ".join(filter(None, limits))
    else:
        for bound in dataclasses.fields(cls):
            shared = bound.kw_only  # `SHARED` has them
            if bound.name != "network" and not shared:  # `network`: the content of a file that an option names
                yield bound.name, _value(bound.default), ""


def _limit(metadata: Any) -> str:
    """Write a bound of a number in words."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{word} {bound}"
        for key, word in words.items()
        if (bound := getattr(metadata, key, None)) is not None and bound < 10**9
    ]
    return " ".join(limits)


def _value(value: Any) -> str:
    """Write a default as YAML."""
    if value is None:
        return "`null`"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value:.4g}`" if isinstance(value, float) else f"`{value}`"


def _type(hint: Any, limits: str = "") -> str:
    """Write a type in words."""
    simple = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "path", Any: "see below"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in simple:
        words = simple[hint]
    elif origin is typing.Literal:
        words = " or ".join(f"`{argument}`" for argument in arguments)
    elif origin in (typing.Union, types.UnionType):
        words = " or ".join(_type(argument) for argument in arguments if argument is not type(None))
    elif origin is tuple:
        words = f"list of {' or '.join(f'{argument}s' for argument in _type(arguments[0]).split(' or '))}"
    elif origin is dict:
        words = f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    else:
        words = "keys below" if isinstance(hint, type) and issubclass(hint, BaseModel) else str(hint)
    return f"{words}, {limits}" if limits else words


def _attributes(cls: type) -> Mapping[str, str]:
    """Read the `Attributes:` sections of a class and of those it extends: field -> text."""
    meanings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?=    \w)", text.partition("\n\n")[0]):
            name, colon, meaning = " ".join(entry.split()).partition(": ")
            if colon and name.isidentifier():
                meanings[name] = meaning
            elif colon:  # several fields share one entry
                meanings |= dict.fromkeys(re.split(r", ", name), meaning)
    return meanings


def _summary(cls: type) -> str:
    """The first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())


def _plain(text: str) -> str:
    """Write docstring text as one line, in the words of YAML."""
    text = re.sub(r"see `[\w.]*statistics\.balance`", "see [balance](quantization.md#balance)", " ".join(text.split()))
    return re.sub(r"\bNone\b", "null", text)


if __name__ == "__main__":
    print(page(), end="")
