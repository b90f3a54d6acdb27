"""The process around a verb: redirection of output, signals that end it, and what libraries print and import."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO, cast

from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def redirect_stdout() -> Iterator[None]:
    """Redirect stdout to stderr within the context, also of child processes and C libraries."""
    original_stdout = sys.stdout
    original_stdout.flush()
    descriptor = os.dup(1)
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(descriptor, 1)
        os.close(descriptor)
        sys.stdout = original_stdout


class _Unheard:
    """Standard error that discards output once it cannot be written, so that a closed stderr does not end a run."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Open standard streams for the context where the process was started without (`2>&-`). Otherwise the next files that it
    opens would get their descriptors, and with them the output of C libraries."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    stderr, sys.stderr = sys.stderr, cast(TextIO, _Unheard(sys.stderr))
    try:
        yield
    finally:
        sys.stderr = stderr


def fitted(text: str) -> str:
    """The text for standard output: on a terminal, rows of tables that are longer than its lines continue under their last
    column. Commands stay whole, to be copied."""
    if not sys.stdout.isatty():
        return text
    columns, lines = shutil.get_terminal_size().columns, []
    for line in text.splitlines():
        gaps = [gap.end() for gap in re.finditer(r"(?<=\S) {2,}", line)]
        if len(line) <= columns or not gaps:
            lines.append(line)
            continue
        under = " " * (gaps[-1] if gaps[-1] <= columns // 2 else 4)
        lines += textwrap.wrap(line, columns, subsequent_indent=under, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def show(text: str) -> None:
    """Print to standard output, with escapes for characters that it cannot encode; after a failure its output is discarded.

    Raises:
        UserError: it cannot be written, e.g. because the disk is full. A closed pipe is ignored.
    """
    try:
        encoding = sys.stdout.encoding or "utf-8"  # of a StringIO it is None
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes what is left when it ends
        if isinstance(error, BrokenPipeError):
            return
        reason = f"cannot write the result to standard output: {error.strerror}"
        raise UserError(f"{reason}; redirect it elsewhere. The files of the run are complete") from error


def quiet_libraries() -> None:
    """Silence logs, warnings and progress bars of libraries; call it before importing them. The user's variables win."""
    for name, value in {
        "LLM_COMPRESSOR_LOG_LEVEL": "ERROR",
        "LOGURU_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    # Why torch can't use a GPU that is there, as with an old driver: what follows is computed on the CPU.
    warnings.filterwarnings("default", "CUDA initialization")
    warnings.formatwarning = lambda message, *_: f"note: {message}\n"
    logging.disable(logging.WARNING)


class Stopped(KeyboardInterrupt):
    """Raised in the main thread by one of `SIGNALS`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def stopping_signals() -> Iterator[None]:
    """Within the context, `SIGNALS` raise `Stopped`; a second signal of a kind ends the process at once.

    An ignored signal stays ignored, as under `nohup` (Python does the same for SIGINT), and one with a handler keeps it.
    Workers other than rank 0 print nothing and end at once.
    """
    main = threading.current_thread() is threading.main_thread()
    handled = [
        number for number in SIGNALS if main and distributed.is_main() and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in handled:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Stopped(number)


def import_transformers() -> None:
    """Import transformers' models in less time: without scikit-learn and scipy, which transformers imports if they are
    installed, and without Python's search for garbage, of which an import leaves none.

    The former, with pandas, take a third of a quick verb's time, and other importers still get them; the latter takes a tenth.
    """
    # transformers 5.17 imports `sklearn.metrics.roc_curve` in `generation/candidate_generator.py`, for assisted decoding, and
    # `scipy.optimize` in `loss/loss_for_object_detection.py`.
    unused = [name for name in ("sklearn", "scipy") if name not in sys.modules]
    for name in unused:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python marks a module that cannot be imported
    gc.disable()
    try:
        from transformers import AutoModelForImageTextToText  # noqa: F401
    finally:
        gc.freeze()  # modules stay, so that no later search looks at what they hold
        gc.enable()
        for name in unused:
            del sys.modules[name]
