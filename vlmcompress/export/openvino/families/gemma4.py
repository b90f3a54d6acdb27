"""Gemma 4 without experts: heads of several sizes, blocks that share keys and values, and embeddings for each block.

The pipeline of 2026.4 does not support audio: the audio tower is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress.export.openvino.families.gemma3 import same_image, windowed
from vlmcompress.export.openvino.spec import BATCH, NEW, Decoder, Graph, OpenvinoFamily, Port, decoder_problems

PATCHES = 9  # in the trace, times the pooling size


class Features(nn.Module):
    """The tower and the projector: patches of an image, of which some are padding, to `[tokens, width]`."""

    def __init__(self, model: Any):
        super().__init__()
        self.tower, self.projector = model.model.vision_tower, model.model.embed_vision

    def forward(self, pixel_values: Tensor, image_position_ids: Tensor) -> Tensor:
        output = self.tower(pixel_values=pixel_values, pixel_position_ids=image_position_ids)
        return self.projector(inputs_embeds=output.last_hidden_state)


class BlockEmbeddings(nn.Module):
    """The embeddings that each block adds: tokens to `[batch, tokens, blocks, width]`. Tokens other than text have those of
    padding."""

    def __init__(self, model: Any):
        super().__init__()
        config = model.config
        self.table, self.text = model.model.language_model.embed_tokens_per_layer, config.text_config
        self.others = [config.image_token_id, config.video_token_id, config.audio_token_id]

    def forward(self, input_ids: Tensor) -> Tensor:
        for token in self.others:
            input_ids = torch.where(input_ids == token, self.text.pad_token_id, input_ids)
        blocks, width = self.text.num_hidden_layers, self.text.hidden_size_per_layer_input
        return self.table(input_ids).reshape(*input_ids.shape, blocks, width)


class Gemma4Decoder(Decoder):
    """The decoder. In large models tokens of an image see each other in blocks of sliding attention (`token_type_ids`)."""

    @property
    def kept(self) -> list[tuple[int, int]]:
        text = self.text
        layers = text.per_layer_config[: text.num_hidden_layers - text.num_kv_shared_layers]
        return [(layer.num_key_value_heads, layer.head_dim) for layer in layers]

    @property
    def extra(self) -> tuple[Port, ...]:
        text = self.text
        ports = []
        if text.use_bidirectional_attention == "vision":
            ports.append(Port("token_type_ids", (BATCH, NEW), (0, 1), torch.int64))
        if text.hidden_size_per_layer_input:
            shape = (BATCH, NEW, text.num_hidden_layers, text.hidden_size_per_layer_input)
            ports.append(Port("per_layer_inputs", shape, (0, 1)))
        return tuple(ports)

    def arguments(self, rows: Tensor, columns: Tensor, present: Tensor, *extra: Tensor) -> dict[str, Any]:
        inputs = dict(zip((port.name for port in self.extra), extra, strict=True))
        causal = columns <= rows
        types = inputs.pop("token_type_ids", None)
        visible = causal if types is None else causal | same_image(types, columns.shape[-1])
        sliding = windowed(rows, columns, visible, present, self.text.sliding_window)
        return inputs | {"attention_mask": {"full_attention": causal & present, "sliding_attention": sliding}}

    def logits(self, hidden: Tensor) -> Tensor:
        logits, most = super().logits(hidden), self.text.final_logit_softcapping
        return logits if most is None else torch.tanh(logits / most) * most


def graphs(model: Any) -> dict[str, Graph]:
    """The tower with the projector, and the per-block embeddings if the model has them."""
    vision, text = model.config.vision_config, model.config.text_config
    patches = PATCHES * vision.pooling_kernel_size**2
    ports = (
        Port("pixel_values", (1, patches, 3 * vision.patch_size**2), (1,)),
        Port("image_position_ids", (1, patches, 2), (1,), torch.int64),
    )
    made = {"vision_embeddings_model": Graph(Features(model), ports)}
    if text.hidden_size_per_layer_input:
        tokens = Port("input_ids", (BATCH, NEW), (0, 1), torch.int64)
        table = Graph(BlockEmbeddings(model), (tokens,), ("per_layer_inputs",))
        made["text_embeddings_per_layer_model"] = table
    return made


def problems(config: Mapping[str, Any]) -> list[str]:
    """Reasons why the model cannot be written."""
    text = {**config["text_config"], "sliding_window": None}
    text["layer_types"] = [kind for kind in text["layer_types"] if kind != "sliding_attention"]
    problems = decoder_problems({"text_config": text})
    if config["text_config"].get("use_bidirectional_attention") == "all":
        problems.append("attention in both directions is not written to OpenVINO")
    return problems


AUDIO = ("model.audio_tower.", "model.embed_audio.")
FAMILY = OpenvinoFamily(graphs, "<|image|>", decoder=Gemma4Decoder, unused=AUDIO, problems=problems)
