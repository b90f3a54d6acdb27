"""Estimate the memory that a run takes, from shapes alone.

Peak memory is the sum of what a run holds at once, for s samples of t tokens, hidden size h, groups of i input features
in a block:

    runtime + weights + s t (6 h + pixels) + 4 * (3 sum i^2 + 2 max i^2) + 12 * (weights of one block)

that is activations in 16 bits between two blocks (and masks), float32 Gram matrices of three modalities with the solver's
copies, and float32 copies of the block's weights. A second stream (of the 16-bit model, for cross-Gram matrices) adds
2 s t h + 4 * 3 sum i^2 and a copy of the block.
"""

from __future__ import annotations

from collections.abc import Sequence

RUNTIME_BYTES = 900_000_000  # Python, torch, transformers and llm-compressor before a model is loaded


TOKENS = 1024  # assumed tokens of a sample when the recipe does not limit them


def peak_bytes(
    weights: int,
    blocks: Sequence[Sequence[Sequence[tuple[int, int]]]],
    config: dict,
    samples: int,
    tokens: int,
    grams: bool | None = None,
    streams: int = 1,
) -> int:
    """Estimate peak memory in bytes by the formula of the module's docstring.

    Args:
        weights: bytes of the source's weights.
        blocks: for each decoder block, for each group, `(out, in)` of its linear layers.
        config: config.json.
        samples, tokens: number of calibration samples, and tokens in each; 0 samples for a scheme without data.
        grams: whether Gram matrices are in memory; None: when there are samples.
        streams: 2 where the 16-bit model's hidden states are carried along.
    """
    block = max((sum(out * columns for group in groups for out, columns in group) for groups in blocks), default=0)
    total = RUNTIME_BYTES + weights + 12 * block
    if not (samples if grams is None else grams):
        return total
    squares = [[group[0][1] ** 2 for group in groups if group] for groups in blocks]
    largest = max((3 * streams * sum(widths) + 2 * max(widths, default=0) for widths in squares), default=0)
    hidden = (config.get("text_config") or config).get("hidden_size") or 0
    more = (streams - 1) * (6 * block + 2 * samples * tokens * hidden)
    return total + 4 * largest + samples * tokens * (6 * hidden + _pixel_bytes(config)) + more


def _pixel_bytes(config: dict) -> int:
    """Bytes of float32 pixels for each token of a sample that is half visual."""
    vision = config.get("vision_config") or {}
    patch = vision.get("patch_size") or 14
    patch = patch[0] if isinstance(patch, list) else patch
    merge = (vision.get("spatial_merge_size") or 1) ** 2
    return 3 * patch**2 * merge * (vision.get("temporal_patch_size") or 1) * 4 // 2
