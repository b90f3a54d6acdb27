"""What the command line shows, and where: results on stdout, everything else on stderr, bars only on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from vlmcompress.errors import UserError


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Within the block everything that anybody prints, child processes and C libraries included, goes to stderr."""
    kept = sys.stdout
    kept.flush()
    descriptor = os.dup(1)
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(descriptor, 1)
        os.close(descriptor)
        sys.stdout = kept


def show(text: str) -> None:
    """Print to standard output; where that fails, nothing more is written there.

    Raises:
        BrokenPipeError: its reader left.
        UserError: it cannot be written for another reason, such as a full disk.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes what is left when it ends
        if isinstance(error, BrokenPipeError):
            raise
        reason = f"cannot write the result to standard output: {error.strerror}"
        raise UserError(f"{reason}; let it go elsewhere. Files that the run wrote are whole") from error


def quiet_libraries() -> None:
    """Silence what the libraries log, warn and draw. Variables that the user has set stay; call before importing any."""
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
    logging.disable(logging.WARNING)
