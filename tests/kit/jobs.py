"""Jobs for crews. Workers of Ray import this module."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path

from vlmcompress.utils.errors import UserError


def square(number: int) -> int:
    if number < 0:
        raise UserError(f"{number} is negative; give a natural number")
    return number**2


def inverse(number: int) -> float:
    return 1 / number


def setting(name: str) -> str | None:
    return os.environ.get(name)


def die(number: int) -> int:
    """Odd ones never get to an end."""
    if number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def wait_for_go(job: tuple[str, int]) -> tuple[int, str]:
    """Note in FOLDER/NUMBER on which node it runs, and wait for a file that has the node's name."""
    folder, number = Path(job[0]), job[1]
    with (folder / str(number)).open("a") as file:
        file.write(f"{node()}\n")
    while not (folder / node()).exists():
        time.sleep(0.05)
    return number, node()


def linger(job: tuple[str, int]) -> int:
    """Number 0 ends when number 1 has begun, which waits for a minute, and notes when it is stopped."""
    folder, number = Path(job[0]), job[1]
    if number:
        (folder / "begun").touch()
        try:
            queue.Queue().get(timeout=60)
        finally:
            (folder / "stopped").touch()
    while not (folder / "begun").exists():
        time.sleep(0.05)
    return number
