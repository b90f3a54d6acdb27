"""The tensors that a draft head trains, name on disk -> shape, in the layouts that vLLM 0.32 loads."""

from __future__ import annotations

LAYER = "layers.0"
VECTOR = "image_vector.weight"
"""The matrix `[hidden, hidden]` that maps the mean of an image's features to a vector, which is added to all rows."""
HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def eagle3(
    *, hidden: int, joined: int, intermediate: int, queries: int, keys: int, vocabulary: int, vector: bool
) -> Shapes:
    """Shapes of an EAGLE-3 head's tensors (`Eagle3LlamaForCausalLM`).

    Args:
        hidden: width of its hidden states; `joined`: summed width of the target's at all tapped blocks.
        intermediate: width of its MLP; `queries`, `keys`: total width of its query and key heads.
        vocabulary: number of tokens that it can guess.
        vector: whether it adds a vector of the images to each row (`VECTOR`).
    """
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    return {
        "fc.weight": (hidden, joined),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{attention}.q_proj.weight": (queries, 2 * hidden),
        f"{attention}.k_proj.weight": (keys, 2 * hidden),
        f"{attention}.v_proj.weight": (keys, 2 * hidden),
        f"{attention}.o_proj.weight": (hidden, queries),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        f"{mlp}.gate_proj.weight": (intermediate, hidden),
        f"{mlp}.up_proj.weight": (intermediate, hidden),
        f"{mlp}.down_proj.weight": (hidden, intermediate),
        "norm.weight": (hidden,),
        HEAD: (vocabulary, hidden),
        **({VECTOR: (hidden, hidden)} if vector else {}),
    }


def medusa(*, hidden: int, vocabulary: int, heads: int) -> Shapes:
    """Shapes of the tensors of Medusa heads (`model_executor/models/medusa.py`), which share one output head."""
    return {**{f"blocks.{k}.layers.0.weight": (hidden, hidden) for k in range(heads)}, HEAD: (vocabulary, hidden)}
