"""`vlmcompress draft` on tiny models: what vLLM makes of it, how it continues, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.kit import tiny
from tests.kit.command_line import run
from tests.kit.edits import other_weights
from tests.kit.engine import asked
from tests.kit.vllm_speculation import TEXTS
from vlmcompress import cli, models
from vlmcompress.export import draft_folder
from vlmcompress.export.draft_folder import Draft
from vlmcompress.models.data import Sample
from vlmcompress.models.data.encode import ANSWER, TEXT, VISION, encode_prompt
from vlmcompress.recipe import resolve
from vlmcompress.training import eagle3, teacher_cache
from vlmcompress.training.draft import _require_answers
from vlmcompress.training.draft_data import DraftData, load_target
from vlmcompress.utils import identity
from vlmcompress.utils.errors import UserError

FEW = ("--steps", 24, "--every", 12, "--batch", 4, "--answer-tokens", 16, "--lr", 0.002, "--engine", "hf")
REMOVED = (("--kind", "medusa"), ("--images", "all"), ("--image-vector",), ("--from", "DRAFT"))
FEWER = ("--steps", 6, "--every", 2, "--answer-tokens", 6)
BLOCK = 32  # the least of vLLM's CPU build
ROOM = 196  # visual tokens that an image may have
LARGE = (224, 280)  # an image that fills some blocks


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The prompts that `tests/kit/vllm_speculation.py` gives to vLLM, about the image there and others."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.RandomState(0)
    with (folder / "calib.jsonl").open("w") as file:
        for number in range(20):
            if number in (0, 3, *range(12, 20)):
                size = (80, 60) if number else LARGE
                image = Image.fromarray(random.randint(0, 256, (10, 8, 3), dtype=np.uint8)).resize(size, 0)
            image.save(folder / f"{number}.png")
            row = {"id": str(number), "image": f"{number}.png", "question": TEXTS[number % 3]}
            file.write(json.dumps(row) + "\n")
    return folder / "calib.jsonl"


def roomy(family: str, folder: Path) -> Path:
    """A tiny model whose images may have `ROOM` tokens, some blocks of vLLM's cache."""
    tiny.build(family, folder)
    for file in folder.glob("*processor*.json"):
        file.write_text(file.read_text().replace(str(28 * 28 * 36), str(28 * 28 * ROOM)))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return roomy("qwen2-5-vl", tmp_path_factory.mktemp("plain") / "qwen")


@pytest.fixture(scope="module")
def reduced(plain, tmp_path_factory):
    """With three quarters of the visual tokens."""
    out = tmp_path_factory.mktemp("reduced") / "out"
    assert cli.main(["quantize", str(plain), "-o", str(out), "--scheme", "none", "--reduce", "uniform:0.75"]) == 0
    return out


