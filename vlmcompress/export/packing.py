"""Small integers packed into 32-bit words, and scales kept in 16-bit floats, as AutoAWQ's and AutoGPTQ's files have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vlmcompress.utils.errors import UserError


def pack_words(values: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack `values [rows, n]`, from 0 to 2^bits - 1, along the last side into int32 words `[rows, n * bits / 32]`.

    Args:
        order: which of a word's values lies at which place, least significant bits first; None: in turn.
    """
    per = 32 // bits
    parts = values.to(torch.int32).view(len(values), -1, per)
    if order is not None:
        parts = parts[..., list(order)]
    # Fields do not overlap, so the sum is their union; one that reaches the sign bit wraps, as int32 does.
    return (parts << _shifts(bits)).sum(-1, dtype=torch.int32).contiguous()


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The values `[rows, n]` in `words [rows, n * bits / 32]`, as int32: the inverse of `pack_words`."""
    parts = (words[..., None] >> _shifts(bits)) & (2**bits - 1)  # the mask drops the sign that `>>` copies
    if order is not None:
        parts = parts[..., torch.tensor(order).argsort()]
    return parts.reshape(len(words), -1)


def to_float16(scale: Tensor, what: str) -> Tensor:
    """Scales as float16, where that changes none of them.

    Raises:
        UserError: a scale is too small, too large or too fine, or was cut off at the largest one; `what` names the format.
    """
    rounded = scale.to(torch.float16)
    changed = scale[rounded.float() != scale.float()]
    if count := changed.numel():
        example = changed[0].item()
        raise UserError(
            f"{count} of {scale.numel()} scales are no 16-bit floats, which {what} files hold, the first is {example:.3g}; "
            "write compressed-tensors"
        )
    if full := int((rounded == torch.finfo(torch.float16).max).sum()):  # where a quantizer solved for such scales
        raise UserError(
            f"{full} of {scale.numel()} scales would be larger than 65,504, the largest of the 16-bit floats that {what} files "
            "hold; write compressed-tensors"
        )
    return rounded


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int32)
