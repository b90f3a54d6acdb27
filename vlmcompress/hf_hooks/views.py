"""Choose among the images of a prompt by their names, before any is encoded; what becomes of one that is left out.

An image is known by its name: the words before it, of the same line ("front camera: <image>"). Names are embedded by the
language model's own table, as are the words of the question, those behind the last image (all words, where none are). An
image without a name matches nothing, and of images that match equally the first ones stay. So what is seen is text alone,
and nothing of any image: the choice is made before pixels are looked at.

One token stays of an image that is left out, at the position of its first one, since engines refuse an image without any.
It is the embedding of a full stop, which changed the demo models' answers least of what was tried: 119 and 120 of 120 were
those without any token, the worst divergence 0.002 (`stand_in.py` of commit 5ff363c; zeros, and the image's own mark, 0.13).
Names and marks around it stay, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress import reducers
from vlmcompress.recipe.reducer import ReducerChoice
from vlmcompress.reducers import Signals
from vlmcompress.reducers.litevlm import matches

STAND_IN = "."


@dataclass(frozen=True)
class Words:
    """Token ids of a prompt's words: those of each image's name, and those of the question."""

    names: list[list[int]]
    question: list[int]


def find(tokenizer: Any, ids: Tensor, words: Tensor, spans: Sequence[tuple[int, int]]) -> Words:
    """Find the names of the images and the question of one prompt.

    Args:
        tokenizer: the model's, which tells where a line ends.
        ids: `[s]` token ids.
        words: `[s]` bool, true for words (no mark, no placeholder).
        spans: first column of each image and how many it has, in the order of the prompt.
    """
    given, names = ids.tolist(), []
    for start, _ in spans:
        name: list[int] = []
        for column in words[:start].nonzero().flatten().tolist()[::-1]:
            if (name and column != name[0] - 1) or "\n" in tokenizer.decode(given[column : column + 1]):
                break
            name.insert(0, column)
        names.append([given[column] for column in name])
    columns: list[int] = words.nonzero().flatten().tolist()
    question = [column for column in columns if column >= sum(spans[-1])] or columns
    return Words(names, [given[column] for column in question])


def stays(chosen: ReducerChoice, tokenizer: Any, embed: Callable[[Tensor], Tensor], words: Words) -> list[bool]:
    """Tell of each image of one prompt whether it stays. An only image does, so that nothing is embedded for it.

    `embed` makes `[n, d]`, rows of the language model's table, of ids `[n]`.
    """
    if len(words.names) == 1:
        return [True]

    def rows(ids: Sequence[int]) -> Tensor:
        return embed(torch.tensor(ids, dtype=torch.int64)).float()

    query = rows(words.question)
    features = [rows(name).mean(0) if name else query.new_zeros(query.shape[1]) for name in words.names]
    found = matches([tokenizer.decode(name) for name in words.names], tokenizer.decode(words.question))
    signals = Signals((len(features), 1, 1), features=torch.stack(features), query=query, saliency=found)
    return (reducers.reduce(chosen.module, signals, chosen.options).target >= 0).tolist()


def stand_in(tokenizer: Any) -> int:
    """Id of the text token whose embedding is all that is left of an image that does not stay."""
    ids: list[int] = tokenizer.encode(STAND_IN, add_special_tokens=False)
    return ids[-1]


def tokens_left(full: int, images: int, chosen: ReducerChoice) -> int:
    """Number of tokens left of `images` of one size, which have `full` tokens together."""
    stay: int = chosen.module.budget((images, 1, 1), chosen.options)
    return full * stay // images + images - stay
