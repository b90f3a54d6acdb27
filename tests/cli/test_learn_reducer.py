"""`vlmcompress learn-reducer` on tiny models: what it writes, who carries it, how it continues, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.kit import calibration_rows
from tests.kit.command_line import run
from tests.kit.inputs import encode
from tests.kit.next_steps import follow
from vlmcompress import cli
from vlmcompress.models import load
from vlmcompress.models.data import load_samples
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import attach, attach_carried
from vlmcompress.training import learn_reducer

FEW = ("--steps", 12, "--every", 4, "--batch", 4, "--lr", 0.01)
FEWER = (*FEW, "--steps", 2, "--every", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows over three kinds of image only, so that what is held out is like what is trained on."""
    return calibration_rows.write(tmp_path_factory.mktemp("data"), 24, side=112, kinds=3)


@pytest.fixture(scope="module")
def scorers(models, data, tmp_path_factory):
    """Model -> the file of its scorer."""
    folder, files = tmp_path_factory.mktemp("scorers"), {}
    for name, model in models.items():
        files[name] = folder / f"{name}.safetensors"
        arguments = ("learn-reducer", model, "-o", files[name], "--calib", data, "--keep", "0.5", *FEWER, "--steps", 3)
        assert cli.main([*map(str, arguments)]) == 0
    return files


@pytest.mark.parametrize("name", ["llava", "qwen2-5-vl"])
def test_a_checkpoint_carries_the_scorer(models, scorers, tmp_path, capsys, name):
    """Written, checked by the doctor, read back: reduced as the model with the scorer's file is."""
    out, model = tmp_path / "out", models[name]
    reduce = f"learned:0.5,scorer={scorers[name]}"
    code, text, err = run(capsys, "quantize", model, "--scheme", "none", "--reduce", reduce, "-o", out)
    assert code == 0, err
    assert (out / scorer_file.CARRIED).read_bytes() == scorers[name].read_bytes()
    block = json.loads((out / "config.json").read_text())["vlmcompress"]["reduce"]
    assert block["scorer"] == scorer_file.CARRIED and len(block["sha256"]) == 64 and "network" not in block
    assert str(scorers[name].parent) not in "".join(path.read_text() for path in out.glob("*.json"))
    assert "reducer/scorer.safetensors" in json.loads((out / "vlmcompress.json").read_text())["files"]
    code, text, err = run(capsys, "doctor", out, "--source", model)
    assert code == 0 and "learned:0.5" in text, text
    vlm = load(model)
    batch = encode(vlm, 1)
    with torch.no_grad(), attach(vlm, "learned", {"keep": 0.5, "scorer": str(scorers[name])}) as attached:
        expected = vlm.model(**batch).logits
        kept = [unit.reduction.anchor.tolist() for unit in attached.reduced_units]
    read = AutoModelForImageTextToText.from_pretrained(out, dtype="auto").eval()
    with torch.no_grad(), attach_carried(read, vlm.processor, out) as attached:
        assert torch.equal(read(**batch).logits, expected)
        assert [unit.reduction.anchor.tolist() for unit in attached.reduced_units] == kept
    (out / scorer_file.CARRIED).write_bytes(b"")
    code, text, _ = run(capsys, "doctor", out, "--source", model)
    assert code != 0 and "scorer" in text


def test_learn_reducer_prints_its_result(models, data, tmp_path, capsys):
    out = tmp_path / "s.safetensors"
    code, text, err = run(capsys, "learn-reducer", models["llava"], "-o", out, "--calib", data, "--json", *FEW)
    assert code == 0, err
    done = json.loads(text)
    assert done["steps"] == 12 and done["samples"]["held_out"] == 8 and done["samples"]["trained_on"] == 16
    kl = done["held_out_kl"]
    assert 0 < kl["learned"] < kl["untrained"] and kl["coverage"] > 0 and kl["uniform"] > 0
    assert done["next"][1].startswith(f"vlmcompress quantize {models['llava']} --reduce learned:0.25,scorer={out}")
    assert follow(done["next"], data, tmp_path) == ["eval", "quantize"]
    facts = scorer_file.read(out).facts
    assert facts["model_type"] == "llava" and facts["hidden"] == 64 and facts["keep"] == 0.25
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"], "what a run keeps to go on is gone"


