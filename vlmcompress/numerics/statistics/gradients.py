"""Turn gradients at the outputs of linear layers into the sensitivities by which balances weigh modalities.

The pass over the model is `calibration.gradient_pass`; its result is kept as `Gradients`, small enough for JSON. Two
balances come of it (`statistics.balance`):

`auto` weighs a token of modality m by the mean square of the loss's gradient there. To second order a change `dY` of a
layer's output costs `1/2 sum_t dY_t^T F_t dY_t` of loss, `F` the Fisher information; this takes one number for its diagonal
per modality, mean over tokens and channels. The gradient is that of the labels' loss, or a signal that needs none
(`fisher_signal`).

`mbq` is the published rule (arXiv 2412.19509): the ratio `r = g_vision / g_answer` of mean magnitudes, of which the vision
tokens' weight is `rho = max(r, median of r over blocks)`. Both are read at the output of the module that a group is part of:
where the residual stream takes it up, at the last linear layer that the block runs of it (`o_proj` of attention, `down_proj`
of the MLP), and the median is over the blocks that have such a module.

The signal: let a model's logits be `z [v]` at a token, `p = softmax(z)`. To second order a change `dz` costs
`KL(p || softmax(z + dz)) = 1/2 dz^T F dz` with the Fisher matrix `F = diag(p) - p p^T`. What that is at an inner layer needs a
vector `g` with `E[g g^T] = F` to propagate back: `J^T g` then has the second moments `J^T F J`, the Gauss-Newton matrix of the
divergence. With the labels of the data, `g = p - e_label`, this holds only where the data are drawn from the model (the
*empirical* Fisher information). It always holds with random signs `s [v]`, each -1 or 1 with equal chance:

    g = r * s - p <r, s>,      r = sqrt(p)
    E[g g^T] = (D - p r^T) E[s s^T] (D - r p^T) = D^2 - D r p^T - p r^T D + p (r^T r) p^T = diag(p) - p p^T,      D = diag(r)

as `E[s s^T] = 1`, `D r = p` and `r^T r = 1`. Each token has its own signs, so that on average products of different tokens
vanish: one backward pass serves all of them. The labels play no part.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmcompress.numerics.statistics.balance import Sensitivity


@dataclass(frozen=True)
class Gradient:
    """The gradient of the answer's loss with respect to the output of one linear layer, summarized.

    Attributes:
        channels: output features.
        absolute: modality -> mean |dL/dY| over the sample's tokens and channels, mean over samples (MBQ's g).
        square: modality -> mean (dL/dY)^2 over tokens of all samples, and channels.
    """

    channels: int
    absolute: Mapping[str, float]
    square: Mapping[str, float]


@dataclass(frozen=True)
class Gradients:
    """The result of a gradient pass over the model.

    Attributes:
        loss: cross entropy of the answers in nats, mean over each one's tokens and over samples.
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
    ratios = [
        {_module(layer, name): _ratio(gradient) for name, gradient in block.items()}  # of several, the last one stays
        for layer, block in enumerate(gradients.blocks)
    ]
    medians = {
        module: statistics.median(block_ratios[module] for block_ratios in ratios if module in block_ratios)
        for module in {module for block_ratios in ratios for module in block_ratios}
    }
    result = {}
    for layer, (block, groups) in enumerate(zip(gradients.blocks, blocks, strict=True)):
        for group, linears in groups.items():
            module = _module(layer, linears[0])
            rho = max(ratios[layer][module], medians[module])
            result[layer, group] = Sensitivity(_square([block[name] for name in linears]), rho)
    return result


def _module(layer: int, linear: str) -> str:
    """Name of the module in a block that a linear layer is part of, e.g. `self_attn`."""
    return linear.partition(f".{layer}.")[2].rpartition(".")[0]


def _ratio(gradient: Gradient) -> float:
    """MBQ's ratio `g_vision / g_answer`; infinite where no answer token has a gradient."""
    vision, answer = (gradient.absolute.get(modality, 0.0) for modality in ("vision", "answer"))
    return vision / answer if answer else math.inf


def _square(gradients: Sequence[Gradient]) -> dict[str, float]:
    """Mean squared gradient by modality, over the channels of all layers of a group."""
    channels = sum(gradient.channels for gradient in gradients)
    return {
        m: sum(gradient.channels * gradient.square[m] for gradient in gradients) / channels for m in gradients[0].square
    }


def fisher_signal(logits: Tensor, signs: Tensor) -> Tensor:
    """The signal `g [..., v]` at `logits [..., v]`, float32 or wider, for `signs [..., v]` of -1 and 1 (0: no signal)."""
    p = logits.softmax(-1)
    noise = p.sqrt() * signs
    return noise - p * noise.sum(-1, keepdim=True)  # <r, s> is the sum of r * s


def sign_generator(seed: int, sample: int) -> torch.Generator:
    """The source of a sample's signs, which depend on nothing but the seed and the sample's number."""
    return torch.Generator().manual_seed((1_000_003 * seed + sample) % 2**32)  # of more it reads 32 bits on a CPU


def random_signs(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """The next signs of `generator`, `[tokens, width]`, int8; in how many calls they are drawn changes nothing."""
    return torch.randint(0, 2, (tokens, width), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
