"""Two runs on one OUT: the second ends at once, at whatever point the first is, and nothing of two runs is ever mixed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.kit import calibration_rows, forks, tiny
from tests.kit.work import begun
from tests.kit.workers import start
from vlmcompress import cli
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.run import quantize, space_needed
from vlmcompress.recipe import resolve
from vlmcompress.utils import folders
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.work_folder import locked_output


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 6, lambda i: f"{i}.png" if i else [])
    tiny.build("llava", folder / "model")
    return folder


def recipe(world: Path, out: Path, samples: int = 6, **keys):
    calib = {"data": str(world / "calib.jsonl"), "samples": samples}
    base = {"model": str(world / "model"), "out": str(out), "scheme": "gptq", "options": {"group_size": 64}}
    return resolve(base | {"calibrate": calib} | keys).recipe


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_a_second_run_at_any_moment_is_refused(world: Path, tmp_path: Path) -> None:
    """At each sign of progress of the first run (every block, the writing) a second one with other samples is refused by one
    line that names the process; the first one's weights are those of a run alone."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    quantize(recipe(world, alone))
    moments: list[str] = []

    def intrude(label: str, done: int, total: int) -> None:
        moments.append(label)
        for restart in (False, True):
            with pytest.raises(
                UserError, match=f"another run, process {os.getpid()}, is writing {out} now; wait for it"
            ):
                quantize(recipe(world, out, samples=4), restart=restart, overwrite=True)

    assert quantize(recipe(world, out), progress=intrude).manifest["calibration"]["samples"] == 6
    assert {"calibrating", "writing"} <= set(moments) and len(moments) > 8
    assert weights(out) == weights(alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]


