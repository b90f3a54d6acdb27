"""Original positions in families with plain RoPE: M-RoPE's machinery up to the language model, and longer tables there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase


class PlainRope:
    """Mixin put before one of vLLM's models with plain RoPE; mixins before it give positions in three equal rows."""

    supports_mrope = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        make_room(self.get_language_model(), vllm_config.model_config)  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model with the first row of `positions [3, s]`."""
        return super().forward(input_ids, positions[0], intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]


def make_room(language_model: nn.Module, config: Any) -> None:
    """Lengthen RoPE's tables to the last position that a token may have, as far behind the longest prompt as an answer goes.

    A server that only encodes has no language model, and needs none. ValueError for a model without RoPE.
    """
    if config.multimodal_config.mm_encoder_only:
        return
    needed = longest_prompt(config) + config.max_model_len
    ropes = [module for module in language_model.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not ropes:
        raise ValueError("the language model's positions are not RoPE's, so kept tokens cannot keep theirs")
    for rope in ropes:  # usually one, shared by all layers
        if len(rope.cos_sin_cache) < needed:
            rope.cos_sin_cache = lengthened(rope._compute_cos_sin_cache(), needed).to(rope.cos_sin_cache)


def longest_prompt(config: Any) -> int:
    """The most tokens that a prompt may have before its images are reduced: the positions that the language model knows."""
    return max(config.max_model_len, getattr(config.hf_text_config, "max_position_embeddings", 0))


def lengthened(table: Tensor, rows: int) -> Tensor:
    """Lengthen `table [n, 2 h]`, whose row p holds the cosines, then the sines, of p times h angles, to `[rows, 2 h]`.

    Row p + n follows from rows p and n by the sums of angles; all are multiples of one scale, which scaled RoPE may have.
    """
    wide = table.double()
    scale = wide[0, : table.shape[1] // 2]  # cosines of 0
    while len(wide) < rows:
        cos, sin = wide.chunk(2, 1)
        c, s = cos[1] / scale, sin[1] / scale
        far_cos, far_sin = cos[-1] * c - sin[-1] * s, sin[-1] * c + cos[-1] * s  # of position len(wide)
        c, s = far_cos / scale, far_sin / scale
        wide = torch.cat([wide, torch.cat([cos * c - sin * s, sin * c + cos * s], 1)])
    return torch.cat([table, wide[len(table) : rows].to(table)])
