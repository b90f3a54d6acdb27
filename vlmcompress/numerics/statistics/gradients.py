"""Turn gradients at the outputs of linear layers into the sensitivities by which the balance `mbq` weighs modalities.

`calibration.gradient_pass` runs the model; its result is stored as `Gradients`, small enough for JSON. Mean squares predict
errors in nats (`calibration.predict`). Mean magnitudes give MBQ's published rule (arXiv 2412.19509): with the ratio `r =
g_vision / g_answer`, the weight of vision tokens is `rho = max(r, median of r over blocks)`. Gradients are taken at the output
of the group's module, which is added to the residual stream: the last linear layer of the module that the block runs (`o_proj`
of attention, `down_proj` of the MLP). The median is over the blocks that have such a module.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmcompress.numerics.statistics.balance import Sensitivity


@dataclass(frozen=True)
class Gradient:
    """The gradient of the answer's loss with respect to the output of one linear layer, summarized.

    Attributes:
        channels: number of output features.
        absolute: modality -> mean |dL/dY| over the sample's tokens and channels, averaged over samples (MBQ's g).
        square: modality -> mean (dL/dY)^2 over tokens of all samples, and channels.
    """

    channels: int
    absolute: Mapping[str, float]
    square: Mapping[str, float]


@dataclass(frozen=True)
class Gradients:
    """The result of a gradient pass over the model.

    Attributes:
        loss: cross entropy of the answers in nats, averaged over an answer's tokens, then over samples.
        samples: number of samples that had an answer.
        blocks: for each decoder block, linear layer -> gradient, in the order in which they run.
    """

    loss: float
    samples: int
    blocks: Sequence[Mapping[str, Gradient]]

    def to_dict(self) -> dict[str, Any]:
        """The gradients as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gradients:
        """The inverse of `to_dict`."""
        blocks = [{name: Gradient(**fields) for name, fields in block.items()} for block in data["blocks"]]
        return cls(data["loss"], data["samples"], blocks)


def sensitivities(
    gradients: Gradients, blocks: Sequence[Mapping[str, Sequence[str]]]
) -> dict[tuple[int, str], Sensitivity]:
    """Compute the sensitivity of each group of layers, by (block, group).

    Args:
        blocks: for each decoder block, group -> its linear layers.
    """
    ratios: list[dict[str, float]] = []
    for layer, block in enumerate(gradients.blocks):
        ratios.append({})
        for name, gradient in block.items():
            # r = g_vision / g_answer; infinite where no answer token has a gradient. The last layer of a module overwrites the
            # others.
            vision, answer = (gradient.absolute.get(modality, 0.0) for modality in ("vision", "answer"))
            ratios[-1][_module(layer, name)] = vision / answer if answer else math.inf
    medians = {
        module: statistics.median(block_ratios[module] for block_ratios in ratios if module in block_ratios)
        for module in {module for block_ratios in ratios for module in block_ratios}
    }
    result = {}
    for layer, groups in enumerate(blocks):
        for group, linears in groups.items():
            module = _module(layer, linears[0])
            # The median is a lower bound, so that a block with small visual gradients does not ignore its visual tokens.
            result[layer, group] = Sensitivity(max(ratios[layer][module], medians[module]))
    return result


def _module(layer: int, linear: str) -> str:
    """Name of the block's module that contains a linear layer, e.g. `self_attn`."""
    return linear.partition(f".{layer}.")[2].rpartition(".")[0]
