"""Run Qwen towers on some of an image's tokens: tokens that a reducer drops by their pixels never enter the encoder.

The tokens are chosen where the processor has the pixels, before the prompt's length is known; the choice goes with the
image. vLLM's towers also take as arguments what they derive from an image's grid (rotary and learnt positions, windows,
the lengths of attention); it is computed for the full grid by their own functions, and the part of the kept patches is
handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlmcompress.engines.vllm.plugin._reducer import ServedReducer
from vlmcompress.hf_hooks.pixels import signals


def choose(reducer: ServedReducer, images_of: Any, pixel_values: Tensor, grids: Tensor) -> Tensor:
    """Choose the tokens that are kept of all images, `[tokens]` bool.

    Args:
        images_of: the image processor, which made the other two arguments.
        pixel_values: `[patches, d]`, or the levels 0 to 255 themselves where the model normalizes them.
        grids: `[images, 3]`, frames, rows and columns of patches.
    """
    found = signals(images_of, pixel_values, grids)
    return torch.cat([reducer.reduce(one.grid, pixels=one.pixels).target >= 0 for one in found])


def encode(tower: Any, pixel_values: Tensor, grids: Sequence[Sequence[int]], kept: Tensor) -> Tensor:
    """Run the tower on the `m` tokens that are kept of all images; returns its output `[m, d]`.

    Args:
        tower: the tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL.
        pixel_values: `[patches, d]` of all images.
        grids: frames, rows and columns of patches, of each image.
        kept: `[tokens]` bool on the CPU, at least one of each frame.
    """
    kept = kept.cpu()
    patches = kept.repeat_interleave(tower.spatial_merge_size**2)
    full = tower.prepare_encoder_metadata(grids)
    frames = np.cumsum([0, *(h * w for t, h, w in grids for _ in range(t))], dtype=np.int32)
    if "window_index" in full:
        own = _windows(tower, full, grids, kept) | _lengths(tower, _left(frames, patches), "_full")
    else:
        names = ("rotary_pos_emb_cos", "rotary_pos_emb_sin", "pos_embeds")
        own = {name: full[name][patches.to(full[name].device)] for name in names if name in full}
        own |= _lengths(tower, _left(frames, patches))
    return tower(pixel_values[patches.to(pixel_values.device)], None, encoder_metadata=own)


def _windows(tower: Any, full: dict[str, Tensor], grids: Sequence[Sequence[int]], kept: Tensor) -> dict[str, Any]:
    """Arguments of Qwen2.5-VL's tower, which brings tokens into the order of their windows first."""
    order = full["window_index"].cpu()
    inside = kept[order]
    index = (kept.cumsum(0) - 1)[order[inside]]
    patches = inside.repeat_interleave(tower.spatial_merge_size**2)
    ends, start = [np.zeros(1, dtype=np.int32)], 0
    for t, h, w in grids:
        ends.append(tower.get_rope_by_thw(t, h, w)[3].numpy() + start)
        start += t * h * w
    device = full["rotary_pos_emb_cos"].device
    found = {name: full[name][patches.to(device)] for name in ("rotary_pos_emb_cos", "rotary_pos_emb_sin")}
    found |= {"window_index": index.to(device), "reverse_indices": index.argsort().to(device)}
    windows = _lengths(tower, _left(np.concatenate(ends), patches), "_window")
    return found | {name.replace("cu_seqlens", "cu_window_seqlens"): value for name, value in windows.items()}


def _left(ends: np.ndarray, patches: Tensor) -> np.ndarray:
    """Cumulative lengths `[parts + 1]` of sequences of which only `patches [n]` are left; empty sequences are dropped."""
    counts = np.append(0, patches.numpy().cumsum(dtype=np.int32))
    return np.unique(counts[ends]).astype(np.int32)


def _lengths(tower: Any, ends: np.ndarray, suffix: str = "") -> dict[str, Any]:
    """The attention kernel's arguments for sequences that end at `ends`, as the tower itself makes them."""
    from vllm.model_executor.layers.attention import MMEncoderAttention as Attention

    backend, device = tower.attn_backend, tower.device
    if hasattr(tower, "compute_attn_mask_seqlen") and not hasattr(tower, "fp8_padded_hidden_size"):  # Qwen2-VL
        cumulative = torch.from_numpy(ends)
        return {"cu_seqlens": cumulative.to(device), "max_seqlen": tower.compute_attn_mask_seqlen(cumulative)}
    padded = {"fp8_padded_hidden_size": tower.fp8_padded_hidden_size}
    return {
        "cu_seqlens": Attention.maybe_recompute_cu_seqlens(
            backend, ends, tower.hidden_size, tower.tp_size, device, **padded
        ),
        f"max_seqlen{suffix}": torch.tensor(Attention.compute_max_seqlen(backend, ends), dtype=torch.int32),
        f"sequence_lengths{suffix}": Attention.maybe_compute_seq_lens(backend, ends, device),
    }
