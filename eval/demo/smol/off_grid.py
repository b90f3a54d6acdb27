"""Leave the grid that 4-bit weights lie on, as if the weights had never been rounded to it.

The package's weights are multiples of a step that 32 neighbours share (Q4_1), so rounding them to 4 bits in groups of 32 would
seem to cost nothing. Noise that is uniform over one step around each weight turns a code into any of the values that could have
been rounded to it. It favours no method: nothing divides it out again, as smoothing would factors of channels.
"""

import torch
from transformers import LlamaForCausalLM

COLUMNS, CODES = 32, 16  # of Q4_1: neighbours that share a step, and values of a code


@torch.no_grad()
def leave_grid(model: LlamaForCausalLM, seed: int) -> None:
    """Add the noise to all linear layers of the decoder blocks of `model`, in place and in its dtype."""
    random = torch.Generator().manual_seed(seed)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            groups = module.weight.view(-1, COLUMNS)
            step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (CODES - 1)
            groups += step * (torch.rand(groups.shape, generator=random) - 0.5)
