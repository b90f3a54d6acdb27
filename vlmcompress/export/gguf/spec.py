"""What a GGUF file needs to know of a model family.

Names on the left are memory names (those of `model.named_parameters()` in transformers 5), with `{}` for a block's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """What a checkpoint says of itself.

    Attributes:
        config: transformers' configuration with all defaults, as JSON data.
        image: the settings of its image processor, too.
        tokens: ids of the tokenizer's added tokens by their text.
    """

    config: Mapping[str, Any]
    image: Mapping[str, Any]
    tokens: Mapping[str, int] = field(default_factory=dict)


Value = Callable[[ModelFacts], Any]
"""Reads a metadata value from the facts: a truth value, an int, a float, a text or a list; None leaves it out."""


Order = Callable[[ModelFacts], Sequence[int]]
"""The numbers of rows or columns in the order in which they stand in GGUF."""


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a GGUF file and where it comes from.

    Attributes:
        source: memory name of a parameter.
        target: name in the GGUF file.
        part: which of so many equal parts of the rows it is, as (0, 3) of a fused q/k/v.
        rows, columns: function that gives the order in which rows or columns stand in GGUF, a list of their numbers; None: it
            stays.
        change: function that brings a tensor that is not quantized into another shape; None: it has that shape.
        stacked: the last `{}` of `source` counts experts, whose matrices become one tensor.
        number: function that gives the block's number in GGUF for that in memory; None: they are equal.
        add: number added to each value: norms that compute `x * (1 + weight)` are `x * weight` in ggml.
    """

    source: str
    target: str
    part: tuple[int, int] = (0, 1)
    rows: Order | None = None
    columns: Order | None = None
    change: Callable[[Any, ModelFacts], Any] | None = None
    stacked: bool = False
    number: Callable[[ModelFacts, int], int] | None = None
    add: float = 0.0


@dataclass(frozen=True)
class GgufFile:
    """One of a family's two files.

    Attributes:
        keys: metadata key -> value; `{arch}` stands for the architecture.
        rules: its tensors.
    """

    keys: Mapping[str, Value]
    rules: tuple[TensorRule, ...]


@dataclass(frozen=True)
class GgufFamily:
    """A family of vision-language models in llama.cpp.

    Attributes:
        arch: the language model's architecture.
        language, vision: the two files.
        unused: parameters that llama.cpp does not read, by the beginning of their names.
        image: the text in a rendered chat prompt that stands for an image.
        marker: what stands for it in a prompt for llama.cpp, with `{}` for the marker of media.
        check: function that yields what llama.cpp computes otherwise than the checkpoint asks for, a line each.
    """

    arch: Value
    language: GgufFile
    vision: GgufFile
    image: str
    marker: str = "{}"
    unused: tuple[str, ...] = ()
    check: Callable[[ModelFacts], list[str]] = lambda facts: []


def at(path: str, kind: type | None = None) -> Value:
    """A value of the configuration by its dotted path, as `kind`, such as float; None where it is missing."""

    def read(facts: ModelFacts) -> Any:
        value: Any = facts.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if value is None or kind is None else kind(value)

    return read


def always(value: Any) -> Value:
    """The same value for each checkpoint."""
    return lambda facts: value
