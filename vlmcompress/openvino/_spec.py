"""What OpenVINO GenAI needs to know of a model family: modules to trace, with named inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, PAST, NEW = 2, 3, 4  # sequences, tokens seen before and tokens in a trace: a side of 1 would count as fixed


@dataclass(frozen=True)
class Port:
    """An input of a graph: its name, the shape that it is traced with, which sides of that vary, and its type."""

    name: str
    shape: tuple[int, ...]
    varying: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32

    @property
    def dims(self) -> list[int]:
        """The shape with -1 for sides that vary."""
        return [-1 if side in self.varying else size for side, size in enumerate(self.shape)]


@dataclass(frozen=True)
class Graph:
    """One of a family's models: a module to trace, its inputs in the order of `forward`, and the names of its outputs."""

    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[str, ...] = ("last_hidden_state",)


class Decoder(nn.Module):
    """The decoder with its head, from embeddings to logits.

    Inputs of `forward` are those of `ports`: the mask of tokens seen and new, positions, embeddings, further inputs of the
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

    def arguments(self, mask: Tensor, *extra: Tensor) -> dict[str, Any]:
        """Arguments of transformers' decoder besides embeddings, positions and cache.

        Args:
            mask: which tokens each new one attends to, bool `[batch, 1, new, past + new]`.
            extra: the further inputs.
        """
        return {"attention_mask": mask}

    @property
    def ports(self) -> tuple[Port, ...]:
        text = self.text
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        positions = Port("position_ids", (BATCH, NEW), (0, 1), torch.int64)
        if self.axes > 1:
            positions = Port("position_ids", (self.axes, BATCH, NEW), (1, 2), torch.int64)
        return (
            Port("attention_mask", (BATCH, PAST + NEW), (0, 1), torch.int64),
            positions,
            Port("inputs_embeds", (BATCH, NEW, text.hidden_size), (0, 1)),
            *self.extra,
            *(
                Port(f"past_key_values.{name}", (BATCH, text.num_key_value_heads, PAST, size), (0, 2))
                for name in self.states
            ),
        )

    @property
    def states(self) -> list[str]:
        """Names of what is kept from step to step: keys and values of each block."""
        return [f"{layer}.{kind}" for layer in range(self.text.num_hidden_layers) for kind in ("key", "value")]

    def forward(self, attention_mask: Tensor, position_ids: Tensor, inputs_embeds: Tensor, *rest: Tensor):
        extra, past = rest[: len(self.extra)], Past(rest[len(self.extra) :])
        new, total = inputs_embeds.shape[1], attention_mask.shape[1]
        rows = torch.arange(new) + past.pairs[0][0].shape[2]
        causal = torch.arange(total)[None] <= rows[:, None]
        mask = causal[None, None] & attention_mask[:, None, None].bool()
        output = self.language(
            inputs_embeds=inputs_embeds, position_ids=position_ids, past_key_values=past, **self.arguments(mask, *extra)
        )
        return self.head(output.last_hidden_state), *(state for pair in past.pairs for state in pair)


class Past:
    """Keys and values of each block, in the place of transformers' cache, whose empty tensors OpenVINO does not take."""

    def __init__(self, states: Sequence[Tensor]):
        self.pairs = list(zip(states[::2], states[1::2], strict=True))

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append to the keys and values of a block and return them all, `[batch, heads, tokens, channels]`."""
        keys, values = self.pairs[layer]
        self.pairs[layer] = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        return self.pairs[layer]


@dataclass(frozen=True)
class Family:
    """A family of vision-language models in OpenVINO GenAI.

    Attributes:
        tower: function from a model to the graphs of its tower and projector, by file name without `openvino_` and `.xml`.
        image: what stands for an image in a rendered chat prompt, and in one for `VLMPipeline`.
        behind: what the pipeline writes behind each image of its own accord.
        axes: numbers that a token's position consists of; with 1 `position_ids` has no side for them.
        decoder: the module of the decoder.
        prunes: whether `VLMPipeline` can drop visual tokens of the family (`pruning_ratio`).
        images: function from the settings of the image processor to those that the pipeline reads.
        check: function from transformers' configuration, as JSON data, to what is not written of it, a line each.
    """

    tower: Callable[[Any], Mapping[str, Graph]]
    image: str
    behind: str = ""
    axes: int = 1
    decoder: type[Decoder] = Decoder
    prunes: bool = False
    images: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    check: Callable[[Mapping[str, Any]], list[str]] = lambda config: []
