"""What becomes of a model's linear layers, and what they are called: what every format's config block says in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmcompress.numerics import Scheme

Names = tuple[str, ...]
"""The distinct names of one module: in memory (transformers), on disk, in vLLM."""


@dataclass(frozen=True)
class Kept:
    """A part of the model that stays in 16 bits.

    Attributes:
        names: what it is called.
        whole: it is a module with everything below it, not one linear layer.
        draft: it is a head that drafts tokens, of which readers look for entries in a form of their own.
    """

    names: Names
    whole: bool
    draft: bool = False


@dataclass(frozen=True)
class Layers:
    """Which linear layers of a checkpoint are quantized, and how.

    Attributes:
        groups: schemes with the targets of compressed-tensors that stand for their layers.
        kept: what stays as it is.
        quantized: each quantized layer's names -> its scheme.
        kv_cache: whether there are scales of an FP8 KV cache.
    """

    groups: Sequence[tuple[Scheme, Sequence[str]]]
    kept: Sequence[Kept]
    quantized: Mapping[Names, Scheme]
    kv_cache: bool = False

    @property
    def schemes(self) -> list[Scheme]:
        """The different schemes, the most common one first."""
        schemes = list(self.quantized.values())
        return sorted(dict.fromkeys(schemes), key=schemes.count, reverse=True)
