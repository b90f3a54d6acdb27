"""Parts that several families share: decoders of the Llama shape, CLIP towers, settings of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vlmcompress.export.gguf.spec import ModelFacts, Order, TensorRule, Value, always, at

LANGUAGE = "model.language_model"


def head_size(facts: ModelFacts) -> int:
    """Channels of one attention head of the decoder."""
    text = facts.config["text_config"]
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def text_keys(**below: Value) -> dict[str, Value]:
    """The metadata of a Llama-like decoder; `below`: further keys of the architecture, with `__` for a dot."""
    keys = {
        "vocab_size": at("text_config.vocab_size"),
        "context_length": at("text_config.max_position_embeddings"),
        "embedding_length": at("text_config.hidden_size"),
        "block_count": at("text_config.num_hidden_layers"),
        "feed_forward_length": at("text_config.intermediate_size"),
        "attention.head_count": at("text_config.num_attention_heads"),
        "attention.head_count_kv": at("text_config.num_key_value_heads"),
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.layer_norm_rms_epsilon": at("text_config.rms_norm_eps", float),
        "rope.freq_base": at("text_config.rope_parameters.rope_theta", float),
    }
    further = {name.replace("__", "."): value for name, value in below.items()}
    return {f"{{arch}}.{name}": value for name, value in (keys | further).items()}


NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def rotated_heads(heads: str, width: Value = head_size) -> Order:
    """The order of rows for ggml, which rotates adjacent channels of a head instead of channels half a head apart.

    Args:
        heads: path of the number of heads in the configuration.
        width: function to the channels of a head.
    """

    def order(facts: ModelFacts) -> list[int]:
        size = width(facts)
        # Channels c and c + size / 2, which transformers rotates as a pair, become neighbours.
        pairs = [channel for pair in range(size // 2) for channel in (pair, pair + size // 2)]
        return [head * size + channel for head in range(at(heads)(facts)) for channel in pairs]

    return order


def decoder(
    *,
    order: Callable[[str], Order] | None = None,
    biases: bool = False,
    norms: Mapping[str, str] = NORMS,
    norm_offset: float = 0.0,
    root: str = LANGUAGE,
) -> tuple[TensorRule, ...]:
    """The tensors of a Llama-like decoder.

    Args:
        order: function from the path of the number of heads to the order of the rows of queries or keys.
        biases: q, k and v have biases.
        norms: norms of a block, memory name -> name in GGUF.
        norm_offset: norms compute `x * (offset + weight)`.
        root: memory name of the decoder.
    """
    q, k = (order(f"text_config.num_{kind}_heads") if order else None for kind in ("attention", "key_value"))
    block, target = f"{root}.layers.{{}}.", "blk.{}."
    linears = (
        ("self_attn.q_proj", "attn_q", q),
        ("self_attn.k_proj", "attn_k", k),
        ("self_attn.v_proj", "attn_v", None),
        ("self_attn.o_proj", "attn_output", None),
        ("mlp.gate_proj", "ffn_gate", None),
        ("mlp.up_proj", "ffn_up", None),
        ("mlp.down_proj", "ffn_down", None),
    )
    rules = [TensorRule(f"{block}{old}.weight", f"{target}{new}.weight", rows=rows) for old, new, rows in linears]
    if biases:  # of q, k and v
        rules += [TensorRule(f"{block}{old}.bias", f"{target}{new}.bias", rows=rows) for old, new, rows in linears[:3]]
    rules += [
        TensorRule(f"{block}{old}.weight", f"{target}{new}.weight", add=norm_offset) for old, new in norms.items()
    ]
    return (
        TensorRule(f"{root}.embed_tokens.weight", "token_embd.weight"),
        *rules,
        TensorRule(f"{root}.norm.weight", "output_norm.weight", add=norm_offset),
        TensorRule("lm_head.weight", "output.weight"),
    )


def both(source: str, target: str, **options: Any) -> tuple[TensorRule, TensorRule]:
    """The rules of a module's weight and bias."""
    return tuple(TensorRule(f"{source}.{kind}", f"{target}.{kind}", **options) for kind in ("weight", "bias"))  # type: ignore[return-value]


def blocks(prefix: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Rules of weights and biases in a tower's blocks; `prefix`: memory name of a block, with `{}` for its number."""
    return tuple(rule for old, new in names.items() for rule in both(f"{prefix}.{old}", f"v.blk.{{}}.{new}"))


def vision_keys(kind: str, **below: Value) -> dict[str, Value]:
    """The metadata of a tower.

    Args:
        kind: llama.cpp's name of the projector.
        below: further keys of `clip.vision`, with `__` for a dot.
    """
    keys = {
        "clip.has_vision_encoder": always(True),
        "clip.projector_type": always(kind),
        "clip.vision.image_mean": lambda facts: [float(value) for value in facts.image["image_mean"]],
        "clip.vision.image_std": lambda facts: [float(value) for value in facts.image["image_std"]],
        "clip.vision.patch_size": at("vision_config.patch_size"),
        "clip.vision.projection_dim": at("text_config.hidden_size"),
    }
    return keys | {f"clip.vision.{name.replace('__', '.')}": value for name, value in below.items()}


def activation() -> dict[str, Value]:
    """The metadata of the activation in the tower's blocks; llama.cpp's default is quick GELU."""
    read = at("vision_config.hidden_act")
    return {
        "clip.use_gelu": lambda facts: True if str(read(facts)).startswith("gelu") else None,
        "clip.use_silu": lambda facts: True if read(facts) == "silu" else None,
    }


def first_last(positions: Any, facts: ModelFacts) -> Any:
    """Positions `[1 + patches, width]` with the CLS token's moved after those of the patches, as in llama.cpp."""
    return positions.roll(-1, 0)


CLIP_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
SIZES = {
    "embedding_length": at("vision_config.hidden_size"),
    "feed_forward_length": at("vision_config.intermediate_size"),
    "block_count": at("vision_config.num_hidden_layers"),
    "attention__head_count": at("vision_config.num_attention_heads"),
}
CLIP_KEYS = {
    "image_size": at("vision_config.image_size"),
    **SIZES,
    "attention__layer_norm_epsilon": at("vision_config.layer_norm_eps", float),
}


def square_pixels(key: str) -> Value:
    """The minimum or maximum pixels of an image: the processor's `shortest_edge` or `longest_edge`, which are areas here."""
    return lambda facts: (facts.image.get("size") or {}).get(key)


def pixel_limits(facts: ModelFacts, frames: int = 1) -> tuple[int, int] | None:
    """Least and most visual tokens of an image of processors that limit its pixels, summed over its `frames`."""
    least, most = (square_pixels(f"{key}_edge")(facts) for key in ("shortest", "longest"))
    area = (facts.image["patch_size"] * facts.image["merge_size"]) ** 2 * frames
    return (max(least // area, 1), most // area) if least and most else None


def rope_problems(facts: ModelFacts) -> list[str]:
    """Reasons why the decoder's rotary positions cannot be written."""
    kind = (facts.config["text_config"].get("rope_parameters") or {}).get("rope_type", "default")
    return [] if kind in ("default", "mrope") else [f"rotary positions of the kind '{kind}' are not written to GGUF"]
