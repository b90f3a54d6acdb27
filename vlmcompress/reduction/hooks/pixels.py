"""Keep images out of Qwen towers, which take patches one by one: dropped tokens never enter the encoder.

Such a tower also takes as arguments what it derives from an image's grid (rotary and learnt positions, windows, the
lengths of attention). It is computed for the full grid by transformers' own functions, and the part of the kept patches
is handed in.
Behind the merger the rows go back to where the placeholders are, for `Early` to leave out the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import vision_utils

from vlmcompress.reduction.hooks.early import Early
from vlmcompress.reduction.hooks.units import Call, Unit
from vlmcompress.reduction.methods import Reduction


class Pixels(Early):
    """Shortens the inputs of the tower, and then those of the language model."""

    def _hook(self) -> None:
        super()._hook()
        if self.vlm.spec.visual_grid == "thw":
            tower = self.vlm.model.get_submodule(self.vlm.spec.vision[0])
            self._before(tower, self._leave_out)
            self._after(tower, self._put_back)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        super()._begin(module, args, kwargs)
        assert self._call is not None
        if units := self._units():
            self.seen = []
            self._merged = self._choose(units, self._call)
        return None

    def _choose(self, units: list[Unit], call: Call) -> list[Reduction]:
        """Decide the reduction of each unit, before the encoder has run."""
        raise NotImplementedError

    def _kept(self) -> Tensor | None:
        """Mark the kept tokens, `[tokens of all images]` bool; None when none is dropped."""
        if not self._merged:
            return None
        kept = torch.cat([reduction.target >= 0 for reduction in self._merged])
        return None if kept.all() else kept

    def _leave_out(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Hook before the tower: leave in `[patches, d]` the patches of kept tokens; those of a token are adjacent."""
        if (kept := self._kept()) is None:
            return None
        call = Call.of(module, args, kwargs)
        patches, grid = call.get("hidden_states"), call.get("grid_thw")
        kept = kept.to(patches.device)
        rows = kept.repeat_interleave(len(patches) // len(kept))
        return (patches[rows],), kwargs | {"grid_thw": grid} | geometry(module, grid, kept)

    def _put_back(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Hook behind the tower: put rows, deepstack's too, at their places in the full grid."""
        if (kept := self._kept()) is None or output is None:
            return
        output.pooler_output = _spread(output.pooler_output, kept)
        if getattr(output, "deepstack_features", None):
            output.deepstack_features = [_spread(level, kept) for level in output.deepstack_features]


def geometry(tower: Any, grid: Tensor, kept: Tensor) -> dict[str, Tensor]:
    """Compute the arguments that a Qwen tower derives from grids, for the patches of kept tokens alone.

    Args:
        tower: the tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL.
        grid: `[images, 3]`, frames, rows and columns of patches.
        kept: `[tokens]` bool, of all images; at least one of each frame.
    """
    merge = tower.spatial_merge_size
    patches = kept.repeat_interleave(merge**2)
    arguments = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merge)[patches],
        "cu_seqlens": _ends(vision_utils.get_vision_cu_seqlens(grid), patches),
    }
    if hasattr(tower, "pos_embed"):  # Qwen3-VL: learnt positions, interpolated
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        arguments |= {"interp_indices": indices[patches], "interp_weights": weights[patches]}
    if hasattr(tower, "window_size"):  # Qwen2.5-VL: tokens in the order of their windows
        order, ends = vision_utils.get_vision_window_index(
            grid, spatial_merge_size=merge, window_size=tower.window_size, patch_size=tower.patch_size
        )
        order = order.to(kept.device)
        kept_rows = kept[order]
        arguments |= {
            "window_index": (kept.cumsum(0) - 1)[order[kept_rows]],
            "cu_window_seqlens": _ends(ends, kept_rows.repeat_interleave(merge**2)),
        }
    return arguments


def _ends(ends: Tensor, kept: Tensor) -> Tensor:
    """Cumulative lengths `[parts + 1]` of sequences of which only `kept [n]` is left; empty sequences are dropped."""
    counts = F.pad(kept.cumsum(0), (1, 0))
    return counts[ends.long()].unique_consecutive().to(ends.dtype)


def _spread(rows: Tensor, kept: Tensor) -> Tensor:
    """Spread `[m, d]` to `[n, d]`: rows where `kept [n]` is true, zeros elsewhere."""
    full = rows.new_zeros(len(kept), *rows.shape[1:])
    full[kept.to(rows.device)] = rows
    return full
