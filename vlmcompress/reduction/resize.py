"""The recipe's key `resize`: images made smaller before the encoder, by the settings of the model's own processor."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

METHOD = "resize"
"""Name of the setting among the reducers: `--reduce resize:0.5`."""


class Resize(BaseModel):
    """Images made smaller before the encoder. It is part of the processor's settings, so engines that follow these apply it
    without a plugin.

    Attributes:
        keep: share of the calibration images' visual tokens; the largest setting that leaves at most this share is used.
        tokens: the most visual tokens of an image. If None it is determined from `keep` on the images.
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
        """Whether `tokens` is known, without needing images."""
        return self.tokens is not None

    def same(self, other: Resize | None) -> bool:
        """Whether both ask for the same, ignoring `tokens` that were determined from a share."""
        return other is not None and self.keep == other.keep and other.tokens in (None, self.tokens)

    def __str__(self) -> str:
        """Write it in the command line's form."""
        parts = [] if self.keep is None else [f"{self.keep:g}"]
        parts += [] if self.tokens is None else [f"tokens={self.tokens}"]
        return f"{METHOD}:{','.join(parts)}"
