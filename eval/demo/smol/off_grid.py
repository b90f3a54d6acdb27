"""Leave the grid that 4-bit weights lie on, as if the weights had never been rounded to it.

The package's weights are multiples of a step that 32 neighbours share (Q4_1), so rounding them to 4 bits in groups of 32 would
seem to cost nothing. Noise that is uniform over one step around each weight turns a code into any of the values that could have
been rounded to it. It favours no method: nothing divides it out again, as smoothing would factors of channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

COLUMNS, CODES = 32, 16  # of Q4_1: neighbours that share a step, and values of a code


def steps_of_range(weight: Tensor) -> Tensor:
    """Steps `[groups, 1]` of Q4_1, whose codes reach from a group's least weight to its largest."""
    groups = weight.view(-1, COLUMNS)
    return (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (CODES - 1)


def widest_steps(weight: Tensor) -> Tensor:
    """Steps `[groups, 1]` of any of the types Q4_K, Q5_0, Q6_K and Q8_0: the widest of which all 16 neighbours are multiples
    apart."""
    groups = weight.view(-1, 16)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    places, steps, open_ = (groups - low) / (high - low).clamp(min=1e-30), high - low, torch.arange(len(groups))
    for count in range(1, 256):
        scaled = places[open_] * count
        fits = ((scaled - scaled.round()).abs() < 0.02).all(1)
        steps[open_[fits]] /= count
        open_ = open_[~fits]
        if not len(open_):
            return steps
    raise ValueError(f"{len(open_)} groups of 16 weights are on no grid of up to 256 values")


@torch.no_grad()
def leave_grid(model: PreTrainedModel, seed: int, steps: Callable[[Tensor], Tensor] = steps_of_range) -> None:
    """Add the noise to all linear layers of the decoder blocks of `model`, in place and in its dtype; `steps` computes those of
    a layer's groups."""
    random = torch.Generator().manual_seed(seed)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            step = steps(module.weight)
            groups = module.weight.view(len(step), -1)
            groups += step * (torch.rand(groups.shape, generator=random) - 0.5)
