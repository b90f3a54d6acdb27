"""Commands that a verb names as next steps: each runs as it is printed, once the words in capitals are filled in."""

from __future__ import annotations

import shlex
from pathlib import Path


def evaluation(candidate: str | Path, baseline: str | Path, flags: str = "") -> str:
    """`vlmcompress eval` of a candidate against its baseline; with `--data FILE` unless one is a demo model with questions.

    Args:
        flags: further flags, quoted; empty, or beginning with a space.
    """
    from vlmcompress.data.sources import bundled

    data = "" if bundled(baseline, "test") or bundled(candidate, "test") else " --data FILE"
    return f"vlmcompress eval {shlex.quote(str(candidate))} --baseline {shlex.quote(str(baseline))}{flags}{data}"


def calibration(model: str | Path, used: str | Path | None, bundled_with: str | Path) -> str:
    """The flag that gives a further `quantize` of a model its data; empty where it needs none, else begins with a space.

    Args:
        used: data that the user gave this run; they are named again.
        bundled_with: the model whose bundled data this run used if none were given.
    """
    from vlmcompress.data.sources import bundled

    if used is None and bundled(model, "calibration"):
        return ""
    return f" --calib {shlex.quote(str(used or bundled(bundled_with, 'calibration') or 'DATA'))}"
