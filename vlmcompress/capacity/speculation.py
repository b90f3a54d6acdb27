"""What speculative decoding takes: the weights and the cache of a head that drafts, and more states of recurrent blocks.

A head of the checkpoint (`mtp`) adds its decoder blocks' keys and values to the cache of each token. Whoever drafts, a
recurrent block keeps a state more for each drafted token, and as many inputs more of its convolution, to go back to.

Sources: vLLM 0.32 `models/qwen3_5_mtp.py`, `v1/kv_cache_interface.py` (`MambaSpec`), `layers/mamba/mamba_utils.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vlmcompress import models
from vlmcompress.capacity.decoder import Attention, Decoder
from vlmcompress.capacity.model import Model
from vlmcompress.errors import UserError, did_you_mean

METHODS = {"mtp": 1, "ngram": 4, "suffix": 4}  # and how many tokens they draft at once unless told otherwise


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: its method, the tokens drafted at once, bytes of a head's weights, and the head's blocks."""

    method: str
    tokens: int
    bytes: int = 0
    blocks: tuple[Attention, ...] = ()

    def __str__(self) -> str:
        """Write it as `--speculative` has it."""
        return f"{self.method}:{self.tokens}"

    def added(self, decoder: Decoder) -> Decoder:
        """The decoder with the head's blocks behind its own, which cache as those do."""
        return replace(decoder, blocks=(*decoder.blocks, *self.blocks))


def parse(text: str) -> tuple[str, int]:
    """Read `METHOD` or `METHOD:TOKENS`. Raises `UserError`."""
    method, _, count = text.partition(":")
    if method not in METHODS:
        raise UserError(f"--speculative {text[:40]}: no method '{method[:20]}'{did_you_mean(method, METHODS)}")
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= 100):
        raise UserError(f"--speculative {text[:40]}: tokens drafted at once should be a number from 1 to 100")
    return method, int(count or METHODS[method])


def of(model: Model, method: str, tokens: int) -> Speculation:
    """What a method takes of a model. Raises `UserError` for `mtp` where the model has no head."""
    if method != "mtp":
        return Speculation(method, tokens)
    attention: Any = next((block for block in model.decoder.blocks if isinstance(block, Attention)), None)
    count = models.draft_blocks(model.spec, model.config) if model.spec else 0
    if not model.spec or not count or attention is None:
        raise UserError("--speculative mtp: the model has no head that drafts tokens; use ngram or suffix")
    if lost := models.draft_lost(model.spec, model.config, model.stored):
        raise UserError(f"--speculative mtp: {lost}")
    return Speculation(method, tokens, stored_bytes(model), (attention,) * count)


def stored_bytes(model: Model) -> int:
    """Bytes of a head's tensors, which are in the model's files and loaded only to draft with them."""
    names = models.draft_tensors(model.spec, model.stored) if model.spec else []
    return sum(model.stored[name].nbytes for name in names)
