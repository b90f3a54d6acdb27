"""Qwen2.5-VL: llama.cpp's `qwen2vl` with its `qwen2.5vl_merger`."""

from __future__ import annotations

from vlmcompress.export.gguf.families._parts import both, pixel_limits, rope_problems, vision_keys
from vlmcompress.export.gguf.families._qwen import IMAGE, LANGUAGE, TOWER, TOWER_SIZES, tower
from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule, always, at

WINDOW = 112  # pixels; llama.cpp has no key for it


def pattern(facts: ModelFacts) -> int:
    """Period of the blocks that attend to the whole image."""
    return facts.config["vision_config"]["fullatt_block_indexes"][0] + 1


def problems(facts: ModelFacts) -> list[str]:
    """Reasons why llama.cpp cannot run the model."""
    vision, problems = facts.config["vision_config"], rope_problems(facts)
    whole, every = vision["fullatt_block_indexes"], pattern(facts)
    if whole != list(range(every - 1, vision["depth"], every)):
        problems.append(f"llama.cpp has blocks of full attention at equal distances, the tower has them at {whole}")
    if vision["window_size"] != WINDOW:
        problems.append(
            f"llama.cpp's windows are {WINDOW} pixels wide, the tower's {vision['window_size']}; write openvino, mlx or "
            "compressed-tensors"
        )
    return problems


BLOCK = (
    TensorRule(f"{TOWER}.blocks.{{}}.norm1.weight", "v.blk.{}.ln1.weight"),
    TensorRule(f"{TOWER}.blocks.{{}}.norm2.weight", "v.blk.{}.ln2.weight"),
    *both(f"{TOWER}.blocks.{{}}.mlp.gate_proj", "v.blk.{}.ffn_gate"),
    *both(f"{TOWER}.blocks.{{}}.mlp.up_proj", "v.blk.{}.ffn_up"),
    *both(f"{TOWER}.blocks.{{}}.mlp.down_proj", "v.blk.{}.ffn_down"),
    TensorRule(f"{TOWER}.merger.ln_q.weight", "v.post_ln.weight"),
)
KEYS = vision_keys(
    "qwen2.5vl_merger",
    image_size=always(560),  # unused: images keep their sizes
    embedding_length=at("vision_config.hidden_size"),
    feed_forward_length=at("vision_config.intermediate_size"),
    n_wa_pattern=pattern,
    window_size=at("vision_config.window_size"),
    **TOWER_SIZES,
)

FAMILY = GgufFamily(
    arch=always("qwen2vl"),
    language=LANGUAGE,
    vision=GgufFile(KEYS | {"clip.use_silu": always(True)}, tower(BLOCK)),
    image=IMAGE,
    limits=pixel_limits,
    problems=problems,
)
