"""Samples that run together: which ones, and the one batch that they become.

Samples go together that have the same inputs, so that a text and a text with an image never share a batch, and that are of like
length. Shorter ones are padded on the left, where every token keeps its distance to all others. Its position is that in the
sample alone all the same: Ministral 3 scales queries by it (`add_positions`; M-RoPE's positions a model derives from the
attention mask itself). Padding is masked, and its modality is `IGNORED`. A sample without an attention mask goes with others of
its own length only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from vlmcompress.data.encode import IGNORED, VISION, Inputs
from vlmcompress.models import ModelSpec

TOKENS = 2048  # of a batch with its padding, at most, unless it is a single sample
PADDING = 1 / 8  # of a batch's tokens, at most


def batched(samples: Sequence[Inputs], tokens: int = TOKENS) -> list[list[int]]:
    """Indices of the samples of each batch, shortest first.

    Args:
        samples: from `encode`, one sample each.
        tokens: of a batch, with padding, at most; a longer sample runs alone.
    """
    order = sorted(range(len(samples)), key=lambda index: (repr(_kind(samples[index])), _length(samples[index]), index))
    found: list[list[int]] = []
    for index in order:
        length = _length(samples[index])  # none in this batch is longer
        if found and _kind(samples[found[-1][0]]) == _kind(samples[index]):
            all_tokens = (len(found[-1]) + 1) * length
            own = length + sum(_length(samples[other]) for other in found[-1])
            if all_tokens <= tokens and all_tokens - own <= PADDING * all_tokens:
                found[-1].append(index)
                continue
        found.append([index])
    return found


def together(samples: Sequence[Inputs]) -> Inputs:
    """One batch of samples that `batched` puts together, each padded on the left to the longest one's length."""
    length = max(map(_length, samples))
    padded = [_padded(sample, length) for sample in samples]
    return {key: torch.cat([one[key] for one in padded], _rows(key, value)) for key, value in samples[0].items()}


def add_positions(inputs: Inputs, spec: ModelSpec) -> None:
    """Give a batch the position of each token, not counting padding, where its model would count that."""
    if spec.positions == "1d" and "attention_mask" in inputs and "position_ids" not in inputs:
        inputs["position_ids"] = inputs["attention_mask"].cumsum(1).sub(1).clamp(min=0)


def _length(sample: Inputs) -> int:
    return sample["modality"].shape[1]


def _kind(sample: Inputs) -> list[tuple[object, ...]]:
    """What samples of a batch have in common: names, types and shapes of inputs, apart from what grows with the sample."""
    length, masked = _length(sample), "attention_mask" in sample
    kind: list[tuple[object, ...]] = [("tokens", 0 if masked else length)]
    for key, value in sorted(sample.items()):
        shape = list(value.shape)
        if (axis := _tokens(key, value, length)) is not None:
            shape[axis] = 0
        else:
            shape[_rows(key, value)] = 0
        kind.append((key, value.dtype, *shape))
    return kind


def _tokens(key: str, value: Tensor, length: int) -> int | None:
    """The axis of an input that counts the sample's tokens; None where it has none."""
    if key == "position_ids":
        return value.ndim - 1
    return 1 if value.shape[:2] == (1, length) else None


def _rows(key: str, value: Tensor) -> int:
    """The axis along which inputs of several samples stand one behind the other: samples, images, or patches of these."""
    if key == "position_ids":
        return value.ndim - 2
    return 1 if key == "deepstack_visual_embeds" else 0  # [levels, patches, width]


def _padded(sample: Inputs, length: int) -> Inputs:
    own = _length(sample)
    if own == length:
        return sample
    ids, modality = sample["input_ids"], sample["modality"]
    fill = {"input_ids": int(ids[modality != VISION][0]), "modality": IGNORED}  # the id of no image

    def wide(key: str, value: Tensor) -> Tensor:
        axis = _tokens(key, value, own)
        if axis is None:
            return value
        return pad(value, (0, 0) * (value.ndim - 1 - axis) + (length - own, 0), value=fill.get(key, 0))

    return {key: wide(key, value) for key, value in sample.items()}
