"""Workers that run a list of jobs: this process, one job after the other, or a Ray cluster, several at once.

    with closing(workers.of("auto")) as crew:
        for index, outcome in crew.map(function, jobs):
            ...

A job is a function of one argument; with Ray both are sent to another process, possibly on another machine, so they must be
picklable, and only the result is returned.

On Ray (https://docs.ray.io) one job at a time runs on each GPU, or on each node of a cluster without GPUs. Every job is a Ray
task. If its worker or node dies, Ray runs it again, at most `RETRIES` times. Arguments and results go through Ray's object
store; no shared folder is needed, and no code is uploaded: vlmcompress must be installed on each node. Jobs get the environment
variables that affect results: `VLMCOMPRESS_*`, `OMP_*`, and the Hub libraries' offline modes if the user has set them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from logging import ERROR
from typing import Any, Protocol, TypeVar

from vlmcompress.utils import hub, messages
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.folders import WriteError

RETRIES = 3  # of a job whose worker or node was lost
PASSED_ON = ("VLMCOMPRESS_", "OMP_")  # prefixes of environment variables
OFFLINE = (hub.OFFLINE, "TRANSFORMERS_OFFLINE")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of jobs that were cancelled
    "RAY_task_oom_retries": str(RETRIES),  # Ray's default is to retry forever
}
# in Ray's errors about a task's arguments and function
NOT_LOADED = ("could not be computed", "failed to import on the worker")
PATIENCE = 10.0  # seconds: for a connection, and for a cancelled job to clean up
NUDGE = 0.5  # seconds

J = TypeVar("J")
R = TypeVar("R")


@dataclass(frozen=True)
class Failed:
    """The outcome of a failed job: the message of its `UserError`, or how its workers were lost.

    `unwritten`: it could not write a file, as on a full disk, so that the same job may succeed later.
    """

    reason: str
    unwritten: bool = False


def attempt(function: Callable[[J], R], job: J) -> R | Failed:
    """Run a job; a `UserError` becomes a `Failed`."""
    try:
        return function(job)
    except UserError as error:
        return Failed(str(error), isinstance(error, WriteError))


class Workers(Protocol):
    """Workers that run jobs; `name` is a display name, `size` the number of jobs that run at once."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Generator[tuple[int, R | Failed]]:
        """Run the jobs, and yield (index of the job, result) as they finish. Closing the generator cancels unfinished jobs.

        A job that raises `UserError`, or whose worker is lost too often, results in a `Failed`. Any other exception of a job
        is raised here.
        """
        ...

    def close(self) -> None:
        """Release the workers."""
        ...


@dataclass(frozen=True)
class InTurn:
    """This process alone, which starts a job when its result is requested."""

    name: str = "in turn"
    size: int = 1

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Generator[tuple[int, R | Failed]]:
        """Run the jobs one after the other; see `Workers`."""
        for index in range(len(jobs)):
            yield index, attempt(function, jobs[index])

    def close(self) -> None:
        """Do nothing: no other process was started."""


def of(address: str | None) -> Workers:
    """The workers at an address.

    Args:
        address: None: this process alone. For Ray: `auto` (the cluster that this machine belongs to), `HOST:PORT` of a
            cluster's head, or `local`, a cluster on this machine that ends with `close`.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """
    return InTurn() if address is None else OnRay(address)


