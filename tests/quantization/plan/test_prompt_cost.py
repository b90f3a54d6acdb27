"""The output of `check --image-size`, against the model run on a real image: cache, work and counts."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import DynamicCache

from tests.kit.reduction_data import checkpoint, vlm
from vlmcompress import cli
from vlmcompress.engines.vllm.served_model import Attention
from vlmcompress.models import REGISTRY, decoder_layers
from vlmcompress.models.data.encode import encode_prompt
from vlmcompress.models.data.samples import Sample
from vlmcompress.quantization.plan import prompt_cost
from vlmcompress.quantization.plan.roofline import Block
from vlmcompress.reduction.choice import ReducerChoice, parse_reducer
from vlmcompress.reduction.hooks import attach
from vlmcompress.utils.errors import UserError

SIZE = (190, 100)


def ran(family: str, chosen: ReducerChoice | None, images: int) -> tuple[int, int, int]:
    """Bytes of the cache after a prompt, multiply-adds that its linear layers took, and its length."""
    model, work = vlm(family), [0]

    def count(module: nn.Linear, args: tuple, _: torch.Tensor) -> None:
        work[0] += args[0].numel() // args[0].shape[-1] * module.weight.numel()

    blocks = [model.model.get_submodule(name) for name in decoder_layers(model.model, model.spec)]
    named = [(name, module) for block in blocks for name, module in block.named_modules()]
    linears = [module for name, module in named if isinstance(module, nn.Linear) or name == model.spec.router]
    linears = [module for module in linears if getattr(module, "weight", None) is not None]  # a dense MLP has no router
    hooks = [module.register_forward_hook(count) for module in linears]
    inputs = encode_prompt(Sample("x", [Image.new("RGB", SIZE)] * images, "hm"), model)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.model.dtype)
    attached = attach(model, chosen) if chosen else None
    cache = DynamicCache(config=model.model.config.get_text_config())  # Granite 4 Vision's class returns none
    try:
        model.model(**inputs, past_key_values=cache, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
        if attached:
            attached.detach()
    held = [
        tensor for layer in cache.layers for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
    ]
    held = [tensor for tensor in held if tensor is not None]
    return sum(tensor.nbytes for tensor in held), work[0], inputs["input_ids"].shape[1]


def attention(blocks: list[Block], lengths: list[int]) -> int:
    """Multiply-adds of attention, pair by pair, and of recurrent states."""
    total = 0
    for block, n in zip(blocks, lengths, strict=True):
        pairs = sum(1 for query in range(n) for key in range(query + 1) if query - key < (block.window or n))
        total += 2 * (block.queries * pairs + block.state * n)
    return total


@pytest.mark.representatives
@pytest.mark.parametrize("name", REGISTRY.names())
@pytest.mark.parametrize("images", [1, 2])
def test_the_prompt_of_every_family(name, images):
    planned = prompt_cost.prompt_costs(checkpoint(name), [SIZE] * images, "hm", [])
    cache, linear, length = ran(name, None, images)
    decoder = prompt_cost.Decoder(vlm(name).model, 2)
    blocks, cached = (
        decoder.blocks,
        [
            2 * block.kv_heads * block.head_dim if isinstance(block, Attention) else 0
            for block in decoder.decoder.blocks
        ],
    )
    text = vlm(name).model.config.get_text_config()
    configs = [text.per_layer_config[layer] for layer in range(len(blocks))]  # Gemma 4's heads are of two widths
    widths = [
        config.num_attention_heads
        * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        for config in configs
    ]
    assert all(block.queries == width for block, width, held in zip(blocks, widths, cached, strict=True) if held)
    assert planned.full.prompt == length == planned.full.visual + planned.text
    assert planned.full.multiply_adds == linear + attention(blocks, [length] * len(blocks))
    limits = [block.window or length for block in blocks]
    assert planned.full.kv_bytes_prompt == 2 * sum(
        held * min(length, limit) for held, limit in zip(cached, limits, strict=True)
    )
    # transformers keeps one token less than a sliding window
    assert cache == 2 * sum(
        held * (limit - 1 if limit < length else length) for held, limit in zip(cached, limits, strict=True)
    )
    assert (
        planned.text_only.kv_bytes
        == 0
        < planned.full.kv_bytes
        <= planned.full.kv_bytes_prompt - planned.text_only.kv_bytes_prompt
    )


@pytest.mark.parametrize(
    ("name", "text", "images"),
    [
        *itertools.product(
            ["llava", "qwen2-5-vl", "internvl"],
            ["dart:0.3", "uniform:1/2", "fastv:0.3,layer=1"],
            [1],
        ),
        *itertools.product(["gemma3", "lfm2-vl"], ["uniform:1/2"], [2]),
    ],
)
def test_reduced_as_the_model_is(name, text, images):
    chosen = parse_reducer(text)
    planned = prompt_cost.prompt_costs(checkpoint(name), [SIZE] * images, "hm", [chosen])
    cost = planned.reduced[str(chosen)]
    cache, linear, length = ran(name, chosen, images)
    blocks = prompt_cost.Decoder(vlm(name).model, 2).blocks
    inside = chosen.method == "fastv"  # before the last of two blocks
    lengths = [length if inside else cost.prompt] + [cost.prompt] * (len(blocks) - 1)
    assert [count + planned.text for count in cost.blocks] == lengths and cost.differs == inside
    assert cost.visual < planned.full.visual and cost.prompt == cost.visual + planned.text
    assert cost.kv_bytes_prompt == cache
    assert cost.multiply_adds == linear + attention(blocks, lengths)


def test_no_weights_are_needed(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen2-5-vl"), folder)
    (folder / "model.safetensors").unlink()
    planned = prompt_cost.prompt_costs(folder, [SIZE], "hm", [parse_reducer("random:0.5")])
    assert (
        planned.to_dict()
        == prompt_cost.prompt_costs(checkpoint("qwen2-5-vl"), [SIZE], "hm", [parse_reducer("random:0.5")]).to_dict()
    )


def test_fp8_cache_is_half():
    plans = [prompt_cost.prompt_costs(checkpoint("llava"), [SIZE], "", [], size) for size in (None, 1)]
    assert plans[0].full.kv_bytes == 2 * plans[1].full.kv_bytes


def test_the_table(capfd):
    arguments = [
        "check",
        str(checkpoint("llava")),
        "--image-size",
        "64x64",
        "--reduce",
        "dart:0.5",
        "--reduce",
        "random:0.01",
    ]
    assert cli.main([*arguments, "--json"]) == 0
    output = capfd.readouterr()
    data = json.loads(output.out)
    assert data["images"] == [{"tokens": 16, "pieces": [[4, 4]], "size": "64x64"}]
    assert [cost["visual"] for cost in data["reduced"].values()] == [8, 16]
    assert output.err == "warning: random:0.01: the share is less than one token of a 4x4 grid, which is kept whole\n"
    assert cli.main(arguments) == 0
    text = capfd.readouterr().out
    assert "dart:0.5" in text and "50.0%" in text and "64x64  16" in text


def test_blocks_with_different_token_counts_are_shown(capfd):
    arguments = ["check", str(checkpoint("llava")), "--image-size", "64x64", "--reduce", "fastv:0.5,layer=1"]
    assert cli.main([*arguments, "--reduce", "dart:0.5"]) == 0
    text = capfd.readouterr().out
    assert "\nfastv:0.5,layer=1: 16 visual tokens from block 0 on, 8 from block 1 on\n" in text
    assert text.count("from block") == 2
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["reduced"]["fastv:0.5,layer=1"]["blocks"] == [16, 8]


def test_an_image_that_the_processor_refuses():
    with pytest.raises(UserError, match="image 3x900: the model's processor refuses it"):
        prompt_cost.prompt_costs(checkpoint("qwen2-5-vl"), [(3, 900)], "", [])
