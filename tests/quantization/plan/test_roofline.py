"""Bounds: multiply-adds of towers as torch counts them, experts, and arithmetic by hand; decoders: `test_prompt_cost.py`."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.kit import tiny
from vlmcompress import cli
from vlmcompress.engines.vllm.served_model import read_served_model
from vlmcompress.numerics import ActFormat, Format, Scheme
from vlmcompress.quantization.plan import roofline
from vlmcompress.quantization.plan.roofline import Work

DEFAULTS = ("patch_size", "window_size", "fullatt_block_indexes")


@pytest.mark.parametrize(("name", "patches"), [("llava", [16]), ("qwen2-vl", [64])])
def test_the_towers_work_is_what_torch_counts(name, patches, checkpoint):
    """Oracle: torch's own counter on the tower of the meta model, whose attention it counts without windows."""
    model = read_served_model(checkpoint(name))
    tokens = sum(patches) // (4 if name == "qwen2-vl" else 1)
    inner = model.meta_model.model
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        if name == "llava":
            size = model.config["vision_config"]["image_size"]
            rows = inner.vision_tower(torch.zeros(1, 3, size, size, dtype=model.meta_model.dtype)).last_hidden_state
            inner.multi_modal_projector(rows[:, 1:])
        else:
            blocks, width = inner.visual.blocks, model.config["vision_config"]
            hidden = torch.zeros(patches[0], width["embed_dim"], dtype=model.meta_model.dtype)
            inner.visual.patch_embed(
                torch.zeros(patches[0], inner.visual.patch_embed.proj.weight[0].numel(), dtype=hidden.dtype)
            )
            for block in blocks:
                block.attn.qkv(hidden), block.attn.proj(hidden), block.mlp(hidden)
            inner.visual.merger(hidden)
    counted = counter.get_total_flops() // 2
    ours = roofline.tower(model, patches, tokens)
    if name == "qwen2-vl":
        ours -= len(inner.visual.blocks) * 2 * patches[0] ** 2 * hidden.shape[1]  # attention, which was not run
    assert ours == pytest.approx(
        counted, rel=0.12 if name == "llava" else 1e-9
    )  # CLIP has one more token, for the class


def test_a_short_config_has_the_defaults_of_its_class(tmp_path):
    """Of a tower: what transformers fills in is counted like what the file has, windows among it."""
    folder = tiny.build("qwen2-5-vl", tmp_path / "model")
    file = folder / "config.json"
    config, defaults = json.loads(file.read_text()), transformers.Qwen2_5_VLConfig().vision_config
    rest = {key: value for key, value in config["vision_config"].items() if key not in DEFAULTS}
    full = rest | {key: getattr(defaults, key) for key in DEFAULTS}
    work = []
    for vision in (full, rest, full | {"fullatt_block_indexes": [0, 1]}):
        file.write_text(json.dumps(config | {"vision_config": vision}))
        work.append(roofline.tower(read_served_model(folder), [256], 64))
        assert cli.main(["plan", str(folder), "--target", "a100", "--image-size", "64x64"]) == 0
    assert work[0] == work[1] < work[2]


def test_a_token_meets_some_experts_alone(tmp_path):
    """A mixture of experts: all count in memory, the active ones in arithmetic and in what a step reads."""
    text = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    text |= {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 64,
        "vocab_size": 128,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]})
    config.architectures, config.dtype = ["Qwen3VLMoeForConditionalGeneration"], "bfloat16"
    config.save_pretrained(tmp_path)
    model = read_served_model(tmp_path)
    assert (model.decoder.experts, model.decoder.active) == (8, 2) and model.spec is not None
    attention = 64 * (64 + 2 * 32) + 64 * 64
    expert = 3 * 64 * 32
    assert [block.entries for block in roofline.blocks(model.meta_model, model.decoder)] == [
        attention + 64 * 8 + 2 * expert
    ] * 2
    total = sum(spec.nbytes for spec in model.stored.values())
    every, routed = dataclasses.replace(model.decoder, active=8), 2 * 2 * 8 * expert
    whole = roofline.step_bytes(dataclasses.replace(model, decoder=every), total, 0, 0.0)
    assert roofline.step_bytes(model, total, 3, 10.0) == pytest.approx(whole - routed * 3 / 4 + 30)


def test_a_step_reads_neither_the_tower_nor_a_separate_embedding(checkpoint):
    llava = read_served_model(checkpoint("llava"))
    total = sum(spec.nbytes for spec in llava.stored.values())
    model = llava.meta_model.model
    decoder = (
        sum(p.numel() for p in model.language_model.layers.parameters()) + model.language_model.norm.weight.numel()
    )
    head = llava.meta_model.lm_head.weight.numel()
    assert roofline.step_bytes(llava, total, 0, 0.0) == pytest.approx(2 * (decoder + head))


def test_a_step_does_not_read_a_draft_head(checkpoint):
    """Which is not among the loaded bytes either."""
    model = read_served_model(checkpoint("qwen3-5"))
    inner = model.meta_model.model.language_model
    decoder = sum(p.numel() * p.itemsize for part in (inner.layers, inner.norm) for p in part.parameters())
    head = model.meta_model.lm_head.weight
    total = sum(spec.nbytes for name, spec in model.stored.items() if not name.startswith("mtp."))
    assert roofline.step_bytes(model, total, 0, 0.0) == pytest.approx(decoder + head.numel() * head.itemsize)


def test_bounds_by_hand():
    done, rates = Work(linear=3 * 10**12, attention=10**12, tower=10**12), {"bf16": 1000.0, "fp8": 2000.0}
    assert roofline.prefill_seconds(done, rates, "bf16") == pytest.approx(0.010)
    assert roofline.prefill_seconds(done, rates, "fp8") == pytest.approx(0.003 + 0.004)
    assert roofline.prefill_seconds(done, {}, "bf16") is None
    assert roofline.decode_seconds(8e9, 0, 4000, 1000) == pytest.approx(0.002)
    assert roofline.decode_seconds(1, 5e12, 4000, 1000) == pytest.approx(0.010)
    assert roofline.decode_seconds(8e9, 1, None, 1000) is None


def test_types_of_arithmetic():
    w4, a8, f8 = Format("int", 4, 128), ActFormat("int", 8, True), ActFormat("float", 8, True)
    assert roofline.arithmetic_type(None) == "bf16"
    assert roofline.arithmetic_type(Scheme(w4, None)) == "bf16"
    assert roofline.arithmetic_type(Scheme(Format("int", 8, -1), a8)) == "int8"
    assert roofline.arithmetic_type(Scheme(Format("float", 8, -1), f8)) == "fp8"