class OnRay:
    """The workers of a cluster; `address` as in `of`."""

    def __init__(self, address: str):
        self._ray, self._leave = _connect(address)
        self._requests, self.size = shares([node["Resources"] for node in self._ray.nodes() if node["Alive"]])
        if not self.size:
            self.close()
            raise UserError(f"the Ray cluster at '{address}' has no CPU or GPU for jobs; start a node with `ray start`")

    @property
    def name(self) -> str:
        return f"ray, {self.size} worker{'s' if self.size > 1 else ''}"

    def map(self, function: Callable[[J], R], jobs: Sequence[J]) -> Generator[tuple[int, R | Failed]]:
        """Run the jobs, `size` of them at once; see `Workers`."""
        task = self._ray.remote(_done).options(max_retries=RETRIES, scheduling_strategy="SPREAD", **self._requests)
        waiting, running = iter(range(len(jobs))), {}
        try:
            while True:
                for index in waiting:
                    running[task.remote(function, jobs[index])] = index
                    if len(running) == self.size:
                        break
                if not running:
                    return
                (ready, *_), _ = self._ray.wait(list(running), num_returns=1)
                index = running.pop(ready)
                yield index, self._result(ready)
        finally:
            self._cancel(list(running))

    def _result(self, ready: Any) -> Any:
        """The result of a finished task. An exception of its function is raised here."""
        from ray import exceptions

        try:
            return self._ray.get(ready)
        except exceptions.OutOfMemoryError:
            return Failed(f"a worker of Ray ran out of memory, {RETRIES + 1} times; give each node more of it")
        except (exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.ObjectLostError) as error:
            return Failed(f"a worker of Ray was lost, {RETRIES + 1} times ({messages.error_text(error)})")
        except exceptions.RuntimeEnvSetupError as error:
            raise UserError(f"Ray can't start a job: {messages.error_text(error)}") from error
        except (exceptions.RaySystemError, RuntimeError) as error:
            said = re.findall(r"^(?:ModuleNotFound|Import|Attribute)Error: (.*)", str(error), re.MULTILINE)
            if not said or not any(sign in str(error) for sign in NOT_LOADED):
                raise
            raise UserError(
                f"a node of the Ray cluster has no vlmcompress like this one ({said[-1]}); install the same version there"
            ) from error

    def _cancel(self, open_: list[Any]) -> None:
        """Cancel tasks: they may clean up for a while, then their processes are killed."""
        if not open_ or not self._ray.is_initialized():
            return
        for force in (False, True):
            for task in open_:
                self._ray.cancel(task, force=force)
            _, open_ = self._ray.wait(open_, num_returns=len(open_), timeout=PATIENCE)
            if not open_:
                return

    def close(self) -> None:
        """Leave the cluster, and stop it if `local` started it. A cluster that the caller had joined before stays joined."""
        self._leave()


def shares(nodes: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], int]:
    """The resources of one job and the number of concurrent jobs, from the nodes' resources as Ray reports them.

    With GPUs a job takes one GPU and the smallest number of CPUs per GPU of any node. Without GPUs it takes all CPUs of the
    smallest node, and there are as many jobs as nodes. Nodes without CPUs (a head that only manages) don't count.
    """
    with_gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if with_gpus:
        cpus = min(int(node.get("CPU", 0) // int(node["GPU"])) for node in with_gpus)
        return {"num_gpus": 1, "num_cpus": cpus}, sum(int(node["GPU"]) for node in with_gpus)
    cpus_of = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
    return {"num_cpus": min(cpus_of, default=0)}, len(cpus_of)


def _connect(address: str) -> tuple[Any, Callable[[], None]]:
    """The connected package ray, and a function that disconnects.

    Raises:
        UserError: ray is not installed, or can't connect.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UserError("ray is not installed; pip install '.[ray]' in the checkout of vlmcompress") from error
    if ray.is_initialized():
        return ray, lambda: None
    if address not in ("auto", "local"):
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            raise UserError(
                f"'{address}' is not the address of a Ray cluster; write auto, local or HOST:PORT of its head"
            )
        try:  # Ray itself would wait for long
            socket.create_connection((host, int(port)), PATIENCE).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"no Ray cluster answers at {address} ({messages.error_text(error)}); is it up?") from error
    dashboard = False if address == "local" else None
    offline = OFFLINE if hub.offline() else ()  # our command line sets them by default, which does not count
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) or name in offline}
    passed: Any = {"env_vars": variables}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, runtime_env=passed, include_dashboard=dashboard, log_to_driver=False, logging_level=ERROR)
    except Exception as error:  # exactly `Exception` is raised if a node takes too long to start
        raise UserError(f"can't join the Ray cluster at '{address}': {messages.error_text(error)}") from error
    finally:
        if on_sigterm is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would silently end this process with code 15
    from ray._private import worker

    # Ray prints to standard output when a node is lost, even with `log_to_driver=False`.
    printing: Any = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *_, **__: None

    def leave() -> None:
        ray.shutdown()
        worker.print_to_stdstream = printing

    return ray, leave


def _done(function: Callable[[J], R], job: J) -> R | Failed:
    """The Ray task: run a job in a worker's process.

    Ray cancels it with `interrupt_main`, which does not interrupt a wait for a lock or queue. A signal does, so one is sent
    periodically.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, NUDGE, NUDGE)
    try:
        return attempt(function, job)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