def test_two_processes_with_one_output_are_refused(world: Path, tmp_path: Path) -> None:
    """The second ends with code 2 and one line; the first continues, and ends well. Both by the command line."""
    out = tmp_path / "out"
    call = ["quantize", str(world / "model"), "-o", str(out), "--scheme", "gptq", "--calib", str(world / "calib.jsonl")]
    # Nice, so that on a busy machine it does not end before this process sees it work.
    slow = ["nice", "-n", "19", forks.python(*forks.OURS), "-m", "vlmcompress", *call, "--samples", "6"]
    first = subprocess.Popen(slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (tmp_path / ".out.lock").exists() and first.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    second = subprocess.run([forks.python(*forks.OURS), "-m", "vlmcompress", *call, "--samples", "4"], **PIPES)
    printed = first.communicate(timeout=120)
    assert first.returncode == 0, printed
    assert second.returncode == 2 and second.stderr.count("\n") == 1, second.stderr
    # If the first was done by then, the second reports that OUT exists.
    assert "another run, process " in second.stderr or "exists" in second.stderr
    assert json.loads((out / "vlmcompress.json").read_text())["calibration"]["samples"] == 6


PIPES = {"capture_output": True, "text": True}


@pytest.mark.parametrize("verb", ["learn-reducer", "search"])
def test_every_verb_with_a_work_folder_takes_the_lock(world: Path, tmp_path: Path, capsys, verb: str) -> None:
    out = tmp_path / ("out.safetensors" if verb == "learn-reducer" else "out")
    data = str(world / "calib.jsonl")
    extra = {"learn-reducer": ["--calib", data], "search": ["--data", data]}
    with locked_output(out):
        assert cli.main([verb, str(world / "model"), "-o", str(out), *extra[verb]]) == 2
    output = capsys.readouterr().err
    assert f"another run, process {os.getpid()}, is writing {out} now" in output and output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_workers_are_refused_together(world: Path, tmp_path: Path) -> None:
    """Of two workers one looks at the lock. Both end, with one line."""
    out = tmp_path / "out"
    call = ["quantize", str(world / "model"), "-o", str(out), "--scheme", "gptq", "--calib", str(world / "calib.jsonl")]
    with locked_output(out):
        (code, _, err), (other, _, silent) = ended_soon(start(*call))
    assert (code, other) == (2, 2), err + silent
    assert err.startswith(f"error: another run, process {os.getpid()}, ") and err.count("\n") == 1 and not silent


def ended_soon(workers: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    printed = [worker.communicate(timeout=120) for worker in workers]
    return [(worker.returncode, *text) for worker, text in zip(workers, printed, strict=True)]


def test_without_locks_no_file_of_another_run_is_read(world: Path, tmp_path: Path, monkeypatch) -> None:
    """The second net, as where neither process sees the other's lock: a run that another one took the folder from ends at its
    next block, and one that finds the other's block in its own folder refuses it."""
    kept = tmp_path / ".out.work"

    def taken(label: str, done: int, total: int) -> None:
        if label == "calibrating" and (kept / "layer-0000.safetensors").exists():
            begun(tmp_path / "out", restart=True, samples="another")

    with pytest.raises(UserError, match="is of another run: two worked in .*with --restart"):
        quantize(recipe(world, tmp_path / "out"), progress=taken)
    assert not (tmp_path / "out").exists() and "another" in (kept / "settings.json").read_text(), (
        "not its own to remove"
    )

    block = kept / "layer-0000.safetensors"

    def keep(label: str, done: int, total: int) -> None:
        if label == "writing":
            shutil.copy(tmp_path / ".other.work" / block.name, tmp_path)

    def foreign(label: str, done: int, total: int) -> None:
        if block.exists() and label != "writing":
            shutil.copy(tmp_path / block.name, block)

    quantize(recipe(world, tmp_path / "other", samples=4), progress=keep)
    with pytest.raises(UserError, match="layer-0000.safetensors is of another run"):
        quantize(recipe(world, tmp_path / "out"), progress=foreign)
    with pytest.raises(UserError, match="layer-0000.safetensors is of another run"):
        quantize(recipe(world, tmp_path / "out"))


def test_notes_of_another_run_are_refused(tmp_path: Path) -> None:
    """Gradients, entropies and a teacher's answers are notes: they say whose they are as blocks do."""
    work = begun(tmp_path / "mine", seed=0)
    work.write_note("gradients", [1, 2])
    assert begun(tmp_path / "mine", seed=0).read_note("gradients") == [1, 2]
    begun(tmp_path / "other", seed=1).write_note("gradients", [3])
    shutil.copy(tmp_path / ".other.work" / "gradients.json", work.folder)
    with pytest.raises(UserError, match="gradients.json is of another run"):
        work.read_note("gradients")


def test_no_room(world: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Found out before a weight is read; the estimate is what the blocks and OUT take. A write that fails later names the
    folder with the finished blocks, and the same command goes on there."""
    work, out = recipe(world, tmp_path / "out"), tmp_path / "out"
    needed, blocks = space_needed(make_plan(work), out), []
    kept = tmp_path / ".out.work"
    quantize(work, progress=lambda *_: blocks.append(sum(path.stat().st_size for path in kept.glob("layer-*"))))
    written = folders.bytes_within(out) + max(blocks)
    assert 0.8 * written < needed < 1.25 * written
    full = shutil.disk_usage(tmp_path)._replace(free=needed - 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: full)
        with pytest.raises(
            UserError, match=r"no space for .*more: it needs about .* free some or choose another output"
        ):
            quantize(recipe(world, tmp_path / "more"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    call = ["quantize", str(world / "model"), "-o", str(tmp_path / "late"), "--scheme", "gptq"]
    call += ["--calib", str(world / "calib.jsonl"), "--samples", "6", "--set", "options.group_size=64"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in out.glob("*.safetensors"))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, before[1]))
    try:
        assert cli.main(call) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    output = capsys.readouterr().err
    assert (
        "no space left while writing" in output and f"kept in {tmp_path}/.late.work: the same command goes on" in output
    )
    assert cli.main(call) == 0 and weights(tmp_path / "late").keys() == weights(out).keys()
