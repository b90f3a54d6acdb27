"""Progress bars: on a terminal a bar, elsewhere a line now and then, and no time left before there is a rate."""

from __future__ import annotations

import sys

from vlmcompress.utils.progress import ProgressBar


def test_progress_only_on_a_terminal(capsys, monkeypatch):
    silent = ProgressBar()
    silent("calibrating", 1, 2)
    silent.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    output = ProgressBar()
    for done in range(5):
        output("calibrating", done, 4)
    output("writing", 4, 4)
    output.close()
    text = capsys.readouterr().err
    assert "calibrating" in text and "100%" in text and "writing" in text and text.endswith("\n")


def test_a_line_every_half_minute_without_a_terminal(capsys):
    """By a clock of the test's: nothing in short runs, then a line each 30 s, whatever the work is called.

    The time left is that of the steps after the first: its 600 s are an engine's that gets ready.
    """
    now = 100.0
    progress = ProgressBar(clock=lambda: now)
    for label, done, seconds in [
        ("loading", 1, 10),
        ("loading", 2, 10),
        ("quantizing", 0, 5),
        ("quantizing", 1, 600),
        ("quantizing", 2, 10),
        ("quantizing", 3, 25),
        ("quantizing", 4, 3600),
    ]:
        now += seconds
        progress(label, done, 4)
    progress.close()
    assert capsys.readouterr().err == ("quantizing: 25%\nquantizing: 75%, 18 s left\nquantizing: 100%, in 1:10 h\n")
