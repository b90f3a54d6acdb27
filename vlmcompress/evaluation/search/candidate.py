"""Candidates of a search: what may be done to a model, as recipe keys that can be combined."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmcompress.utils.identity import json_digest

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Choice:
    """One way to change a model: `name` for people, and the recipe `keys` that ask for it.

    Attributes:
        recover: whether the model is trained with its reducer first (`training.recover`).
        file_hash: hash of the file that its reducer reads; "" where it reads none.
    """

    name: str
    keys: Mapping[str, Any] = field(hash=False)
    recover: bool = False
    file_hash: str = ""


@dataclass(frozen=True)
class Factor:
    """Choices of which a candidate takes one at most, such as all schemes."""

    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Candidate:
    """At most one choice of each factor; with none it is the model as it is."""

    choices: tuple[Choice, ...] = ()

    @property
    def name(self) -> str:
        """The choices' names, joined."""
        return " + ".join(choice.name for choice in self.choices) or AS_IT_IS

    @property
    def keys(self) -> dict[str, Any]:
        """The recipe keys of all choices; the weights stay as they are where no choice names a scheme."""
        recipe_keys: dict[str, Any] = {"scheme": "none"}
        for choice in self.choices:
            recipe_keys |= choice.keys
        return recipe_keys

    @property
    def recover(self) -> bool:
        """Whether the model is trained with its reducer first."""
        return any(choice.recover for choice in self.choices)

    @property
    def folder(self) -> str:
        """A name for files, the same for the same keys and the same files that they name."""
        return digest([self.keys, self.recover, *(choice.file_hash for choice in self.choices if choice.file_hash)])

    def plain(self) -> dict[str, Any]:
        """The candidate as JSON data."""
        return {"name": self.name, "recipe": self.keys} | ({"recover": True} if self.recover else {})


def digest(value: Any) -> str:
    """A short hash of JSON data."""
    return json_digest(value, default=str)[:12]


def singles(factors: Sequence[Factor]) -> list[Candidate]:
    """List the candidates that change one thing alone."""
    return [Candidate((choice,)) for factor in factors for choice in factor.choices]


def combined(factors: Sequence[Factor]) -> list[Candidate]:
    """List the candidates that change two things and more: every combination of choices of different factors."""
    options = [(None, *factor.choices) for factor in factors]
    every = (tuple(choice for choice in chosen if choice is not None) for chosen in itertools.product(*options))
    return [Candidate(chosen) for chosen in every if len(chosen) > 1]
