"""Which linear layers of a checkpoint are quantized and how, and their names: the content of every format's config block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlmcompress.numerics import Scheme

LM_HEAD, EMBEDDING = "lm_head", "embed_tokens"
"""Suffixes of the names of the output head and the token embedding, in every family."""
Names = tuple[str, ...]
"""The distinct names of one module: in memory (transformers), on disk, in vLLM."""


@dataclass(frozen=True)
class Kept:
    """A part of the model that stays in 16 bits.

    Attributes:
        names: its names in memory, on disk and in vLLM.
        whole: whether it is a module with all its submodules, not one linear layer.
        mtp: whether it is an MTP head, for which readers expect entries in another form.
    """

    names: Names
    whole: bool
    mtp: bool = False


@dataclass(frozen=True)
class Layers:
    """Which linear layers of a checkpoint are quantized, and how.

    Attributes:
        groups: schemes with compressed-tensors' targets that match their layers.
        kept: parts that are not quantized.
        quantized: names of a quantized layer -> its scheme.
        kv_cache: whether there are scales of an FP8 KV cache.
    """

    groups: Sequence[tuple[Scheme, Sequence[str]]]
    kept: Sequence[Kept]
    quantized: Mapping[Names, Scheme]
    kv_cache: bool = False

    @property
    def vocabulary(self) -> list[str]:
        """Which of the output head and the token embedding are quantized."""
        return [names[0] for names in self.quantized if names[0].endswith((LM_HEAD, EMBEDDING))]

    @property
    def schemes(self) -> list[Scheme]:
        """The different schemes, the most common one first."""
        schemes = list(self.quantized.values())
        return sorted(dict.fromkeys(schemes), key=schemes.count, reverse=True)