@pytest.fixture(scope="module")
def draft(reduced, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("draft") / "draft"
    assert cli.main(list(map(str, ["draft", reduced, "-o", out, "--calib", data, *FEW]))) == 0
    return out


class Trained:
    """What training's own code guesses with the tensors of a draft, for an image."""

    def __init__(self, folder: Path, target: Path, image: Path):
        recipe = resolve({"model": str(target), "out": "none", "scheme": "none"}).recipe
        vlm = load_target(recipe)
        vlm.model.float()
        self.image, self.token = Image.open(image), vlm.model.config.image_token_id
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        ids = torch.arange(len(stored[draft_folder.HEAD]))
        self.vocabulary = ids + stored.pop("d2t") if stored.pop("t2d", None) is not None else ids
        self.tensors = {name: tensor.float() for name, tensor in stored.items()}
        self.draft_data = DraftData(vlm, teacher_cache.TrainingData("none", [], 0, 0), recipe, len(ids))

    def logits(self, text: str, answered: list[int], proposal: list[int]) -> torch.Tensor:
        """Logits of the guesses after those that were answered; a later one sees the tokens of `proposal` before it."""
        batch = encode_prompt(Sample("0", [self.image], text), self.draft_data.target)
        prompt = batch["input_ids"][0]
        whole = torch.cat([prompt, torch.tensor(answered + proposal)])
        for name, value in batch.items():
            if value.shape == (1, len(prompt)):
                batch[name] = torch.cat([value, value.new_zeros(1, len(whole) - len(prompt))], 1)
        batch |= {"input_ids": whole[None], "attention_mask": torch.ones(1, len(whole), dtype=torch.long)}
        batch["modality"] = torch.full((1, len(whole)), TEXT, dtype=torch.uint8)
        batch["modality"][whole[None] == self.token] = VISION
        batch["modality"][0, len(prompt) - 1 :] = ANSWER
        self.draft_data.batches = [batch]
        logits = eagle3.guesses(self.tensors, self.draft_data.shape, self.draft_data.sample(0))
        return torch.stack([step[len(answered) - 1 + k] for k, step in enumerate(logits)])

    def compare(self, text: str, proposals: list[tuple[list[int], list]], answer: list[int]) -> None:
        """Assert that these are the guesses that vLLM's drafter made on the way to `answer`."""
        answered = 1
        for tokens, logits in proposals:
            if answered >= len(answer) - len(tokens):
                break
            expected = self.logits(text, answer[:answered], tokens)
            torch.testing.assert_close(torch.tensor(logits)[:, self.vocabulary], expected, rtol=1e-4, atol=2e-4)
            answered += 1 + next((k for k, token in enumerate(tokens) if token != answer[answered + k]), len(tokens))
        assert answered > 6


def test_a_draft_checkpoint_has_all_its_files(draft, reduced, capsys):
    facts = json.loads((draft / draft_folder.FACTS).read_text())
    assert facts["target"]["content_sha256"] == identity.model_hash(reduced)
    assert facts["reduce"]["method"] == "uniform"
    assert facts["held_out_kl"]["after"] < facts["held_out_kl"]["before"]
    shares = facts["acceptance"]["by_position"]
    assert 1 >= shares[0] >= shares[1] >= shares[2] and facts["acceptance"]["length"] == 1 + sum(shares)
    tensors = safetensors.torch.load_file(draft / "model.safetensors")
    assert sum(value.numel() for value in tensors.values()) == facts["parameters"]
    assert draft_folder.speculative_config(draft, reduced)["num_speculative_tokens"] == 3
    code, out, _ = run(capsys, "doctor", reduced, "--draft", draft)
    assert code == 0 and "the checkpoint that it was trained for" in out


@pytest.mark.engine
def test_vllm_drafts_as_in_training_and_answers_stay_the_same(draft, reduced, data):
    """Every guess is the one that training's code makes, with M-RoPE and a reducer; in the second engine the image is cut by a
    step's budget. The last question is the first one again, which finds its image in the prefix cache, that others in between
    found a part of."""
    image = data.parent / "0.png"
    job = {"folder": str(reduced), "dtype": "float32", "max_tokens": 16, "image": str(image), "block_size": BLOCK}
    setting, trained = draft_folder.speculative_config(draft, reduced), Trained(draft, reduced, image)
    cut = {"speculative": setting, "alone": True, "budget": 36}
    expected, drafted, pieces = asked(
        "speculation", [job | {"speculative": None}, job | {"speculative": setting, "alone": True}, job | cut]
    )
    for answers in (drafted, pieces):
        assert answers.get("answers") == [*expected["answers"], expected["answers"][0]], answers
        assert answers["drafter"] == "Eagle3LlamaForCausalLM"
        for number in (0, -1):
            trained.compare(TEXTS[0], answers["proposals"][number], answers["answers"][number])
    counted = {name.rpartition("spec_decode_num_")[2]: value for name, value in drafted["counted"].items()}
    assert counted["accepted_tokens"] > 0


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("reduces", [False, True])
def test_vllm_drafts_as_in_training_with_plain_rope(reduces, data, tmp_path):
    """What the test above shows, of LLaVA, and of a head that can guess few words."""
    target, out = roomy("llava", tmp_path / "llava"), tmp_path / "draft"
    if reduces:
        reduced = ["quantize", str(target), "-o", str(tmp_path / "out"), "--scheme", "none", "--reduce", "uniform:0.75"]
        assert cli.main(reduced) == 0
        target = tmp_path / "out"
    assert cli.main(list(map(str, ["draft", target, "-o", out, "--calib", data, *FEW, "--vocabulary", 50]))) == 0
    image = data.parent / "0.png"
    job = {"folder": str(target), "dtype": "float32", "max_tokens": 16, "image": str(image), "block_size": BLOCK}
    setting = draft_folder.speculative_config(out, target)
    expected, drafted = asked(
        "speculation", [job | {"speculative": None}, job | {"speculative": setting, "alone": True}]
    )
    assert drafted.get("answers") == [*expected["answers"], expected["answers"][0]], drafted
    Trained(out, target, image).compare(TEXTS[0], drafted["proposals"][0], drafted["answers"][0])


@pytest.mark.slow
def test_an_interrupted_run_continues_to_the_same_bytes(plain, data, tmp_path, capsys, monkeypatch):
    """With a vocabulary of 50 tokens, by vLLM's tables."""
    arguments = ("draft", plain, "--calib", data, *FEW, *FEWER, "--vocabulary", 50)
    code, _, err = run(capsys, *arguments, "-o", tmp_path / "whole")
    assert code == 0, err
    out, loss, calls = tmp_path / "part", eagle3.loss, []

    def interrupted(*values):
        calls.append(values)
        if len(calls) == 36:
            raise KeyboardInterrupt
        return loss(*values)

    with monkeypatch.context() as patch:
        patch.setattr(eagle3, "loss", interrupted)
        assert run(capsys, *arguments, "-o", out)[0] == 130 and not out.exists()
    code, _, err = run(capsys, *arguments, "-o", out, "--vocabulary", 40)
    assert code == 2 and "an interrupted run with --vocabulary 50, this one has 40; give the same" in err
    assert run(capsys, *arguments, "-o", out)[0] == 0
    whole, part = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in whole)
    ids = whole["d2t"] + torch.arange(50)
    assert whole["t2d"].nonzero().flatten().tolist() == ids.tolist() and len(whole["lm_head.weight"]) == 50


