"""Gated DeltaNet blocks for llama.cpp's `qwen35` and `qwen35moe`.

Value heads are grouped by key head in transformers (`k0v0 k0v1 k1v0 k1v1`) and interleaved in ggml (`k0v0 k1v0 k0v1 k1v1`),
which repeats all keys as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

from vlmcompress.export.gguf.families._parts import HEAD_NORMS, LANGUAGE, decoder, head_size, text_keys
from vlmcompress.export.gguf.families._qwen import sections
from vlmcompress.export.gguf.spec import GgufFile, ModelFacts, Order, TensorRule, at

NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"} | HEAD_NORMS


def value_heads(channels: Callable[[dict], int], before: Callable[[dict], int] = lambda text: 0) -> Order:
    """The order of rows that belong to value heads.

    Args:
        channels: function from the text configuration to the rows of a value head.
        before: function to the number of leading rows that keep their place.
    """

    def order(facts: ModelFacts) -> list[int]:
        text: Any = facts.config["text_config"]
        size, fixed, keys = channels(text), before(text), text["linear_num_key_heads"]
        each = text["linear_num_value_heads"] // keys
        heads = [key * each + turn for turn in range(each) for key in range(keys)]
        return [*range(fixed), *(fixed + head * size + channel for head in heads for channel in range(size))]

    return order


WIDTH = itemgetter("linear_value_head_dim")  # channels of a value head
VALUES, HEADS = value_heads(WIDTH), value_heads(lambda text: 1)
# Rows of queries and keys come before those of values.
MIXED = value_heads(WIDTH, lambda text: 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"])


def decay(weight: Any, facts: ModelFacts) -> Any:
    """The decay rate of the state, which ggml stores directly and not as a logarithm."""
    return -weight.float().exp()


def taps(weight: Any, facts: ModelFacts) -> Any:
    """The weights of a depthwise convolution as `[channels, taps]`."""
    return weight[:, 0]


def drafting(facts: ModelFacts) -> int:
    """Blocks of the MTP head, which llama.cpp numbers on from the decoder's."""
    return facts.config["text_config"].get("mtp_num_hidden_layers") or 0


def after(facts: ModelFacts, number: int) -> int:
    """The number of an MTP head's block in GGUF."""
    return facts.config["text_config"]["num_hidden_layers"] + number


def recurrent(facts: ModelFacts) -> list[bool]:
    """For each block whether it is a Gated DeltaNet."""
    kinds = facts.config["text_config"]["layer_types"]
    return [kind == "linear_attention" for kind in kinds] + [False] * drafting(facts)


def rotated(facts: ModelFacts) -> int:
    """Channels of a head that are rotated."""
    rope = facts.config["text_config"]["rope_parameters"]
    return int(head_size(facts) * rope.get("partial_rotary_factor", 0.25))


def inner(facts: ModelFacts) -> int:
    """Channels of all value heads."""
    text = facts.config["text_config"]
    return text["linear_num_value_heads"] * text["linear_value_head_dim"]


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    text, problems = facts.config["text_config"], []
    if text["linear_key_head_dim"] != text["linear_value_head_dim"]:
        problems.append("llama.cpp's Gated DeltaNet has heads of one width for keys and values; this model has two")
    if drafting(facts) > 1:
        problems.append(f"llama.cpp's MTP head has one block, this model's {drafting(facts)}; leave its tensors out")
    return problems


HEAD = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
    "embed_tokens": "embed_tokens",
}


def head(blocks: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The rules of an MTP head; `blocks`: those of the decoder, whose blocks with attention are like the head's."""
    root = f"{LANGUAGE}.layers."
    return (
        *(
            replace(rule, source=rule.source.replace(root, "mtp.layers."), number=after)
            for rule in blocks
            if rule.source.startswith(root)
        ),
        *(
            TensorRule(f"mtp.{old}.weight", f"blk.{{}}.nextn.{new}.weight", number=after, add=float("norm" in old))
            for old, new in HEAD.items()
        ),
    )


def language(mlp: tuple[TensorRule, ...] = (), **keys: Any) -> GgufFile:
    """The decoder's file. `mlp`: rules of its blocks' MLPs if they are mixtures of experts; `keys`: further metadata."""
    block, target = f"{LANGUAGE}.layers.{{}}.linear_attn", "blk.{}"
    common = (*decoder(norms=NORMS, norm_offset=1.0), *mlp)
    return GgufFile(
        text_keys(
            rope__dimension_sections=sections,
            rope__dimension_count=rotated,
            ssm__conv_kernel=at("text_config.linear_conv_kernel_dim"),
            ssm__state_size=at("text_config.linear_key_head_dim"),
            ssm__group_count=at("text_config.linear_num_key_heads"),
            ssm__time_step_rank=at("text_config.linear_num_value_heads"),
            ssm__inner_size=inner,
            attention__recurrent_layers=recurrent,
            block_count=lambda facts: after(facts, drafting(facts)),
            nextn_predict_layers=lambda facts: drafting(facts) or None,
            **keys,
        ),
        (
            *common,
            *head(common),
            TensorRule(f"{block}.in_proj_qkv.weight", f"{target}.attn_qkv.weight", rows=MIXED),
            TensorRule(f"{block}.in_proj_z.weight", f"{target}.attn_gate.weight", rows=VALUES),
            TensorRule(f"{block}.in_proj_b.weight", f"{target}.ssm_beta.weight", rows=HEADS),
            TensorRule(f"{block}.in_proj_a.weight", f"{target}.ssm_alpha.weight", rows=HEADS),
            TensorRule(f"{block}.dt_bias", f"{target}.ssm_dt.bias", rows=HEADS),
            TensorRule(f"{block}.A_log", f"{target}.ssm_a", rows=HEADS, change=decay),
            TensorRule(f"{block}.conv1d.weight", f"{target}.ssm_conv1d.weight", rows=MIXED, change=taps),
            TensorRule(f"{block}.norm.weight", f"{target}.ssm_norm.weight"),
            TensorRule(f"{block}.out_proj.weight", f"{target}.ssm_out.weight", columns=VALUES),
        ),
    )
