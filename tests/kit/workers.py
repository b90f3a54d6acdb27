"""Workers of one run, as torchrun starts them. They have no accelerator: two would need two, and one is held against two."""

from __future__ import annotations

import os
import socket
import subprocess

from tests.kit import forks


def start(*arguments: str, count: int = 2) -> list[subprocess.Popen]:
    """So many workers, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared["CUDA_VISIBLE_DEVICES"] = ""
    command = [forks.python(*forks.OURS), "-m", "vlmcompress", *arguments]
    return [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def alone(*arguments: str) -> None:
    """Run one worker to its end."""
    ((code, _, err),) = ended(start(*arguments, count=1))
    assert code == 0, err


def ended(workers: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each worker."""
    output = [worker.communicate(timeout=300) for worker in workers]
    return [(worker.returncode, *text) for worker, text in zip(workers, output, strict=True)]
