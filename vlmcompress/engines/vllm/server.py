"""The engine's side of `serve`: becomes `vllm serve` with the arguments it was given.

Run by path, `python server.py MODEL FLAGS...`, in whatever environment has vLLM. The one thing it adds is
`--enforce-eager` on a CPU, where compiling the model takes minutes: only the engine's environment knows what it runs on.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    from vllm.entrypoints.cli.main import main as cli
    from vllm.platforms import current_platform

    flags = sys.argv[1:]
    chosen = {"--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc"}
    if current_platform.is_cpu() and not chosen & {flag.split("=")[0] for flag in flags}:
        flags.append("--enforce-eager")
    sys.argv = ["vllm", "serve", *flags]
    cli()


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # our module names are ours alone
    main()
