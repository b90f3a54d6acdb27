"""Locks of files: who holds one, and when it is free again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kit.places import ROOT
from vlmcompress.utils import locks
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.work_folder import locked_output

HOLD = """
import sys, time
from pathlib import Path
from vlmcompress.utils import locks
with locks.held(Path(sys.argv[1]), 'writing out'):
    print("held", flush=True)
    time.sleep(120)
"""


def test_one_at_a_time(tmp_path: Path) -> None:
    """Refused while it is held, also within one process, by a message that names the holder; free and gone afterwards."""
    place = tmp_path / "lock"
    for _ in range(2):
        with locks.held(place, "writing out"):
            with (
                pytest.raises(UserError, match=f"^another run, process {os.getpid()}, is writing out now; wait for it"),
                locks.held(place, "writing out"),
            ):
                pass
            assert place.exists()
        assert not place.exists()


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    """Its lock names it while it lives and is free when it is dead, whatever it left."""
    place = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(place)], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(UserError, match=f"another run, process {holder.pid}, is writing"),
            locks.held(place, "writing out"),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert place.exists()
    with locks.held(place, "writing out"):
        assert place.read_text().split()[0] == str(os.getpid())
    assert not place.exists()


def test_waiting_runs_take_turns(tmp_path: Path) -> None:
    """A file that is removed and made anew between two of them lets no two in."""
    place = tmp_path / "lock"
    inside, most, turns = [0], [0], 5

    def work() -> None:
        for _ in range(turns):
            with locks.held(place, "writing out", wait=True):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                assert place.exists()
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and not place.exists()


def test_a_claim_leaves_no_folders(tmp_path: Path) -> None:
    with locked_output(tmp_path / "new" / "folders" / "out"):
        assert (tmp_path / "new" / "folders" / ".out.lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_the_output_is_checked_under_the_lock(tmp_path: Path) -> None:
    """Another run may have finished it between the first look and the lock."""
    looks = []

    def check() -> None:
        looks.append((tmp_path / ".out.lock").exists())
        if looks[-1]:
            raise UserError("out exists")

    with pytest.raises(UserError, match="out exists"), locked_output(tmp_path / "out", check):
        pass
    assert looks == [False, True] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("restart", [False, True])
def test_a_work_folder_that_is_a_link_is_refused(restart: bool, tmp_path: Path) -> None:
    """Whoever may write next to OUT could have put it there; nothing is written or deleted where it leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / ".out.work").symlink_to(elsewhere)
    with (
        pytest.raises(UserError, match=r"\.out\.work is a link, .*; remove it"),
        locked_output(tmp_path / "out", restart=restart) as work,
    ):
        work.expect({"model": "m"})
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]
