"""The process of `forks.py` that is forked: `python -m tests.kit.forks_parent SOCKET PROCESS MODULE...`.

It imports the modules, then makes for each caller a keeper, and that one the fork that does the caller's work. The keeper
tells the caller how the fork ended, and ends it when the caller is gone. It ends itself when PROCESS does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

from tests.kit import pretended_cuda, quicker


def main() -> None:
    address, lifeline, *modules = sys.argv[1:]
    began = os.pidfd_open(int(lifeline))
    if any("." in name for name in modules):  # of a library
        quicker.import_less()
    for name in modules:
        importlib.import_module(name)
    if pretended_cuda.SWITCH in os.environ:
        pretended_cuda.install()
    quicker.freeze(engines=True)
    # vLLM 0.32 sets `spawn` on a CPU, whose engine would import vLLM anew; torch has one thread here, so that a fork is safe.
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")
    # An engine that inherited its server's asyncio loop would report its own SIGTERM to that loop as the server's second one.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    sys.executable = str(Path(address).with_name("python"))  # processes of the forks are forks, too
    link = caller(address, began)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, streams = received(link)
    if child := os.fork():
        for stream in streams:
            os.close(stream)
        keep(child, link)
    link.close()
    work(order, streams)


def caller(address: str, began: int) -> socket.socket:
    """The link to a caller, in a fork of this process for each."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(f"{address}.new")
    door.listen(16)
    os.rename(f"{address}.new", address)
    while True:
        ready, _, _ = select.select([door, began], [], [])
        if began in ready:
            os._exit(0)
        link, _ = door.accept()
        if not os.fork():
            door.close()
            return link
        link.close()


def received(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What a caller wants, and its three streams."""
    size, streams, _, _ = socket.recv_fds(link, 8, 3)
    body, length = b"", int.from_bytes(size, "big")
    while len(body) < length:
        body += link.recv(length - len(body))
    return json.loads(body), streams


def keep(child: int, link: socket.socket) -> None:
    """Wait for the child, and end it with its group when the caller is gone; never return."""
    link.sendall(f"{child}\n".encode())
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, link], [], [])
    if ended not in ready:
        with contextlib.suppress(ProcessLookupError):  # it leads no group yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        link.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    finally:
        os._exit(0)


def work(order: dict[str, Any], streams: list[int]) -> None:
    """Do as `python ARGUMENTS` does in the caller's place."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["folder"])
    for number in order["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.nice(order["nice"] - os.getpriority(os.PRIO_PROCESS, 0))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in before]
    form, *rest = order["arguments"]
    if form == "-m":
        sys.argv, sys.path[:1] = rest, [os.getcwd(), *paths]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif form == "-c":
        sys.argv, sys.path[:1] = ["-c", *rest[1:]], ["", *paths]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv, sys.path[:1] = [form, *rest], [str(Path(form).resolve().parent), *paths]
        runpy.run_path(form, run_name="__main__")


if __name__ == "__main__":
    main()
