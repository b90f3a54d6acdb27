"""The description of a model family for OpenVINO GenAI: modules to trace, with named inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vlmcompress.numerics import Format

BATCH, PAST, NEW = 2, 3, 4  # sequences, past and new tokens in a trace: a dimension of 1 would count as fixed


@dataclass(frozen=True)
class Packed:
    """A linear layer of integers: `tensors` from `formats.openvino.tensors`, their format, the shape `[out, in]`."""

    tensors: Mapping[str, Tensor]
    format: Format
    shape: tuple[int, int]


class ParameterSource(Protocol):
    """The parameters of a checkpoint, by memory names."""

    def read(self, name: str) -> Tensor:
        """The values of an unquantized parameter."""
        ...

    def packed(self, name: str) -> Packed | None:
        """A quantized parameter; None if it is not quantized."""
        ...


@dataclass(frozen=True)
class Port:
    """An input of a graph: its name, traced shape, variable dimensions, and type."""

    name: str
    shape: tuple[int, ...]
    varying: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32

    @property
    def dims(self) -> list[int]:
        """The shape with -1 for variable dimensions."""
        return [-1 if side in self.varying else size for side, size in enumerate(self.shape)]


@dataclass(frozen=True)
class Graph:
    """One graph: a module to trace, its inputs in the order of `forward`, and the names of its outputs."""

    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...] = ("last_hidden_state",)


class Decoder(nn.Module):
    """The decoder with its head, from embeddings to logits.

    Inputs of `forward` are those of `ports`: the mask of past and new tokens, positions, embeddings, further inputs of the
    family (`extra`), then keys and values of each block. It returns the logits and all keys and values.
    """

    def __init__(self, model: Any, axes: int):
        super().__init__()
        self.language, self.head = model.model.language_model, model.lm_head
        self.text = model.config.text_config
        self.axes = axes

    @property
    def extra(self) -> tuple[Port, ...]:
        """Further inputs of the family."""
        return ()

    def arguments(self, rows: Tensor, columns: Tensor, present: Tensor, *extra: Tensor) -> dict[str, Any]:
        """Arguments of transformers' decoder besides embeddings, positions and cache.

        Args:
            rows, columns: positions of the new tokens `[1, 1, new, 1]` and of all tokens `[1, 1, 1, past + new]`.
            present: which tokens are not padding, bool `[batch, 1, 1, past + new]`.
            extra: the further inputs.
        """
        return {"attention_mask": (columns <= rows) & present}

    @property
    def kept(self) -> list[tuple[int, int]]:
        """(heads, channels per head) of the cached keys and values, for each block that has them."""
        text = self.text
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return [(text.num_key_value_heads, size)] * text.num_hidden_layers

    @property
    def states(self) -> list[str]:
        """Names of the cached keys and values."""
        return [f"{layer}.{kind}" for layer in range(len(self.kept)) for kind in ("key", "value")]

    @property
    def ports(self) -> tuple[Port, ...]:
        positions = Port("position_ids", (BATCH, NEW), (0, 1), torch.int64)
        if self.axes > 1:
            positions = Port("position_ids", (self.axes, BATCH, NEW), (1, 2), torch.int64)
        return (
            Port("attention_mask", (BATCH, PAST + NEW), (0, 1), torch.int64),
            positions,
            Port("inputs_embeds", (BATCH, NEW, self.text.hidden_size), (0, 1)),
            *self.extra,
            *(
                Port(f"past_key_values.{layer}.{kind}", (BATCH, heads, PAST, size), (0, 2))
                for layer, (heads, size) in enumerate(self.kept)
                for kind in ("key", "value")
            ),
        )

    def forward(self, attention_mask: Tensor, position_ids: Tensor, inputs_embeds: Tensor, *rest: Tensor):
        extra, past = rest[: len(self.extra)], Past(rest[len(self.extra) :])
        rows = torch.arange(inputs_embeds.shape[1])[None, None, :, None] + past.pairs[0][0].shape[2]
        columns = torch.arange(attention_mask.shape[1])[None, None, None]
        arguments = self.arguments(rows, columns, attention_mask[:, None, None].bool(), *extra)
        output = self.language(
            inputs_embeds=inputs_embeds, position_ids=position_ids, past_key_values=past, **arguments
        )
        return self.logits(output.last_hidden_state), *(state for pair in past.pairs for state in pair)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the decoder's output."""
        return self.head(hidden)


class Past:
    """Keys and values of each block, replacing transformers' cache, whose empty tensors OpenVINO does not accept."""

    def __init__(self, states: Sequence[Tensor]):
        self.pairs = list(zip(states[::2], states[1::2], strict=True))

    # The method of the cache that transformers' attention calls; lengths are not needed, as masks are passed.
    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append to the keys and values of a block and return them all, `[batch, heads, tokens, channels]`."""
        keys, values = self.pairs[layer]
        self.pairs[layer] = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        return self.pairs[layer]


@dataclass(frozen=True)
class OpenvinoFamily:
    """A family of vision-language models in OpenVINO GenAI.

    Attributes:
        graphs: function from a model to its graphs besides decoder and word embeddings, by file name without `openvino_` and
            `.xml`.
        image: text of an image in a rendered chat prompt; tag: that for `VLMPipeline`, if it differs.
        after: text that the pipeline adds after each image.
        axes: number of coordinates of a token's position; with 1, `position_ids` has no dimension for them.
        decoder: the module of the decoder.
        images: function from the settings of the image processor to those that the pipeline reads.
        fixed_images: settings of the image processor that are fixed in the pipeline.
        settings: function from a reader of parameters to further entries of config.json for the pipeline.
        unused: name prefixes of parts that the pipeline does not support.
        problems: function from transformers' configuration, as JSON data, to why it cannot be written, a line each.
    """

    graphs: Callable[[Any], Mapping[str, Graph]]
    image: str
    tag: str = ""
    suffix: str = ""
    axes: int = 1
    decoder: type[Decoder] = Decoder
    images: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    fixed_images: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[Callable[[str], Tensor]], Mapping[str, Any]] = lambda read: {}
    unused: tuple[str, ...] = ()
    problems: Callable[[Mapping[str, Any]], list[str]] = lambda config: []


def decoder_problems(config: Mapping[str, Any]) -> list[str]:
    """Reasons why a decoder cannot be written: attention other than full, positions that depend on the length."""
    text = config["text_config"]
    kinds = set(text.get("layer_types") or ()) - {"full_attention"}
    window, longest = text.get("sliding_window"), text["max_position_embeddings"]
    if window and text.get("use_sliding_window", True) and window < longest:
        kinds.add("sliding_attention")
    problems = [f"blocks of the kind '{kind}' are not written to OpenVINO for this family" for kind in sorted(kinds)]
    rope = (text.get("rope_parameters") or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        problems.append(f"rotary positions of the kind '{rope}' are not written to OpenVINO")
    return problems
