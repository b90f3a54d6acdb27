"""`server(...)` with servers that do not come up; `test_agreement` has a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.places import ROOT
from tests.kit.processes import alive, wait_until_gone
from vlmcompress.engines.vllm.serve import free_port, require_free_port, vllm_server
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.utils.errors import UserError


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint folder"), vllm_server(tmp_path / "nothing"):
        pass


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="can't be listened on .*choose another --port"):
            require_free_port("127.0.0.1", taken.getsockname()[1])


def test_death_at_start_shows_the_last_error_lines(checkpoint: Path, broken, tmp_path: Path) -> None:
    broken("echo 'INFO 11-21 05:26:23 [a.py:1] loading'; echo 'ValueError: no such head size' >&2; exit 7")
    log = tmp_path / "log"
    with (
        pytest.raises(
            UserError, match="server could not start .exit code 7. with .*tiny-vlm: ValueError: no such head"
        ),
        vllm_server(checkpoint, log=log),
    ):
        pass
    assert "loading" in log.read_text()


@pytest.mark.parametrize(("reducer", "trusted"), [("dart:0.5,keep_max=1", True), ("dart:0.5", False)])
def test_a_server_passes_the_share_to_the_reducer(
    reducer: str, trusted: bool, checkpoint: Path, broken, tmp_path: Path
) -> None:
    """As in `serve`, so that a benchmark's requests can bring their share, too."""
    plain = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    (checkpoint / "config.json").write_text(
        json.dumps(reducer_block.config_with_reducer(plain, parse_reducer(reducer)))
    )
    broken('echo "$@"; exit 7')
    with pytest.raises(UserError, match="could not start"), vllm_server(checkpoint, log=tmp_path / "log"):
        pass
    assert ("--trust-request-mm-kwargs" in (tmp_path / "log").read_text().split()) is trusted


def test_a_silent_server_times_out_and_leaves_no_process(checkpoint: Path, broken, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    broken(f"sleep 600 & echo $! > {pid}; wait")
    with pytest.raises(UserError, match="was not up after 4 s with"), vllm_server(checkpoint, timeout=4):
        pass
    assert wait_until_gone(int(pid.read_text()))


def test_no_orphan_when_the_parent_is_killed(checkpoint: Path, broken, tmp_path: Path) -> None:
    """`server.py` itself, up to where it imports vLLM; then `kill -9` of the process that started it."""
    pid, package = tmp_path / "pid", tmp_path / "path" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"import time; open({str(pid)!r}, 'w').close(); time.sleep(600)")
    child = tmp_path / "child"
    broken(f'sleep 600 & echo $! > {child}; PYTHONPATH={package.parent} exec {sys.executable} "$@"')
    code = f"from vlmcompress.engines.vllm.serve import vllm_server\nwith vllm_server({str(checkpoint)!r}): pass"
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    end = time.monotonic() + 300
    while not pid.exists() and time.monotonic() < end:
        assert parent.poll() is None
        time.sleep(0.05)
    assert alive(int(child.read_text()))
    parent.send_signal(signal.SIGKILL)
    parent.wait(120)
    assert wait_until_gone(int(child.read_text()))


# In the place of vLLM's: a process that imports anew and one that does not, both deaf to SIGTERM and without a trace of their
# environment, as vLLM's are, whose titles are written there.
SERVER = """
import os, signal, subprocess, sys, time
def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    fork = os.fork()
    if not fork:
        time.sleep(600)
    with open(os.environ["PIDS"], "w") as file:
        file.write(f"{os.getpid()} {child.pid} {fork} ")
    time.sleep(600)
"""


def test_nothing_is_left_of_a_server_that_is_killed(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    """`serve` itself, which is the server then; others of its process group stay."""
    entry = tmp_path / "path/vllm/entrypoints/launchers/api_server/entry.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(SERVER)
    (entry.parents[1] / "launcher.py").touch()
    platforms = tmp_path / "path/vllm/platforms"
    platforms.mkdir()
    (platforms / "__init__.py").write_text("class current_platform:\n    is_cpu = staticmethod(lambda: True)\n")
    for folder in ("", "entrypoints", "entrypoints/launchers", "entrypoints/launchers/api_server"):
        (tmp_path / "path/vllm" / folder / "__init__.py").touch()
    pids, other = tmp_path / "pids", tmp_path / "other"
    code = f"from vlmcompress.engines.vllm.serve import serve; serve({str(checkpoint)!r}, port={free_port()})"
    shell = f'sleep 600 & echo $! > {other}; exec {sys.executable} -c "{code}"'
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}", "PIDS": str(pids)}
    parent = subprocess.Popen(["sh", "-c", shell], env=env, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 300
    while not (pids.exists() and pids.read_text().endswith(" ")) and time.monotonic() < end:
        assert parent.poll() is None
        time.sleep(0.05)
    server, *children = map(int, pids.read_text().split())
    assert server == parent.pid and all(map(alive, children))
    time.sleep(4)  # in which it is looked up who there is
    os.kill(server, signal.SIGKILL)
    parent.wait(120)
    assert all(map(wait_until_gone, children))
    assert alive(int(other.read_text()))
    os.kill(int(other.read_text()), signal.SIGKILL)
