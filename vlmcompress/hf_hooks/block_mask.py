"""Apply methods that restrict which tokens of the prompt attend to each other, and drop none."""

from __future__ import annotations

from typing import Any

import torch

from vlmcompress.errors import UserError
from vlmcompress.hf_hooks._attach import Attachment, full_mask
from vlmcompress.hf_hooks.slots import Slots
from vlmcompress.hf_hooks.units import Reduced, Unit
from vlmcompress.reducers import Reduction


class Blocks(Attachment[Slots]):
    """Gives the language model a mask of its own in calls with images. Tokens generated behind see everything.

    An image, or a tile where tiles are told apart, counts as a frame. The mask is dense: this shows what the method does
    to answers, and saves no time.
    """

    def _hook(self) -> None:
        kernel = self.vlm.model.config.get_text_config()._attn_implementation
        if kernel != "sdpa":
            raise UserError(
                f"attention '{kernel}' takes no mask of blocks; load the model with attn_implementation='sdpa'"
            )

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        cache = kwargs.get("past_key_values")
        before = cache.get_seq_length() if cache is not None else 0
        mask = full_mask(kwargs, before).bool()
        whole = [Reduction.identity(len(unit.columns), mask.device) for unit in units]
        self.seen = [Reduced(**vars(unit), reduction=one) for unit, one in zip(units, whole, strict=True)]
        tokens = mask.shape[1] - before
        found = [self._parts(units, row, tokens) for row in range(len(mask))]
        if all(parts is None for parts in found):
            return kwargs
        seen = mask[:, None].repeat(1, tokens, 1)  # [b, s, before + s]
        plain = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        for own, parts in zip(seen, found, strict=True):
            own[:, before:] &= plain if parts is None else self.module.mask(parts).to(mask.device)
        seen[:, :, before:] |= torch.eye(tokens, dtype=torch.bool, device=mask.device)  # padding sees itself
        return kwargs | {"attention_mask": seen[:, None]}

    def _parts(self, units: list[Unit], row: int, tokens: int) -> list[int] | None:
        """Lengths of the sink, the blocks and the question of a row of `tokens`; None when there is no more than one block."""
        images = sorted({unit.span for unit in units if unit.row == row})
        found = self.module.parts(images, tokens, self.options) if images else []
        return found if len(found) > 3 else None
