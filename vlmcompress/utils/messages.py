"""Lines for the user: notes on stderr, findings of checks, and texts of errors cut to one line."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.gpu import ON_CPU
from vlmcompress.utils.text import size

# torch's allocator and mapping, C++ and the C library have no class of their own for it.
_NO_MEMORY = re.compile(
    "can(?:no|')t allocate memory|bad_alloc|can't start new thread|CUDA error: out of memory|ALLOC_FAILED",
    re.IGNORECASE,
)
_GPU_MEMORY = re.compile(
    r"Tried to allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"
)
# Missing package -> the extra that installs it.
_EXTRAS = {
    "compressed_tensors": "compress",
    "datasets": "compress",
    "pyarrow": "compress",
    "peft": "compress",
    "sklearn": "compress",
    "torchvision": "compress",
    "lm_eval": "eval",
    "aiohttp": "eval",
    "openai": "eval",
    "scipy": "eval",
    "vllm": "serve",
}
_UNUSABLE = {errno.ENAMETOOLONG: "the path is too long", errno.ELOOP: "its links lead in a circle"}


def shortened(text: str, longest: int = 2000) -> str:
    """Cut the middle out of a text of more than `longest` characters, so that an error that quotes input stays short."""
    half = longest // 2 - 20
    return text if len(text) <= longest else f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"


def error_text(error: BaseException, longest: int = 300) -> str:
    """The first line of an error's text, with further lines while a line ends in a colon; its type if it has no text.

    A text of more than `longest` characters is cut after the last sentence that fits, or else after the last word.
    """
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    count = next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count]).rstrip(":")
    if len(text) <= longest:
        return text
    whole = re.match(rf".{{1,{longest - 1}}}[.;](?=\s)", text)
    return whole[0].rstrip(";.") if whole else text[: longest - 4].rpartition(" ")[0] + " ..."


@contextlib.contextmanager
def foreign_errors(what: str, remedy: str = "", kind: type[UserError] = UserError) -> Iterator[None]:
    """Convert any exception of third-party code (a tokenizer, a processor, a template) in the context into a `UserError`.

    Args:
        what, remedy: the message before and after the reason, which is in brackets.
        kind: the class of the error.

    This includes Rust panics (of tokenizers), which are not an `Exception`; running out of memory is passed through.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        name = type(error).__name__
        if name == "OutOfMemoryError" or (not isinstance(error, Exception) and name != "PanicException"):
            raise
        if isinstance(error, ModuleNotFoundError):
            remedy = f"; {installing(error) or f'install {error.name}'}"
        raise kind(f"{what} ({error_text(error)}){remedy}") from error


def installing(error: ModuleNotFoundError) -> str | None:
    """The command that installs the extra with a missing package; None if no extra has it."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    return extra and f"pip install '.[{extra}]' in the checkout of vlmcompress"


def path_problem(error: BaseException) -> str | None:
    """The message for an error about an impossible path (too long, a loop of links, a NUL, not UTF-8) or about input that is
    nested too deeply; None for other errors.

    Such errors are raised wherever a path is first used, in pathlib or in a library, so they are recognized in this one place.
    """
    if isinstance(error, OSError) and error.errno in _UNUSABLE:
        return f"cannot use {_quoted(error.filename)}: {_UNUSABLE[error.errno]}; give another one"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from "):  # pathlib's, until Python 3.13
        return f"cannot use {_quoted(str(error).split(' from ', 1)[1])}: {_UNUSABLE[errno.ELOOP]}; give another path"
    if isinstance(error, ValueError) and str(error).startswith("embedded null "):
        return "cannot use a path with a NUL character in it; give another one"
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        text = error.object[max(0, error.start - 40) : error.end + 40].encode(errors="backslashreplace").decode()
        return f"cannot write '{text}': a name is not UTF-8; rename what it names"
    if isinstance(error, RecursionError):
        # Whoever read the file held its path.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        values = (value for frame in reversed(frames) for value in frame.f_locals.values())
        file = next((value for value in values if isinstance(value, str | Path) and os.path.isfile(value)), "a setting")
        return f"{file} is nested too deeply, or holds itself; make it flat"
    return None


def memory_problem(error: BaseException) -> str | None:
    """The message for an error that a lack of memory caused, whatever it was converted to; None for other errors."""
    if not any(
        isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError" or _NO_MEMORY.search(str(cause))
        for cause in _causes(error)
    ):
        return None
    on_gpu = (_GPU_MEMORY.search(" ".join(str(cause).split())) for cause in _causes(error))
    if full := next(filter(None, on_gpu), None):
        needed, has, free = full.groups()
        return (
            f"out of memory on the GPU: it has {has}, of which {free} are free, and needed {needed} more; use a larger one, "
            f"shorter samples (calibrate.max_length) or fewer (--samples); {ON_CPU}"
        )
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if finite := [limit for limit in limits if limit != resource.RLIM_INFINITY]:
        return (
            f"out of memory: this process is limited to {size(min(finite))}, in which its libraries and the files of the model "
            "have to fit whole; raise the limits (ulimit -v and -d) to the model's size and 4 GB more"
        )
    return "out of memory; use fewer --samples or a larger machine (see --dry-run)"


def misfit_problem(error: BaseException) -> str | None:
    """The message for an error that torchvision or torchaudio raised while it was imported, as a build for another torch
    does; None for other errors. transformers imports both where they are installed, and ends with an error of its own."""
    for cause in _causes(error):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        importing = {frame.f_globals.get("__name__") for frame in frames if frame.f_code.co_name == "<module>"}
        if package := next((name for name in ("torchvision", "torchaudio") if name in importing), None):
            break
    else:
        return None
    torch = metadata.version("torch")
    release, _, build = torch.partition("+")
    remedy = "pip uninstall torchaudio, which only sound needs"
    if package == "torchvision":
        major, minor, *patch = release.split(".")
        # pytorch.org's table: torchvision 0.15 is that of torch 2.0, and both count up together
        fitting = ".".join(["0", str(int(minor) + 15), *patch]) if major == "2" else ""
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        remedy = f"pip install --force-reinstall --no-deps torchvision{fitting and f'=={fitting}'}{index}"
    return f"{package} {metadata.version(package)} does not fit torch {torch} ({error_text(cause)}); {remedy}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from or while handling, in turn."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _quoted(name: object) -> str:
    text = str(name).strip("'")
    return f"'{text}'" if len(text) <= 200 else f"'{text[:80]}...' of {len(text):,} characters"


def note(line: str) -> None:
    """Print a note on stderr; of several workers, only rank 0 prints."""
    if distributed.is_main():
        print(f"note: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Check:
    """The result of one check of a plan or of `doctor`: its `name`, whether it is `ok`, and the reason in `detail`."""

    name: str
    ok: bool
    detail: str
