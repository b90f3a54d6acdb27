"""The inside of a part's process: `python -m gpu.part MODULE ARGUMENTS OUT WORK full|tiny`.

Calls the module's `run` (or FUNCTION, of MODULE:FUNCTION) and writes `{"status", "result" | "reason" | "error"}` to OUT.
Standard input is a lifeline: when it closes, the check is gone, and this process ends with all that it started.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES = 8


@dataclass(frozen=True)
class Place:
    """Where a part works. `work`: folder for models and checkpoints, kept between parts; `tiny`: with tiny shapes."""

    work: Path
    tiny: bool


class Skipped(Exception):
    """A part can't run here; the message is the reason in one line."""


class Failed(Exception):
    """A part found a problem; it holds the part's result."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


def last_lines(text: str, most: int = LINES) -> list[str]:
    """The last lines of a log that are not empty, each cut at 300 characters."""
    return [line.strip()[:300] for line in text.splitlines() if line.strip()][-most:]


def outcome(module: str, place: Place, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a part, and record any exception."""
    try:
        name, _, function = module.partition(":")
        result = getattr(importlib.import_module(name), function or "run")(place, **arguments)
        return {"status": "passed", "result": result}
    except Skipped as skipped:
        return {"status": "skipped", "reason": " ".join(str(skipped).split())[:300]}
    except Failed as failed:
        return {"status": "failed", "error": last_lines(str(failed)), "result": failed.result}
    except BaseException as error:
        traceback.print_exc()
        return {"status": "failed", "error": last_lines("".join(traceback.format_exception(error)))}


def _end_with_parent() -> None:
    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Run one part."""
    module, arguments, out, work, size = sys.argv[1:]
    _end_with_parent()
    ended = outcome(module, Place(Path(work), size == "tiny"), json.loads(arguments))
    aside = Path(f"{out}.part")
    aside.write_text(json.dumps(ended, default=str), encoding="utf-8")
    aside.replace(out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines' threads and exit handlers may hang


if __name__ == "__main__":
    from gpu.part import main as entered  # steps raise `gpu.part.Skipped`, not `__main__.Skipped`

    entered()
