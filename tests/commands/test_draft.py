"""`vlmcompress draft` on tiny models: what vLLM makes of it, how it goes on, what is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.kit import tiny
from tests.kit.command_line import run
from tests.kit.edits import other_weights
from tests.kit.engine import asked
from tests.kit.vllm_speculation import TEXTS
from vlmcompress import cli
from vlmcompress.checkpoint import draft_folder
from vlmcompress.common import identity
from vlmcompress.errors import UserError
from vlmcompress.runs import eagle3

FEW = ("--steps", 60, "--every", 20, "--batch", 6, "--answer-tokens", 16, "--lr", 0.003)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The prompts that `tests/kit/vllm_speculation.py` gives to vLLM, about the image there and others."""
    folder = tmp_path_factory.mktemp("data")
    with (folder / "calib.jsonl").open("w") as file:
        for number in range(24):
            image = Image.new("RGB", (80, 60), (0 if number < 12 else 9 * number, 20, 30))
            image.save(folder / f"{number}.png")
            row = {"id": str(number), "image": f"{number}.png", "question": TEXTS[number % 3]}
            file.write(json.dumps(row) + "\n")
    return folder / "calib.jsonl"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny.build("qwen2-5-vl", tmp_path_factory.mktemp("plain") / "qwen")


@pytest.fixture(scope="module")
def reduced(plain, tmp_path_factory):
    """With half the visual tokens."""
    out = tmp_path_factory.mktemp("reduced") / "out"
    assert cli.main(["quantize", str(plain), "-o", str(out), "--scheme", "none", "--reduce", "uniform:0.5"]) == 0
    return out


@pytest.fixture(scope="module")
def draft(reduced, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft") / "draft"
    assert cli.main(["draft", str(reduced), "-o", str(out), "--calib", str(data), *map(str, FEW)]) == 0
    return out


def test_what_is_written(draft, reduced):
    facts = json.loads((draft / draft_folder.FACTS).read_text())
    assert facts["target"]["content_sha256"] == identity.model_hash(reduced)
    assert facts["reduce"]["method"] == "uniform"
    assert facts["held_out_kl"]["after"] < facts["held_out_kl"]["before"]
    shares = facts["acceptance"]["by_position"]
    assert 1 >= shares[0] >= shares[1] >= shares[2] and facts["acceptance"]["length"] == 1 + sum(shares)
    tensors = safetensors.torch.load_file(draft / "model.safetensors")
    assert sum(value.numel() for value in tensors.values()) == facts["parameters"]
    assert draft_folder.speculative_config(draft, reduced)["num_speculative_tokens"] == 3


@pytest.mark.engine
def test_vllm_accepts_guesses_and_answers_as_ever(draft, reduced):
    """The checkpoint carries a reducer."""
    job = {"folder": str(reduced), "dtype": "float32", "max_tokens": 16}
    setting = draft_folder.speculative_config(draft, reduced)
    expected, drafted = asked("speculation", [job | {"speculative": speculative} for speculative in (None, setting)])
    assert "answers" in drafted, drafted
    assert drafted["answers"] == expected["answers"] and drafted["drafter"] == "Eagle3LlamaForCausalLM"
    counted = {name.rpartition("spec_decode_num_")[2]: value for name, value in drafted["counted"].items()}
    assert counted["accepted_tokens"] > 0.3 * counted["drafts"]


def test_an_interrupted_run_goes_on_to_the_same_bytes(plain, data, tmp_path, capsys, monkeypatch):
    """With a vocabulary of 50 tokens, by vLLM's tables."""
    arguments = ("draft", plain, "--calib", data, *FEW, "--steps", 12, "--every", 4, "--vocabulary", 50)
    assert run(capsys, *arguments, "-o", tmp_path / "whole")[0] == 0
    out, loss, calls = tmp_path / "part", eagle3.loss, []

    def interrupted(*values):
        calls.append(values)
        if len(calls) == 60:
            raise KeyboardInterrupt
        return loss(*values)

    with monkeypatch.context() as patch:
        patch.setattr(eagle3, "loss", interrupted)
        assert run(capsys, *arguments, "-o", out)[0] == 130 and not out.exists()
    code, _, err = run(capsys, *arguments, "-o", out, "--resume", "--vocabulary", 40)
    assert code == 2 and "--resume: the interrupted run had --vocabulary 50, this one has 40" in err
    assert run(capsys, *arguments, "-o", out, "--resume")[0] == 0
    whole, part = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in whole)
    ids = whole["d2t"] + torch.arange(50)
    assert whole["t2d"].nonzero().flatten().tolist() == ids.tolist() and len(whole["lm_head.weight"]) == 50


def test_what_is_refused(draft, reduced, plain, data, tmp_path, capsys):
    for target, changed in ((reduced, other_weights(reduced)), (plain, contextlib.nullcontext())):
        with changed, pytest.raises(UserError, match="was trained for another checkpoint"):
            draft_folder.speculative_config(draft, target)
    with pytest.raises(UserError, match="is no draft of vlmcompress"):
        draft_folder.speculative_config(plain, reduced)
    settings = json.loads((draft / "config.json").read_text())
    for key, value, reason in (
        ("hidden_size", 32, "hidden_size of"),
        ("vocab_size", 7, "vocab_size of"),
        ("num_hidden_layers", 1, "reads hidden states before block 2"),
    ):
        text = json.loads((plain / "config.json").read_text())["text_config"]
        assert reason in draft_folder.mismatch(settings, {"text_config": text | {key: value}})
    qwen2 = tiny.build("qwen2-vl", tmp_path / "qwen2")
    code, _, err = run(capsys, "draft", qwen2, "-o", tmp_path / "no", "--calib", data)
    assert code == 2 and "Qwen2VLForConditionalGeneration gives no hidden states" in err
    code, _, err = run(capsys, "draft", plain, "-o", tmp_path / "no", "--calib", data, "--steps", 0)
    assert code == 2 and "--steps is 0" in err and not (tmp_path / "no").exists()
    code, _, err = run(capsys, "serve", reduced, "--draft", draft, "--speculative-config", "{}")
    assert code == 2 and "--draft stands for a --speculative-config" in err