@pytest.mark.slow
def test_training_for_all_shares_measures_both_ends_and_the_middle(models, data, tmp_path, capsys):
    """Against runs for these shares alone: what reducers that need no training lose is the mean of the three."""

    def outcome(*flags):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        code, text, err = run(capsys, "learn-reducer", models["llava"], "-o", out, "--calib", data, "--json", *flags)
        assert code == 0, err
        return json.loads(text)["held_out_kl"], scorer_file.read(out).facts

    together, facts = outcome("--keep", 0.1875, "--to", 0.75, *FEW)
    alone = [outcome("--keep", share, *FEW)[0] for share in (0.1875, 0.375, 0.75)]
    assert (facts["keep"], facts["to"]) == (0.1875, 0.75)
    for name in ("uniform", "coverage", "untrained"):
        assert together[name] == pytest.approx(sum(kl[name] for kl in alone) / 3, rel=1e-4)


def test_a_run_that_diverges_is_stopped_and_keeps_the_best(models, data, tmp_path, capsys, monkeypatch):
    out, run_class = tmp_path / "s.safetensors", learn_reducer._Training
    loss, measured = run_class._noisy_loss, iter([0.5, 0.4, 0.3, 0.1])  # uniform, coverage, untrained, step 4
    monkeypatch.setattr(run_class, "_measured", lambda self, gate: next(measured))
    monkeypatch.setattr(
        run_class, "_noisy_loss", lambda self, index: loss(self, index) * (1 if self.step < 6 else torch.nan)
    )
    code, text, err = run(capsys, "learn-reducer", models["llava"], "-o", out, "--calib", data, *FEW)
    assert code == 0, err
    assert "step 4 is kept; it diverged: at step 7 the loss or its gradient was not finite" in text
    assert scorer_file.read(out).facts["held_out_kl"]["learned"] == 0.1


def test_the_scorer_of_another_model_is_refused(models, scorers, tmp_path, capsys):
    reduce = f"learned:0.5,scorer={scorers['qwen2-5-vl']}"
    arguments = ("--scheme", "none", "-o", tmp_path / "out", "--reduce", reduce)
    code, _, err = run(capsys, "quantize", models["llava"], *arguments)
    assert code == 2 and "of another model" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def mixed(folder, output):
    """Forty rows, of which `output` have an image."""
    return calibration_rows.write(folder, 40, lambda row: f"{row}.png" if output(row) else [], side=112, kinds=3)


def test_samples_of_text_alone_are_accepted(models, tmp_path, capsys):
    """More of them come first than are looked at for the spread of channels."""
    out, rows = tmp_path / "s.safetensors", mixed(tmp_path, lambda i: i % 2)
    code, text, err = run(capsys, "learn-reducer", models["llava"], "-o", out, "--calib", rows, "--json", *FEW)
    assert code == 0, err
    assert json.loads(text)["samples"]["trained_on"] == 32 and scorer_file.read(out).facts["steps"] == 12


def test_training_images_without_held_out_ones_are_refused(models, tmp_path, capsys):
    rows = [sample.id for sample in load_samples(mixed(tmp_path, lambda i: True), samples=40, seed=0)]
    first, last = ({int(number) for number in part} for part in (rows[:32], rows[32:]))
    out, arguments = tmp_path / "s.safetensors", ("learn-reducer", models["llava"], "--calib", tmp_path / "calib.jsonl")
    mixed(tmp_path, lambda i: i in first)
    code, _, err = run(capsys, *arguments, "-o", out, *FEW)
    assert code == 2 and "none of the 8 samples that are held out has an image" in err and err.count("\n") == 1
    assert last and not out.exists()


def test_a_scorer_is_overwritten_on_request(models, scorers, data, tmp_path, capsys):
    out = shutil.copy(scorers["llava"], tmp_path / "mine.safetensors")
    code, _, err = run(capsys, "learn-reducer", models["llava"], "--calib", data, *FEWER, "-o", out, "--overwrite")
    assert code == 0, err
    assert scorer_file.read(Path(out)).facts["steps"] == 2
