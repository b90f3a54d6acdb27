"""The tests' quick Python does what Python does: streams, arguments, environment, exit codes, signals, and its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import forks
from tests.kit.places import ROOT
from tests.kit.processes import wait_until_gone

SHOW = """
import decimal, os, sys
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ.get("SAID"), os.getpriority(os.PRIO_PROCESS, 0))
print(sys.stdin.read(), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def quick() -> str:
    return forks.python("decimal")


@pytest.mark.parametrize("way", ["-c", "-m", "file"])
def test_a_fork_behaves_as_a_new_python(quick: str, tmp_path: Path, way: str) -> None:
    """Oracle: Python itself."""
    (tmp_path / "shown.py").write_text(SHOW)
    arguments = {"-c": ["-c", SHOW], "-m": ["-m", "shown"], "file": [str(tmp_path / "shown.py")]}[way]
    both = []
    for python in (quick, sys.executable):
        done = subprocess.run(
            ["nice", "-n", "3", python, *arguments, "5", "a b"],
            cwd=tmp_path,
            env=os.environ | {"SAID": "word", "PYTHONPATH": str(tmp_path)},
            input="given",
            capture_output=True,
            text=True,
        )
        both.append((done.returncode, done.stdout, done.stderr))
    assert both[0] == both[1] and both[0][0] == 5 and "word" in both[0][1] and both[0][2] == "given\n"


def test_modules_are_imported_before_the_fork(quick: str) -> None:
    code = "import sys; print('decimal' in sys.modules, 'wave' in sys.modules)"
    output = [
        subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
        for python in (quick, sys.executable)
    ]
    assert output == ["True False\n", "False False\n"]


# In short steps: of a signal that comes just before a sleep Python is told after it.
HOLD = "import os, time; print(os.getpid(), flush=True); [time.sleep(0.05) for _ in range(1200)]"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_a_fork(quick: str, sent: signal.Signals) -> None:
    """The program ends as the fork does, and the fork with the program, whose output then closes."""
    with subprocess.Popen([quick, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        fork, began = int(program.stdout.readline()), time.monotonic()
        program.send_signal(sent)
        _, output = program.communicate()
    assert program.returncode == -sent and wait_until_gone(fork) and time.monotonic() - began < 30
    assert ("KeyboardInterrupt" in output) is (sent == signal.SIGINT)


def test_a_fork_ends_with_its_parent(tmp_path: Path) -> None:
    """As when the tests were killed while it was importing; the folder of the parent's socket is still there."""
    code = f"import os, sys; sys.path.insert(0, {str(ROOT)!r}); from tests.kit import forks; "
    code += "print(forks.python('decimal'), flush=True); os._exit(0)"
    outside = {name: value for name, value in os.environ.items() if name != forks.RUN}
    program = subprocess.run([sys.executable, "-c", code], env=outside, capture_output=True, text=True).stdout.strip()
    done = subprocess.run([program, "-c", "pass"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the process that was to be forked is gone" in done.stderr
    shutil.rmtree(Path(program).parents[1])


def test_a_module_that_can_not_be_imported() -> None:
    done = subprocess.run([forks.python("no_such_module"), "-c", "pass"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "No module named 'no_such_module'" in done.stderr
