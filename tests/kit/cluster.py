"""A Ray cluster of two nodes on this machine, each with one CPU, for the whole test session: it takes 10 s to start."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kit.places import ROOT

STORE = 80 << 20  # bytes of each node's objects; Ray wants 75 MiB
# Ray starts workers with a niceness of 15: they would wait for the other process of the tests.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
}


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node, once more where the machine is so busy that it takes the 30 s after which Ray gives it up."""
    try:
        return start()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        return start()


class Nodes:
    """The cluster. `address` is what `--ray` takes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a longer name would be too long for sockets
        (self._folder / "ray").mkdir()
        atexit.register(self._close)
        with self._environment():
            only = {"include_dashboard": False, "include_log_monitor": False, "temp_dir": str(self._folder)}
            self._cluster = Cluster()
            patiently(lambda: self._cluster.add_node(**only, num_cpus=1, object_store_memory=STORE))
            self._other: Any = None
            self.complete()
        self.address: str = self._cluster.address

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """What `Cluster` reads of the environment.

        It notes its address in `$RAY_TMPDIR/ray`, whatever `temp_dir` says: else in /tmp/ray, which another run may use or
        which does not exist.
        """
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (SETTINGS | {"RAY_TMPDIR": str(self._folder)}).items():
                patch.setenv(name, value)
            yield

    def complete(self) -> None:
        """Start a second node where there is none."""
        if self._other is None:
            with self._environment():
                self._other = patiently(lambda: self._cluster.add_node(num_cpus=1, object_store_memory=STORE))

    def kill(self) -> str:
        """End the second node's raylet by SIGKILL; the node's id."""
        node = self._other.node_id
        os.kill(self._other.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self._cluster.remove_node(self._other, allow_graceful=False)
        self._other = None
        return node

    def _close(self) -> None:
        with self._environment():
            self._cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


@cache
def two_nodes() -> Nodes:
    """The cluster of this process's tests. Skips the test where Ray is not installed."""
    pytest.importorskip("ray")
    return Nodes()
