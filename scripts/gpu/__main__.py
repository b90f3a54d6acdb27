"""One command for a machine with a GPU: run, measure and record what only a GPU can show.

scripts/gpu_check                    all that is left, about 50 minutes on an H100; results in eval/gpu.json
scripts/gpu_check --list             the steps: what each proves, about how long it takes, done or not
scripts/gpu_check --only quantize layers/qwen3-vl-8b
scripts/gpu_check --limit 9          start nothing that would not end within nine minutes; call again for the rest
scripts/gpu_check --again serve      run it although it is done
scripts/gpu_check --tiny --results FILE      tiny shapes, on any machine: proves the check itself
scripts/gpu_check --render           the tables of docs/results.md, from eval/gpu.json

A bare machine, with a GPU, torch and transformers, without vLLM and without a network, takes two commands. The second ends
within eight minutes; called again, or with `--limit 30`, it goes on with whole models, which need 50 GB of disk:

scripts/gpu_check --fetch wheels --for 3.12          where there is a package index: for Python 3.12, 6 MB
scripts/gpu_check --tier bare --wheels wheels        there, in the checkout with that folder

A step has parts, each a process of its own of under ten minutes, and each is kept when it is done; so a killed check goes on
at the part that was killed. A part that can't run here is skipped with the reason, and tried again by the next call; one that
fails keeps its last lines (the whole log is in WORK/logs), and the others go on. Parts of another GPU are run anew.
Exit code: 1 if a part failed, 2 for bad input, 130 if interrupted, else 0.

Parts run in the checkout's .venv, which the step `setup` makes where a package index can be reached, or in the Python of
`--python`, or in the one that this is. All models are random and all pictures drawn, so nothing else is fetched. The tier
`bare` needs what a bare machine has and the wheels; the tier `engine` the whole environment, vLLM included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu import driver, machine, record, table, wheels
from gpu.steps import BARE_LIMIT, STEPS, Step, names, of_tier

RESULTS = machine.ROOT / "eval" / "gpu.json"
_TAG = "import sys; print('cp%d%d' % sys.version_info[:2])"


class BadInput(Exception):
    """Conflicting arguments; the message is one line."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a call."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the steps and their state")
    parser.add_argument("--render", action="store_true", help="print the docs' table")
    parser.add_argument("--tier", choices=("bare", "engine"), help="only the parts of this tier")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[], help="steps, or parts as STEP/PART")
    parser.add_argument("--again", nargs="+", metavar="STEP", default=[], help="run these although they are done")
    parser.add_argument("--limit", type=float, metavar="MINUTES", help="start nothing that would end later (bare: 8)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU; needs --results")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: eval/gpu.json")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="models and logs, at most 50 GB; default: out/gpu")
    parser.add_argument("--python", metavar="PATH", help="the Python that runs the steps")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="packages that --fetch has brought here")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download these packages into a folder, and end")
    parser.add_argument("--for", dest="machine", metavar="PYTHON", help="with --fetch: as 3.12 or 3.12-aarch64")
    return parser.parse_args(arguments)


def chosen(only: Sequence[str], tier: str | None = None) -> list[Step]:
    """The steps to run: all, or the named steps and parts; only those of a tier, if one is given."""
    all_names = {step.name for step in STEPS} | set(names(STEPS))
    if unknown := [name for name in only if name not in all_names]:
        there = ", ".join(step.name for step in STEPS)
        raise BadInput(f"there is no step '{unknown[0]}'; there are {there}, and parts as STEP/PART (see --list)")
    steps = of_tier(tier) if tier else list(STEPS)
    if not only:
        return steps
    selected = []
    for step in steps:
        parts = [part for part in step.parts if {step.name, f"{step.name}/{part.name}"} & set(only)]
        if parts:
            selected.append(replace(step, parts=parts))
    return selected


def run(args: argparse.Namespace) -> int:
    """Run a call and return its exit code. Raises `BadInput`, `record.Broken` and `wheels.Unfit`."""
    if (args.fetch is None) != (args.machine is None):
        raise BadInput("--fetch FOLDER and --for PYTHON go together, as in --fetch wheels --for 3.12")
    if args.fetch:
        files = wheels.fetch(args.fetch, args.machine)
        print(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB, in {args.fetch}")
        return 0
    if args.tiny and args.results is None:
        raise BadInput("--tiny needs --results FILE, as eval/gpu.json is for full shapes")
    if args.tiny and args.results.resolve() == RESULTS:
        raise BadInput("--tiny can't write eval/gpu.json, which is for full shapes; name another --results")
    if args.limit is not None and not args.limit > 0:
        raise BadInput(f"--limit {args.limit:g} should be minutes above 0")
    results = args.results or RESULTS
    steps = chosen([*args.only, *args.again], args.tier)
    kept = record.read(results)
    if args.render:
        print(table.render(kept))
        return 0
    if args.list:
        print(table.listing(steps, kept))
        return 0
    work = (args.work or machine.ROOT / "out" / ("gpu-tiny" if args.tiny else "gpu")).resolve()
    site = laid_out(args.wheels, work, args.python) if args.wheels else None
    limit = args.limit or (BARE_LIMIT if args.tier == "bare" and not args.tiny else None)
    check = driver.Check(results.resolve(), work, args.tiny, args.python, limit, args.again, site)
    left = driver.run(check, steps)
    states = [record.read(results).get(name, {}).get("status") for name in names(steps)]
    counts = ", ".join(f"{states.count(status)} {status}" for status in record.STATUSES)
    print(f"{counts}, {len(left)} left{': ' + ', '.join(left) if left else ''}")
    return 1 if "failed" in states else 0


def laid_out(folder: Path, work: Path, interpreter: str | None) -> Path:
    """The folder of the packages of some wheels, for the Python that runs the steps."""
    tag = subprocess.run([machine.python(interpreter), "-c", _TAG], capture_output=True, text=True, check=True)
    wheels.unpack(folder, work / "site", tag.stdout.strip())
    return work / "site"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a call and return its exit code."""
    try:
        return run(parsed(arguments))
    except (BadInput, record.Broken, wheels.Unfit, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; call again to go on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
