"""How the command line ends when it is told to, and when nobody can be told its result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.kit.places import ROOT
from vlmcompress import cli
from vlmcompress.commands import _process as terminal

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


def test_stopped_by_a_signal(capfd, monkeypatch):
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
        (signal.SIGTERM, ["quantize", "m", "--scheme", "rtn"], 143, "stopped by SIGTERM; continue with --resume\n"),
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
def test_a_signal_that_is_ignored_stays_so(capfd, monkeypatch, number):
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


def test_standard_output_that_is_full():
    """One line and the code of other output errors, with `--json`, too, and for an error that finds no room."""
    for flags, code, line in (([], 2, FULL), (["--json"], 2, FULL), (["--nope", "--json"], 2, "takes no '--nope'")):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "vlmcompress", "list", *flags]
            done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == code and line in done.stderr and done.stderr.count("\n") == 1, done.stderr