@pytest.mark.slow
def test_nan_in_training_stops_it_and_keeps_the_best(plain, data, tmp_path, capsys, monkeypatch):
    """And a first step that is not finite leaves nothing."""
    arguments = ("draft", plain, "--calib", data, *FEW, *FEWER)
    loss, calls = eagle3.loss, []

    def breaking(*values):
        calls.append(values)
        return loss(*values) * (torch.nan if len(calls) > limit else 1)

    for limit, code in ((30, 0), (10, 2)):
        calls.clear()
        out = tmp_path / str(limit)
        with monkeypatch.context() as patch:
            patch.setattr(eagle3, "loss", breaking)
            ended, text, err = run(capsys, *arguments, "-o", out)
        assert ended == code and "it diverged" in text + err and out.exists() is not bool(code)
    facts = json.loads((tmp_path / "30" / draft_folder.FACTS).read_text())
    assert 0 < facts["best_step"] < 6 and facts["held_out_kl"]["after"] < facts["held_out_kl"]["before"]


def spoilt(draft: Path, folder: Path, change) -> Path:
    """A copy of a draft, whose config and tensors `change` has edited."""
    shutil.copytree(draft, folder)
    settings, tensors = (
        json.loads((folder / "config.json").read_text()),
        safetensors.torch.load_file(draft / "model.safetensors"),
    )
    change(settings, tensors)
    (folder / "config.json").write_text(json.dumps(settings))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def test_bad_input_is_refused(draft, reduced, plain, data, tmp_path, capsys):
    with other_weights(reduced):
        code, _, err = run(capsys, "serve", reduced, "--draft", draft)
        assert code == 2 and "was trained for another checkpoint" in err and "train one for this one" in err
    code, out, _ = run(capsys, "doctor", plain, "--draft", draft)
    assert code == 2 and "was trained for another checkpoint" in out
    with pytest.raises(UserError, match="is not a draft of vlmcompress"):
        draft_folder.speculative_config(plain, reduced)
    trained, text = Draft.of(draft), models.read_config(plain)["text_config"]
    for key, value, reason in (
        ("hidden_size", 32, "hidden_size of"),
        ("vocab_size", 7, "vocab_size of"),
        ("num_hidden_layers", 1, "reads hidden states before block 2"),
    ):
        assert reason in trained.mismatch({"text_config": text | {key: value}})
    qwen2 = tiny.build("qwen2-vl", tmp_path / "qwen2")
    code, _, err = run(capsys, "draft", qwen2, "-o", tmp_path / "no", "--calib", data)
    assert code == 2 and "Qwen2VLForConditionalGeneration passes no hidden states" in err
    for flags, message in (
        (("--steps", 0), "--steps is 0"),
        (("--vocabulary", 0), "--vocabulary is 0"),
        *((flags, f"takes no '{flags[0]}'") for flags in REMOVED),
    ):
        code, _, err = run(capsys, "draft", plain, "-o", tmp_path / "no", "--calib", data, *flags)
        assert code == 2 and message in err and not (tmp_path / "no").exists(), err
    short = {"modality": torch.tensor([[TEXT, VISION, TEXT, ANSWER, TEXT]], dtype=torch.uint8)}
    with pytest.raises(UserError, match="one token each, which leaves a draft nothing to guess"):
        _require_answers(SimpleNamespace(batches=[short, short], first=1), data)
    code, _, err = run(capsys, "serve", reduced, "--draft", draft, "--speculative-config", "{}")
    assert code == 2 and "--draft and --speculative-config exclude each other" in err


