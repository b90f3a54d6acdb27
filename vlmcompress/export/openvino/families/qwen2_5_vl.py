"""Qwen2.5-VL: most blocks of its tower attend within windows, in whose order the patches are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmcompress.export.openvino.families._qwen import IMAGE, PATCHES, Blocks, inputs, patches, problems
from vlmcompress.export.openvino.spec import Graph, OpenvinoFamily, Port


class Windows(Blocks):
    """The blocks and the merger. Inputs besides those of `Blocks`: the mask of windows, and the order `[n / unit]` of groups of
    patches that become one token."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        window_attention_mask: Tensor,
        window_index: Tensor,
        rotary_pos_emb: Tensor,
    ) -> Tensor:
        tower, unit = self.tower, self.tower.spatial_merge_unit
        hidden, angles = (
            value.reshape(-1, unit, value.shape[1])[window_index].reshape(value.shape)
            for value in (hidden_states, rotary_pos_emb)
        )
        whole = tower.fullatt_block_indexes
        masks = [attention_mask if i in whole else window_attention_mask for i in range(len(tower.blocks))]
        *_, hidden = self.blocks(hidden, masks, angles)
        return tower.merger(hidden)[torch.argsort(window_index)]


def tower(model: Any) -> dict[str, Graph]:
    """Patches, then blocks with the merger."""
    hidden, mask, angles = inputs(model)
    window = Port("window_attention_mask", mask.shape, mask.varying)
    order = Port("window_index", (PATCHES // model.model.visual.spatial_merge_unit,), dtype=torch.int64)
    return {
        "vision_embeddings_model": patches(model),
        "vision_embeddings_merger_model": Graph(Windows(model.model.visual), (hidden, mask, window, order, angles)),
    }


FAMILY = OpenvinoFamily(tower, IMAGE, axes=3, problems=problems)
