"""A folder that is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.places import ROOT
from tests.kit.work import little_room
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.utils import folders
from vlmcompress.utils.errors import UserError


@pytest.fixture
def place(tmp_path):
    """A source folder and an output path in an otherwise empty folder."""
    (tmp_path / "source").mkdir()
    (tmp_path / "work").mkdir()
    return tmp_path / "source", tmp_path / "work" / "out"


def ours(out: Path, text: str) -> None:
    """An existing output of ours."""
    out.mkdir(parents=True)
    (out / MANIFEST).write_text(text)


def run_killed(place, at: str) -> None:
    """Write to `out` in a process that kills itself at a call of `at` (dotted name), the second one for os.rename."""
    source, out = place
    code = f"""
import os, signal, sys
from pathlib import Path
from vlmcompress.utils import folders
calls = 0
def stop(*args, original={at}, **more):
    global calls
    calls += 1
    if calls == {2 if at == "os.rename" else 1}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **more)
{at} = stop
out = Path({str(out)!r})
folders.require_out(Path({str(source)!r}), out, overwrite=True, mark="vlmcompress.json")
with folders.new_folder(out) as tree:
    (tree / "vlmcompress.json").write_text("new")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_run_that_was_killed_before_it_took_its_lock(place):
    """Its folder is removed once no run can be about to take the lock."""
    source, out = place
    stage = out.parent / ".out.vlmcompress-abcdefgh"
    stage.mkdir()
    folders.require_out(source, out, overwrite=False, mark=MANIFEST)
    assert stage.is_dir()
    os.utime(stage, (0, 0))
    folders.require_out(source, out, overwrite=False, mark=MANIFEST)
    assert not list(out.parent.iterdir())


def test_a_users_file_in_an_output_is_not_deleted(place):
    """--overwrite is for what the manifest lists; a lock that a killed run left is nobody's."""
    source, out = place
    ours(out, '{"files": {"config.json": {}, "serve/vllm.sh": {}}}')
    (out / "serve").mkdir()
    for name in ("config.json", "serve/vllm.sh", ".report.lock"):
        (out / name).touch()
    folders.require_out(source, out, overwrite=True, mark=MANIFEST)
    (out / "serve" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=f"has files that are not in {MANIFEST}: serve/notes.txt; move them"):
        folders.require_out(source, out, overwrite=True, mark=MANIFEST)
    assert (out / "serve" / "notes.txt").read_text() == "mine"


def test_an_output_appears_when_complete(place):
    source, out = place
    folders.require_out(source, out, overwrite=False, mark=MANIFEST)
    with folders.new_folder(out) as tree:
        (tree / "sub").mkdir()
        (tree / "sub" / "a").write_text("x")
        assert not out.exists()
    assert (out / "sub" / "a").read_text() == "x"
    assert os.listdir(out.parent) == ["out"]
    assert (out.stat().st_mode & 0o777) == 0o777 & ~_umask()


