"""How the command line ends on signals, and when its output can't be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.kit.places import ROOT
from vlmcompress import cli
from vlmcompress.cli import _process as terminal

FULL = "error: cannot write the result to standard output: No space left on device; "


@pytest.fixture(autouse=True)
def default_actions():
    """What other tests' libraries have left: Ray handles SIGTERM by ending the process."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)


@pytest.fixture(autouse=True)
def loud(monkeypatch):
    """Keep this process's logging as it is."""
    monkeypatch.setattr(terminal, "quiet_libraries", lambda: None)


def test_signals_stop_a_run(capfd, monkeypatch):
    """SIGTERM and SIGHUP unwind as Ctrl-C does, with a line and the shell's code, and have their default action afterwards."""
    unwound = []

    def stopped(number):
        def verb(_args):
            try:
                os.kill(os.getpid(), number)
                time.sleep(60)
            finally:
                unwound.append(number)

        return verb

    calls = [
        (
            signal.SIGTERM,
            ["quantize", "m", "--scheme", "rtn"],
            143,
            "stopped by SIGTERM; the same command goes on from here\n",
        ),
        (signal.SIGHUP, ["list"], 129, "stopped by SIGHUP\n"),
        (signal.SIGHUP, ["search", "m", "-o", "x"], 129, "stopped by SIGHUP; the same command goes on from here\n"),
    ]
    for number, call, code, line in calls:
        monkeypatch.setattr(cli.VERBS.get(call[0]), "run", stopped(number))
        assert cli.main(call) == code
        assert capfd.readouterr().err == line
        assert signal.getsignal(number) == signal.SIG_DFL
    assert unwound == [number for number, *_ in calls]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(capfd, monkeypatch, number):
    """As in `nohup vlmcompress ...`, and in `vlmcompress ... &` of a script, where the shell ignores Ctrl-C."""

    def verb(_args):
        os.kill(os.getpid(), number)
        return 0, {}, "went on"

    monkeypatch.setattr(cli.VERBS.get("list"), "run", verb)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert cli.main(["list"]) == 0 and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert capfd.readouterr() == ("went on\n", "")


ENDS = {
    "full": ("list >/dev/full", 2, FULL),
    "full, as JSON": ("list --json >/dev/full", 2, FULL),
    "an error that finds no room": ("list --nope --json >/dev/full", 2, "list takes no '--nope'"),
    "no output": ("list >&-", 0, None),
    "no stream at all": ("list --nope <&- >&- 2>&-", 2, None),
    "errors that find no room": ("list --nope 2>/dev/full", 2, None),
    "the reader left": ("list | true; exit ${PIPESTATUS[0]}", 0, None),
    "the reader of errors left": ("list --nope 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}", 2, None),
    "no number": ("list", 2, "RANK is 'x', which is not a number; "),
    "a rank beyond all": ("list", 2, "RANK is 5, but WORLD_SIZE is 2; "),
    "not UTF-8": ("doctor $'a\\xff'", 2, r"'a\xff' is not UTF-8; rename"),
    "no UTF-8": ("doctor ü", 2, "the locale can't write"),
}
ENVIRONMENTS = {
    "no number": {"WORLD_SIZE": "2", "RANK": "x"},
    "a rank beyond all": {"WORLD_SIZE": "2", "RANK": "5"},
    "no UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("name", ENDS)
def test_standard_streams_and_environment(name):
    """Output that is full, closed or left, and an environment that is wrong: the exit code, and one line or none."""
    call, code, line = ENDS[name]
    environment = os.environ | ENVIRONMENTS.get(name, {}) | {"PYTHONIOENCODING": "ascii"}
    command = ["bash", "-c", f"{sys.executable} -m vlmcompress {call}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert (line in done.stderr and done.stderr.count("\n") == 1) if line else not done.stderr, done.stderr
