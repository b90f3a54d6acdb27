"""Which test modules `--quick` leaves out, and how tests are shared out where several processes run them.

`--quick` leaves out every module from which a model, another process or an engine can be reached by imports.

With pytest-xdist tests are shared out by files, so that no file's fixtures are made twice; files that ask the same process of
the session stay together (`SHARED`). What takes longest comes first, so that all processes end at about the same time: the
shared engine (which also notes on a new machine what vLLM's model classes are, so that later engines need not look), then
other engines, then what loads models, and what is quick at the end.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kit import forks, quicker
from tests.kit.imports import imported, reaches
from tests.kit.places import ROOT

gc.disable()  # until all tests are imported (`pytest_collection_finish`)

# Before torch is imported. On tiny models two threads wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell may have set and results depend on; tests set what they need. A proxy would stand before servers of their own.
for name in ("VLMCOMPRESS_DATA", "VLLM_PLUGINS", "OPENAI_API_KEY", "HF_TOKEN", "RAY_ADDRESS", "WORLD_SIZE", "RANK"):
    os.environ.pop(name, None)
for name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)

# Of families, modules marked `representatives` leave those that differ only in data to `--slow`. Each of these is one of
# a kind: a plain Llama-like decoder, M-RoPE, a mixture of experts with DeepStack, linear attention, norms of `1 + weight`;
# images in views of their own shape with newlines, and in tiles.
REPRESENTATIVES = {"llava", "qwen2-5-vl", "qwen3-vl-moe", "qwen3-5", "gemma3", "llava-next", "idefics3"}
FAMILIES = {file.stem.replace("_", "-") for file in (ROOT / "tests/kit/tiny").glob("[a-z]*.py")}

# Processes of a whole session: tests that ask one go to the same process, which starts it once.
SHARED = ("tests.kit.engine", "tests.kit.cluster")

# A shell without job control lets `pytest &` ignore Ctrl-C, and children inherit that, which some tests send it to. A handler
# that does nothing ignores it as well, but a process that is started gets the default action.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only modules that use no model, process or engine")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        forks.begin()
    if find_spec("transformers") and not config.getoption("--quick"):
        quicker.import_less()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Such modules are not even imported, as that alone takes most of a minute for all of them."""
    quick = config.getoption("--quick") and collection_path.match("test_*.py")
    return True if quick and reaches(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("representatives") and families(item) - REPRESENTATIVES:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (shared(item.path), not has_engine(item.path), not reaches(item.path)))


def pytest_collection_finish() -> None:
    quicker.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries complain of what they could not clear away


def families(item: pytest.Item) -> set[str]:
    """Families of models that a test is parametrized with."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [getattr(value, "family", value) for value in values]
    return {name for name in names if isinstance(name, str)} & FAMILIES


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In place of `--dist loadgroup`, which in xdist 3.8 sees no groups with pytest 9.2."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return [*SHARED, file][shared(ROOT / file)]

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="module")
def quick_engines() -> Iterator[None]:
    """Within the module engines run in processes that are forks of one that has imported them (`tests/kit/forks.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("vllm"):
            patch.setenv("VLMCOMPRESS_ENGINE_PYTHON", forks.python(*forks.VLLM))
        patch.setattr(sys, "executable", forks.python(*forks.OURS))  # the `hf` engine's
        yield


@cache
def shared(file: Path) -> int:
    """Which of `SHARED` a module asks; their number where it asks none."""
    return next((number for number, name in enumerate(SHARED) if name in imported(file)), len(SHARED))


@cache
def has_engine(file: Path) -> bool:
    """Whether a module has a test that is marked `engine`."""
    return "mark.engine" in file.read_text()
