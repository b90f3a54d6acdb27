"""Candidates of a search: combinable changes to a model, as recipe keys."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmcompress.utils.identity import json_digest

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Choice:
    """One change to a model: its display `name`, its recipe `keys`, and the hash of the file that its reducer reads, if any."""

    name: str
    keys: Mapping[str, Any] = field(hash=False)
    file_hash: str = ""


@dataclass(frozen=True)
class Factor:
    """Alternative choices, such as all schemes, of which a candidate has at most one."""

    name: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Candidate:
    """At most one choice of each factor; without choices, the unchanged model."""

    choices: tuple[Choice, ...] = ()

    @property
    def name(self) -> str:
        """The choices' names, joined."""
        return " + ".join(choice.name for choice in self.choices) or AS_IT_IS

    @property
    def keys(self) -> dict[str, Any]:
        """The recipe keys of all choices, with the scheme `none` if no choice has a scheme."""
        recipe_keys: dict[str, Any] = {"scheme": "none"}
        for choice in self.choices:
            recipe_keys |= choice.keys
        return recipe_keys

    @property
    def folder(self) -> str:
        """A file name, equal for equal keys and equal contents of the files in them."""
        return digest([self.keys, *(choice.file_hash for choice in self.choices if choice.file_hash)])

    def plain(self) -> dict[str, Any]:
        """The candidate as JSON data."""
        return {"name": self.name, "recipe": self.keys}


def digest(value: Any) -> str:
    """A short hash of JSON data."""
    return json_digest(value, default=str)[:12]


def singles(factors: Sequence[Factor]) -> list[Candidate]:
    """The candidates with a single choice."""
    return [Candidate((choice,)) for factor in factors for choice in factor.choices]


def combined(factors: Sequence[Factor]) -> list[Candidate]:
    """The candidates with two choices or more: all combinations of choices of different factors."""
    options = [(None, *factor.choices) for factor in factors]
    every = (tuple(choice for choice in chosen if choice is not None) for chosen in itertools.product(*options))
    return [Candidate(chosen) for chosen in every if len(chosen) > 1]
