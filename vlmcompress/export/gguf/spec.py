"""The description of a model family for GGUF files.

Source names are memory names (those of `model.named_parameters()` in transformers 5), with `{}` for a block's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """Settings of a checkpoint.

    Attributes:
        config: transformers' configuration with all defaults, as JSON data.
        image: the settings of its image processor, with all defaults.
        tokens: ids of the tokenizer's added tokens by their text.
    """

    config: Mapping[str, Any]
    image: Mapping[str, Any]
    tokens: Mapping[str, int] = field(default_factory=dict)


Value = Callable[[ModelFacts], Any]
"""Function from the facts to a metadata value: a bool, int, float, string or list; None leaves the key out."""


Order = Callable[[ModelFacts], Sequence[int]]
"""Function from the facts to the indices of rows or columns in GGUF's order."""


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a GGUF file and its source.

    Attributes:
        source: memory name of a parameter.
        target: name in the GGUF file.
        part: (index, count) of equal parts of the rows, as (0, 3) for q in a fused q/k/v.
        rows, columns: function to the indices of rows or columns in GGUF's order; None: unchanged.
        change: function that transforms an unquantized tensor; None: unchanged.
        stacked: the last `{}` of `source` is the number of an expert; the experts' matrices become one tensor.
        number: function from the block's number in memory, or 0 outside of blocks, to that in GGUF; None: equal.
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
        unused: name prefixes of parameters that llama.cpp does not read; `{blocks}` stands for the decoder's number of blocks.
        image: the text of an image in a rendered chat prompt.
        marker: its replacement in a prompt for llama.cpp, with `{}` for the marker of media.
        limits: function to the least and most visual tokens of an image, which llama.cpp reads from its flags alone; to None
            where it has no such limits.
        pieces: llama.cpp's name of SentencePiece's BPE, see `tokenizer`.
        visible: special tokens that an answer shows, as llama.cpp parses it.
        problems: function to the reasons, one line each, why llama.cpp cannot run the checkpoint.
    """

    arch: Value
    language: GgufFile
    vision: GgufFile
    image: str
    marker: str = "{}"
    unused: tuple[str, ...] = ()
    limits: Callable[[ModelFacts], tuple[int, int] | None] = lambda facts: None
    pieces: str = "llama"
    visible: tuple[str, ...] = ()
    problems: Callable[[ModelFacts], list[str]] = lambda facts: []


def at(path: str, kind: type | None = None) -> Value:
    """The configuration's value at a dotted path, converted to `kind`, such as float; None if it is missing."""

    def read(facts: ModelFacts) -> Any:
        value: Any = facts.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if value is None or kind is None else kind(value)

    return read


def always(value: Any) -> Value:
    """The same value for each checkpoint."""
    return lambda facts: value
