"""Qwen3-VL, dense: learned positions, and features of several blocks of the tower, which the decoder's first blocks add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmcompress.export.openvino.families._qwen import IMAGE, PATCHES, Blocks, inputs, patches, problems
from vlmcompress.export.openvino.spec import BATCH, NEW, Decoder, Graph, OpenvinoFamily, Port

TOKENS = 5  # visual tokens in the trace


class Stack(Blocks):
    """The blocks and mergers: visual tokens `[n, width]`, and what the decoder's first blocks add, `[layers, n, width]`."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, rotary_pos_emb: Tensor) -> tuple[Tensor, Tensor]:
        tower = self.tower
        layers = list(self.blocks(hidden_states, [attention_mask] * len(tower.blocks), rotary_pos_emb))
        merged_layers = zip(tower.deepstack_merger_list, tower.deepstack_visual_indexes, strict=True)
        return tower.merger(layers[-1]), torch.stack([merge(layers[index]) for merge, index in merged_layers])


class Qwen3Decoder(Decoder):
    """The decoder, whose first blocks add visual features to the tokens in `visual_pos_masks`."""

    def __init__(self, model: Any, axes: int):
        super().__init__(model, axes)
        self.layers = len(model.config.vision_config.deepstack_visual_indexes)
        self.language._deepstack_process = add_features

    @property
    def extra(self) -> tuple[Port, ...]:
        width = self.text.hidden_size
        return (
            Port("visual_pos_masks", (BATCH, NEW), (0, 1), torch.bool),
            Port("deepstack_visual_embeds", (self.layers, TOKENS, width), (1,)),
        )

    def arguments(self, rows: Tensor, columns: Tensor, present: Tensor, *extra: Tensor) -> dict[str, Any]:
        places, features = extra
        added = {"visual_pos_masks": places, "deepstack_visual_embeds": [features[i] for i in range(self.layers)]}
        return super().arguments(rows, columns, present) | added


def add_features(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Add the features `[n, width]` to the visual tokens of `[batch, tokens, width]`, in order.

    Without an image the pipeline passes a single false mask entry for all tokens and one row of zeros, with which transformers'
    indexing would fail.
    """
    order = places.long().flatten().cumsum(0).view(places.shape) - 1
    return hidden + features[order.clamp(min=0)] * places.unsqueeze(-1).to(hidden.dtype)


def tower(model: Any) -> dict[str, Graph]:
    """Patches, the table of positions, then blocks with the mergers."""
    visual = model.model.visual
    positions = Port("input", (4, PATCHES), (1,), torch.int64)
    outputs = ("last_hidden_state", "deepstack_feature_lists")
    return {
        "vision_embeddings_model": patches(model),
        "vision_embeddings_pos_model": Graph(visual.pos_embed, (positions,)),
        "vision_embeddings_merger_model": Graph(Stack(visual), inputs(model), outputs),
    }


FAMILY = OpenvinoFamily(tower, IMAGE, axes=3, decoder=Qwen3Decoder, problems=problems)
