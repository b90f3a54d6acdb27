"""Two workers train what one does, `learn-reducer` and `draft`; how it ends when one of them cannot go on."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import calibration_rows, tiny
from tests.kit.workers import alone, ended, start
from vlmcompress.models.data import load_samples
from vlmcompress.reduction import scorer_file

ROWS = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A model, and rows of which some have no answer, over three images, one row in six of text alone."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, ROWS, lambda row: f"{row}.png" if row % 6 else [], kinds=3)
    rows = [json.loads(line) for line in (folder / "calib.jsonl").read_text().splitlines()]
    for row in rows[::5]:
        row.pop("answer")
    (folder / "calib.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny.build("llava", folder / "model")
    return folder


def asked(verb: str, world: Path, out: Path, *extra: str) -> list[str]:
    data = ("--calib", str(world / "calib.jsonl"), "--samples", str(ROWS))
    return [verb, str(world / "model"), "-o", str(out), *data, *extra]


SCORER = ("--batch", "3", "--lr", "0.01")


@pytest.mark.slow
def test_a_scorer_is_that_of_one_worker(world, tmp_path):
    extra = (*SCORER, "--steps", "8", "--every", "2", "--json")
    files = {name: tmp_path / f"{name}.safetensors" for name in ("one", "two")}
    calls = {name: asked("learn-reducer", world, file, *extra) for name, file in files.items()}
    (code, out, err), (other, silent, nothing) = ended(start(*calls["two"]))
    assert (code, other) == (0, 0), err + nothing
    assert json.loads(out)["ok"] and not silent and not nothing.strip()
    alone(*calls["one"])
    single, two = (scorer_file.read(files[name]) for name in ("one", "two"))
    for name, expected in single.weights.items():
        torch.testing.assert_close(two.weights[name], expected, rtol=1e-4, atol=1e-4, msg=name)
    assert two.facts["samples"] == single.facts["samples"] and single.facts["samples"]["answers_of_the_teacher"] > 0
    for name, value in single.facts["held_out_kl"].items():
        assert two.facts["held_out_kl"][name] == (value if name == "unit" else pytest.approx(value, rel=1e-3)), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "two.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.engine)])
def test_a_draft_head_is_that_of_one_worker(engine, world, tmp_path):
    """Three samples a step, held-out ones shared out; the model's answers by each worker's share, or by one's vLLM."""
    extra = ("--engine", engine, *("--steps", "6", "--every", "2", "--batch", "3"), "--json", "--answer-tokens", "8")
    calls = {name: asked("draft", world, tmp_path / name, *extra) for name in ("one", "two")}
    (code, out, err), (other, silent, nothing) = ended(start(*calls["two"]))
    assert (code, other) == (0, 0), err + nothing
    assert json.loads(out)["ok"] and not silent and not nothing.strip()
    alone(*calls["one"])
    single, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, expected in single.items():
        torch.testing.assert_close(two[name], expected, rtol=2**-7, atol=1e-4, msg=name)  # bfloat16
    ours, theirs = (json.loads((tmp_path / name / "vlmcompress-draft.json").read_text()) for name in ("one", "two"))
    assert theirs["held_out_kl"] == pytest.approx(ours["held_out_kl"], rel=1e-3) and ours["best_step"] > 0
    assert theirs["samples"] == ours["samples"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_bad_input_is_reported_once(world, tmp_path):
    """Also what only one of them comes to see: a row of the second worker's share."""
    data = tmp_path / "bad.jsonl"
    rows = [json.loads(line) for line in (world / "calib.jsonl").read_text().splitlines()]
    for row in rows:
        row["answer"], row["image"] = "red", [str(world / image) for image in [row["image"]] if image]
    data.write_text("\n".join(map(json.dumps, rows)))
    last = load_samples(data, samples=ROWS, seed=0)[-1].id  # in the second part of 16 samples
    next(row for row in rows if row["id"] == last)["question"] = "what is it " * 500
    data.write_text("\n".join(map(json.dumps, rows)))
    call = asked("learn-reducer", world, tmp_path / "out.safetensors", *SCORER)
    call[call.index("--calib") + 1] = str(data)
    for arguments, text in ((call, "more than the context of"), ([*call, "--steps", "0"], "--steps is 0")):
        message = ended(start(*arguments))
        assert [code for code, _, _ in message] == [2, 2]
        lines = [line for line in message[0][2].splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and text in lines[0] and not message[1][2], message
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.slow
def test_a_worker_that_dies(world, tmp_path):
    """The other one ends with one line, and one alone continues to what one alone would have come to."""
    extra, out = (*SCORER, "--steps", "24", "--every", "2"), tmp_path / "out.safetensors"
    work = tmp_path / ".out.safetensors.work"
    call = asked("learn-reducer", world, out, *extra)
    workers = start(*call)
    until = time.monotonic() + 200
    while not (work / "state.safetensors").exists() and workers[0].poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    workers[1].send_signal(signal.SIGKILL)
    (code, output, err), (killed, _, _) = ended(workers)
    assert (code, killed) == (2, -signal.SIGKILL), err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "another worker" in lines[0] and "Traceback" not in err and not output
    assert not out.exists() and len(list(work.glob("teacher-*"))) == 2
    alone(*call)
    alone(*asked("learn-reducer", world, tmp_path / "whole.safetensors", *extra))
    ours, theirs = (scorer_file.read(tmp_path / f"{name}.safetensors").weights for name in ("out", "whole"))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-4, msg=name)
