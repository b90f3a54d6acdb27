"""The recipe's key `bits`: a bit budget for the decoder's groups, instead of one width for all."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vlmcompress.recipe.allocation import RULES
from vlmcompress.utils.errors import did_you_mean
from vlmcompress.utils.text import require_size

NAMED = ("fp8", "int8", "bf16")  # besides the recipe's own scheme at 2 to 8 bits
DEFAULT = (2, 3, 4, 8)


class Bits(BaseModel):
    """A budget of bits: either `budget` or `max_size` is given.

    Attributes:
        budget: bits per weight of the decoder's quantized layers, scales and zero points included.
        max_size: bytes of all weights that are written, like 2.4GB.
        among: the widths that a group of layers can get: bits of the recipe's own scheme, `fp8`, `int8` (weights and
            activations) or `bf16` (not quantized); None: those of 2, 3, 4 and 8 bits that the target runs. On a target
            without 8-bit weights with 16-bit activations, 8 bits mean its own 8-bit scheme.
        by: the rule that allocates the budget (`vlmcompress.recipe.allocation`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: float | None = Field(default=None, gt=0, le=16)
    max_size: str | None = None
    among: tuple[int | str, ...] | None = Field(default=None, min_length=1)
    by: str = "error"

    @field_validator("max_size")
    @classmethod
    def _size(cls, text: str | None) -> str | None:
        return None if text is None else require_size(text)

    @field_validator("among")
    @classmethod
    def _known(cls, among: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
        for width in among or ():
            if width not in NAMED and not (type(width) is int and 2 <= width <= 8):
                hint = did_you_mean(width, NAMED) if isinstance(width, str) else ""
                raise ValueError(f"should have whole numbers from 2 to 8, {', '.join(NAMED)}, and has {width!r}{hint}")
        if among and len(set(among)) < len(among):
            raise ValueError("should name each width once")
        return among

    @field_validator("by")
    @classmethod
    def _rule(cls, name: str) -> str:
        if name not in RULES:
            raise ValueError(f"should be one of {', '.join(RULES)}{did_you_mean(name, RULES)}")
        return name

    @model_validator(mode="after")
    def _one(self) -> Any:
        if (self.budget is None) == (self.max_size is None):
            raise ValueError("should have one of budget (bits per weight) and max_size (like 2.4GB)")
        return self
