"""What the command line shows, and where: results on stdout, everything else on stderr, bars only on a terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator


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
