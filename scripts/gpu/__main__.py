"""One command for the day a GPU is there: what can only be seen on one is run, measured and kept.

scripts/gpu_check                    all that is left, about 40 minutes on an H200; results in eval/gpu.json
scripts/gpu_check --list             the steps: what each proves, about how long it takes, done or not
scripts/gpu_check --only kernels quantize-qwen3-vl-8b/awq
scripts/gpu_check --limit 9          start nothing that would not end within nine minutes; call again for the rest
scripts/gpu_check --again serve      run it although it is done
scripts/gpu_check --tiny --results FILE      tiny shapes, on any machine with vLLM: proves the check itself
scripts/gpu_check --render           the table of docs/measurements.md, from eval/gpu.json

A step has parts, each a process of its own of under ten minutes, and each is kept when it is done; so a killed check goes on
at the part that was killed. A part that can't run here is skipped with the reason, and tried again by the next call; one that
fails keeps its last lines (the whole log is in WORK/logs), and the others go on. Parts of another GPU are run anew.
Exit code: 1 if a part failed, 2 for bad input, 130 if interrupted, else 0.

Steps run in the checkout's .venv, which the step `setup` makes where a package index can be reached, or in the Python of
`--python`, or in the one that this is. On a machine without a network nothing is fetched: all models are random, all pictures
drawn. What a step lacks there it names. `environment` needs torch alone. `transformers-only` needs torch, transformers,
pydantic and compressed-tensors, which are small wheels besides torch, and so do the `quantize` steps. The rest need the
whole environment, vLLM included. A file of results from an earlier machine can be brought along with `--results`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu import driver, machine, record, table
from gpu.steps import STEPS, Step, names

RESULTS = machine.ROOT / "eval" / "gpu.json"


class BadInput(Exception):
    """Raised for arguments that don't go together; its text is one line."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a call."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the steps and their state")
    parser.add_argument("--render", action="store_true", help="print the docs' table")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[], help="steps, or parts as STEP/PART")
    parser.add_argument("--again", nargs="+", metavar="STEP", default=[], help="run these although they are done")
    parser.add_argument("--limit", type=float, metavar="MINUTES", help="start nothing that would end later")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU; needs --results")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: eval/gpu.json")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="models and logs, 120 GB; default: out/gpu")
    parser.add_argument("--python", metavar="PATH", help="the Python that runs the steps")
    return parser.parse_args(arguments)


def chosen(only: Sequence[str]) -> list[Step]:
    """The steps to run: all, or those that are named, with the parts that are named."""
    all_names = {step.name for step in STEPS} | set(names(STEPS))
    if unknown := [name for name in only if name not in all_names]:
        steps = ", ".join(step.name for step in STEPS)
        raise BadInput(f"there is no step '{unknown[0]}'; there are {steps}, and parts as STEP/PART (see --list)")
    if not only:
        return list(STEPS)
    selected = []
    for step in STEPS:
        parts = [part for part in step.parts if {step.name, f"{step.name}/{part.name}"} & set(only)]
        if parts:
            selected.append(Step(**{**vars(step), "parts": parts}))
    return selected


def run(args: argparse.Namespace) -> int:
    """Do what a call asks for; returns the exit code. Raises `BadInput` and `record.Broken`."""
    if args.tiny and args.results is None:
        raise BadInput("--tiny needs --results FILE, as eval/gpu.json is for full shapes")
    if args.tiny and args.results.resolve() == RESULTS:
        raise BadInput("--tiny can't write eval/gpu.json, which is for full shapes; name another --results")
    if args.limit is not None and not args.limit > 0:
        raise BadInput(f"--limit {args.limit:g} should be minutes above 0")
    results = args.results or RESULTS
    steps = chosen([*args.only, *args.again])
    kept = record.read(results)
    if args.render:
        print(table.render(kept))
        return 0
    if args.list:
        print(table.listing(steps, kept))
        return 0
    work = (args.work or machine.ROOT / "out" / ("gpu-tiny" if args.tiny else "gpu")).resolve()
    check = driver.Check(results.resolve(), work, args.tiny, args.python, args.limit, args.again)
    left = driver.run(check, steps)
    states = [record.read(results).get(name, {}).get("status") for name in names(steps)]
    counts = ", ".join(f"{states.count(status)} {status}" for status in record.STATUSES)
    print(f"{counts}, {len(left)} left{': ' + ', '.join(left) if left else ''}")
    return 1 if "failed" in states else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a call and return its exit code."""
    try:
        return run(parsed(arguments))
    except (BadInput, record.Broken, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; call again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