def test_damaged_and_earlier_drafts_are_refused(draft, reduced, tmp_path, capsys):
    def cut(settings, tensors):
        tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()

    def not_finite(settings, tensors):
        tensors["norm.weight"][0] = torch.nan

    def images(settings, tensors):
        settings["speculators_model_type"] = "vlmcompress-eagle3"

    for change, message in (
        (cut, "fc.weight has the shape"),
        (not_finite, "norm.weight holds NaN"),
        (images, "config.json: speculators_model_type should be 'eagle3'; train the draft again"),
    ):
        bad = spoilt(draft, tmp_path / change.__name__, change)
        code, out, _ = run(capsys, "doctor", reduced, "--draft", bad)
        assert code == 2 and message in out, out
    medusa = Path(shutil.copytree(draft, tmp_path / "medusa"))
    facts = json.loads((medusa / draft_folder.FACTS).read_text()) | {"method": "medusa"}
    (medusa / draft_folder.FACTS).write_text(json.dumps(facts))
    for earlier in (medusa, tmp_path / "images"):
        for verb in ("serve", "plan"):
            code, _, err = run(capsys, verb, reduced, "--draft", earlier)
            assert code == 2 and "should be 'eagle3'; train the draft again" in err.splitlines()[-1], err


def test_plan_counts_a_draft(draft, reduced, capsys):
    arguments = ("plan", reduced, "--target", "rtx4090", "--json")
    alone, next_to = (json.loads(run(capsys, *arguments, *flags)[1]) for flags in ((), ("--draft", draft)))
    assert next_to["speculative"]["weights"] == sum(
        tensor.nbytes for tensor in safetensors.torch.load_file(draft / "model.safetensors").values()
    )
    assert (
        next_to["memory"]["token_bytes"] - alone["memory"]["token_bytes"]
        == next_to["speculative"]["token_bytes"]
        == 2 * 2 * 32 * 2
    )
    code, _, err = run(capsys, "plan", reduced, "--draft", draft, "--speculative", "ngram")
    assert code == 2 and "--draft and --speculative exclude each other" in err
