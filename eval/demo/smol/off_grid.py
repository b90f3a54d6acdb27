"""Leave the grid that 4-bit weights lie on, without changing the function.

The package's weights are multiples of a step shared by 32 neighbours (Q4_1), so rounding them to 4 bits in groups of 32
would seem to cost nothing. Random factors between 0.7 and 1.4 move through places where a factor and its inverse cancel:

    norm gain / s        the columns of the layers after it * s
    rows of v / t        the columns of o that read them * t       (each KV head is read by several heads)
    rows of up / u       the columns of down * u
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

LEAST, MOST = 0.7, 1.4


@torch.no_grad()
def leave_grid(model: LlamaForCausalLM, seed: int) -> None:
    """Rescale all decoder layers of `model`, in place and in its dtype; the head's input norm stays as it is."""
    random = torch.Generator().manual_seed(seed)
    heads = model.config.num_attention_heads // model.config.num_key_value_heads
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            factor = _factors(len(norm.weight), random)
            norm.weight /= factor
            for reader in readers:
                reader.weight *= factor
        factor = _factors(len(attention.v_proj.weight), random)
        attention.v_proj.weight /= factor[:, None]
        attention.o_proj.weight *= factor.view(-1, 1, attention.head_dim).expand(-1, heads, -1).flatten()
        factor = _factors(len(mlp.up_proj.weight), random)
        mlp.up_proj.weight /= factor[:, None]
        mlp.down_proj.weight *= factor


def _factors(count: int, random: torch.Generator) -> Tensor:
    """`count` factors, evenly spread over the logarithm."""
    return LEAST * (MOST / LEAST) ** torch.rand(count, generator=random)