def _umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
def test_a_failure_leaves_nothing(place, error):
    _, out = place
    out = out.parent / "new" / "folders" / "out"
    with pytest.raises(error), folders.new_folder(out) as tree:
        (tree / "a").write_text("x")
        raise error("stop")
    assert not list(out.parents[2].iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_is_a_user_error(place, number):
    _, out = place
    with pytest.raises(UserError, match="no space left"), folders.new_folder(out):
        raise OSError(number, os.strerror(number))
    assert not list(out.parent.iterdir())


def test_every_writer_of_weights_reports_a_full_disk():
    """A draft's once were not: safetensors' own error ended in a traceback."""
    users = [file for file in (ROOT / "vlmcompress").rglob("*.py") if "save_file(" in file.read_text()]
    assert users == [Path(folders.__file__)]


def test_an_existing_folder_is_refused(place):
    source, out = place
    ours(out, "old")
    with pytest.raises(UserError, match="--overwrite"):
        folders.require_out(source, out, overwrite=False, mark=MANIFEST)
    folders.require_out(source, out, overwrite=True, mark=MANIFEST)
    (out / MANIFEST).rename(out / "thesis.txt")
    with pytest.raises(UserError, match="not ours to overwrite"):
        folders.require_out(source, out, overwrite=True, mark=MANIFEST)


@pytest.mark.parametrize("out", ["source", "source/out", "source/../source/deep/out", "."])
def test_source_is_safe(place, out):
    source, _ = place
    with pytest.raises(UserError, match="source model"):
        folders.require_out(source, source.parent / out, overwrite=True, mark=MANIFEST)


def test_a_symlink_to_the_source_is_seen_through(place):
    source, out = place
    out.symlink_to(source)
    with pytest.raises(UserError, match="source model"):
        folders.require_out(source, out, overwrite=True, mark=MANIFEST)


def test_an_unwritable_folder_is_refused(place):
    source, out = place
    out.parent.joinpath("file").write_text("")
    with pytest.raises(UserError, match="not a folder you can write to"):
        folders.require_out(source, out.parent / "file" / "out", overwrite=False, mark=MANIFEST)
    with pytest.raises(UserError, match="cannot write"), folders.new_folder(Path("/proc/none/out")):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(place):
    source, out = place
    out.parent.chmod(0o500)
    with pytest.raises(UserError, match="not a folder you can write to"):
        folders.require_out(source, out, overwrite=False, mark=MANIFEST)


def test_overwrite_keeps_the_old_until_the_new_is_whole(place):
    _, out = place
    ours(out, "old")
    with pytest.raises(RuntimeError), folders.new_folder(out) as tree:
        (tree / MANIFEST).write_text("new")
        raise RuntimeError
    assert (out / MANIFEST).read_text() == "old"
    with folders.new_folder(out) as tree:
        (tree / MANIFEST).write_text("new")
        assert (out / MANIFEST).read_text() == "old"
    assert (out / MANIFEST).read_text() == "new"
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("at", ["os.fsync", "os.rename", "folders.shutil.rmtree"])
def test_a_run_killed_while_replacing_loses_nothing(place, at):
    """Killed before, between and after the two renames: the next run finds a whole folder and removes the rest."""
    source, out = place
    ours(out, "old")
    run_killed(place, at)
    folders.require_out(source, out, overwrite=True, mark=MANIFEST)
    assert (out / MANIFEST).read_text() == ("new" if at == "folders.shutil.rmtree" else "old")
    assert os.listdir(out.parent) == ["out"]


def test_only_leftovers_of_the_package_are_removed(place):
    source, out = place
    run_killed(place, "os.fsync")
    (out.parent / ".out.vlmcompress-mine").mkdir()
    (out.parent / ".other.vlmcompress-x").mkdir()
    (out.parent / ".other.vlmcompress-x" / "lock").write_text("")
    assert len(os.listdir(out.parent)) == 3
    folders.require_out(source, out, overwrite=False, mark=MANIFEST)
    assert sorted(os.listdir(out.parent)) == [".other.vlmcompress-x", ".out.vlmcompress-mine"]


def test_a_running_writer_is_left_alone(place):
    source, out = place
    with folders.new_folder(out) as tree:
        with pytest.raises(UserError, match="another run"):
            folders.require_out(source, out, overwrite=False, mark=MANIFEST)
        assert tree.is_dir()
    assert out.is_dir()


def test_a_file_without_room_is_named(tmp_path: Path) -> None:
    """Not the folder, which may be `.`; what was there before stays."""
    folders.save_files(tmp_path, {"chart": ("a.png", b"old")})
    with little_room(), pytest.raises(UserError, match=r"no space left while writing .*/a\.png; free some"):
        folders.save_files(tmp_path, {"chart": ("a.png", bytes(100_000))})
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"] and (tmp_path / "a.png").read_bytes() == b"old"


HOLD = """
import sys, time
from vlmcompress.utils.folders import temporary_folder
with temporary_folder("eval") as folder:
    (folder / "image.png").touch()
    print(folder, flush=True)
    if sys.argv[1:] == ["wait"]:
        time.sleep(120)
"""


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_a_temporary_folder_ends_with_its_process(number: int | None, tmp_path: Path) -> None:
    """A Python program that no handler of ours runs in, and that a signal ends: copies of images are in it."""
    command = [sys.executable, "-c", HOLD, *(["wait"] if number else [])]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().decode().strip())
        assert folder.parent == tmp_path
        if number:
            assert (folder / "image.png").exists()
            holder.send_signal(number)
    until = time.monotonic() + 60
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
