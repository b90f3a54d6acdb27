"""Every verb with long work, interrupted: the same command continues, other settings are refused, `--restart` begins anew."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.kit import calibration_rows, forks, tiny
from tests.kit.command_line import run
from tests.kit.edits import other_weights
from vlmcompress.utils.progress import ProgressBar

TRAINING = ("--samples", "24", "--steps", "4", "--every", "2", "--batch", "2")
CASES = {  # verb: (its flags, other settings, the label and the step of progress after which it is stopped)
    "quantize": (("--scheme", "gptq", "--samples", "6"), ("--samples", "5"), ("calibrating", 3)),
    "learn-reducer": (TRAINING, ("--lr", "0.02"), ("training the scorer", 3)),
    "draft": (("--engine", "hf", "--answer-tokens", "4", *TRAINING), ("--lr", "0.0005"), ("training the draft", 3)),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 24, side=112, kinds=3)
    tiny.build("llava", folder / "model")
    return folder


def contents(out: Path) -> dict[str, bytes]:
    """The weights that were written."""
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    return {path.name.replace(out.name, "out"): path.read_bytes() for path in files}


def kept(work: Path) -> dict[str, int]:
    return {str(path.relative_to(work)): path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()}


KILLED = """
import os, signal, sys
from vlmcompress import cli
left, fsync = int(sys.argv.pop(1)), os.fsync
def stop(file):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = stop
sys.exit(cli.main())
"""


@pytest.mark.slow
def test_a_run_killed_in_any_phase_continues(world, tmp_path):
    """While settings, blocks, weights, other files and names are brought to the disk: the same command writes the same bytes,
    and nothing but OUT is left."""
    call = ["quantize", world / "model", "--scheme", "rtn", "-o", tmp_path / "out"]

    def code(moment: int) -> int:
        command = [forks.python(*forks.OURS), "-c", KILLED, str(moment), *map(str, call)]
        return subprocess.run(command, capture_output=True, cwd=tmp_path).returncode

    assert code(0) == 0
    whole = contents(tmp_path / "out")
    for moment in range(1, 1000, 7):
        shutil.rmtree(tmp_path / "out")
        if code(moment) != -signal.SIGKILL:
            break
        if (tmp_path / "out").exists():  # its name was not on the disk yet
            assert contents(tmp_path / "out") == whole
            continue
        assert code(0) == 0 and contents(tmp_path / "out") == whole, moment
        assert [path.name for path in tmp_path.iterdir()] == ["out"], moment
    assert moment > 6


@pytest.mark.parametrize("verb", [pytest.param(v, marks=pytest.mark.slow) if v == "draft" else v for v in CASES])
def test_an_interrupted_verb_continues_to_the_same_bytes(world, tmp_path, capsys, monkeypatch, verb):
    flags, others, (label, last) = CASES[verb]
    ending = ".safetensors" if verb == "learn-reducer" else ""
    whole, out = tmp_path / f"whole{ending}", tmp_path / f"out{ending}"
    call = (verb, world / "model", "--calib", world / "calib.jsonl", *flags)
    work = tmp_path / f".{out.name}.work"
    code, _, err = run(capsys, *call, "-o", whole)
    assert code == 0, err

    steps: list[int] = []

    def until(end: int, *arguments: object) -> tuple[int, str]:
        """The call, stopped at a step: its exit code and errors; `steps` are those of `label` that it took."""
        steps.clear()

        def progress(_bar: ProgressBar, output: str, done: int, total: int) -> None:
            if output == label:
                steps.append(done)
                if done >= end:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ProgressBar, "__call__", progress)
            code, _, err = run(capsys, *call, *arguments, "-o", out)
        return code, err

    code, err = until(last)
    assert code == 130 and "the same command goes on from here" in err and not out.exists()
    before = kept(work)
    assert any(name.endswith(".safetensors") for name in before) and min(steps) <= 1

    code, _, err = run(capsys, *call, *others, "-o", out)
    assert code == 2 and err.count("\n") == 1 and "begin anew with --restart" in err, err
    assert f"an interrupted run with {others[0] if '--steps' in flags else ''}" in err, err
    assert kept(work) == before, "nothing is lost"
    if verb != "quantize":  # which tells a model by its files' sizes and times
        with other_weights(world / "model"):
            code, _, err = run(capsys, *call, "-o", out)
        assert code == 2 and re.search("interrupted run with (weights|model.content_sha256) ", err), err

    shutil.copytree(work, tmp_path / "copy")
    code, err = until(1000, "--resume")
    assert code == 0 and f"going on with the finished work in {work}" in err, err
    assert "--steps" not in flags or min(steps) >= last, "no step of training is taken twice"
    assert contents(out) == contents(whole) and not work.exists()

    shutil.rmtree(out) if out.is_dir() else out.unlink()
    shutil.copytree(tmp_path / "copy", work)
    code, err = until(1, *others, "--restart")
    assert code == 130 and "going on" not in err and min(steps) <= 1, err
