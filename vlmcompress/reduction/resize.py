"""The recipe's key `resize`: images made smaller before the encoder, by the settings of the model's own processor."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

METHOD = "resize"
"""What stands for the key among the reducers: `--reduce resize:0.5`."""


class Resize(BaseModel):
    """Images made smaller before the encoder. The processor's settings say it, so every engine does it without a plugin.

    Attributes:
        keep: share of the visual tokens that the calibration images have now; the largest setting that leaves at most so many
            is taken.
        tokens: the most visual tokens of an image. With it no images are looked at; without it `keep` decides it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    keep: float | None = Field(default=None, gt=0, le=1)
    tokens: int | None = Field(default=None, ge=1, le=10**9)

    @field_validator("keep", mode="before")
    @classmethod
    def _fraction(cls, keep: Any) -> Any:
        match = re.fullmatch(r"(\d+)/([1-9]\d*)", keep.strip()) if isinstance(keep, str) else None
        return int(match[1]) / int(match[2]) if match else keep

    @model_validator(mode="after")
    def _some(self) -> Any:
        if self.keep is None and self.tokens is None:
            raise ValueError("should have keep (a share of the tokens) or tokens (the most of an image)")
        return self

    @property
    def settled(self) -> bool:
        """Whether it is known without looking at images."""
        return self.tokens is not None

    def same(self, other: Resize | None) -> bool:
        """Whether this is what was asked for, apart from the `tokens` that a share came to."""
        return other is not None and self.keep == other.keep and other.tokens in (None, self.tokens)

    def __str__(self) -> str:
        """Write it in the command line's form."""
        parts = [] if self.keep is None else [f"{self.keep:g}"]
        parts += [] if self.tokens is None else [f"tokens={self.tokens}"]
        return f"{METHOD}:{','.join(parts)}"
