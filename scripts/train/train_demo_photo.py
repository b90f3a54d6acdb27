#!/usr/bin/env python3
"""Train what demo-photo has besides what packages ship: the projector and the language model.

    scripts/train/train_demo_photo.py pool [--scenes N]        scenes, and the tower's features of them (a quarter second each)
    scripts/train/train_demo_photo.py language [--minutes M]   the language model, on tokens that say what is there
    scripts/train/train_demo_photo.py projector [--steps N]    the projector, towards such tokens
    scripts/train/train_demo_photo.py joint [--minutes M]      the language model, on what tower and projector see
    scripts/train/train_demo_photo.py joint --robust           demo-photo-robust: goes on from where `joint` was at --fork
    scripts/train/train_demo_photo.py finish FILE [--robust]   writes what was learned so far

A part goes on from where it is in --work. Minutes are the processor's. Prints one JSON line per measurement on validation
questions, and adds it to WORK/journal.jsonl.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("pool", "language", "projector", "joint", "finish"))
    parser.add_argument("file", type=Path, nargs="?", help="of finish")
    parser.add_argument("--scenes", type=int, default=3000, help="training scenes in the pool")
    parser.add_argument("--steps", type=int, default=600, help="steps of projector, of 32 scenes each")
    parser.add_argument("--minutes", type=float, default=40.0, help="training time, that of earlier runs included")
    parser.add_argument(
        "--fork", type=float, default=20.0, help="minutes of joint after which a copy is kept for --robust"
    )
    parser.add_argument("--rate", type=float, help="learning rate; default: 0.002 for language, 0.001 for joint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--robust", action="store_true", help="leave out visual tokens at random")
    parser.add_argument("--processes", type=int, default=1, help="processes of language and joint, each of one thread")
    parser.add_argument("--work", type=Path, default=ROOT / "build/photo", help="folder of packages, pool and state")
    args = parser.parse_args()
    if (args.part == "finish") != (args.file is not None):
        parser.error("finish takes a file, the other parts take none")
    return args


def run(args: argparse.Namespace) -> None:
    import torch

    from eval.demo.photo import training

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.part == "pool":
        training.make_pool(args.work, args.scenes)
    elif args.part == "projector":
        training.train_projector(args.work, args.steps, args.seed, report(args.work))
    elif args.part == "finish":
        training.save_trained(args.work, args.robust, args.file)
    elif args.processes == 1:
        read(0, args, "")
    else:
        from torch.multiprocessing import spawn

        with tempfile.TemporaryDirectory() as folder:
            spawn(read, (args, f"{folder}/meeting"), args.processes)


def read(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """Train the language model, or with the projector, as one of the processes."""
    import torch
    import torch.distributed as dist

    from eval.demo.photo import training

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    if args.processes > 1:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=args.processes)
    rate = args.rate or (2e-3 if args.part == "language" else 1e-3)
    plan = training.Plan(args.part, args.minutes, rate, args.seed, args.robust, args.fork)
    training.read(args.work, plan, report(args.work))


def report(work: Path):
    """A function that prints a line of figures and keeps it in the journal."""

    def write(**figures: object) -> None:
        line = json.dumps(figures)
        print(line, flush=True)
        with (work / "journal.jsonl").open("a") as journal:
            journal.write(line + "\n")

    return write


def main() -> None:
    args = parse()
    from vlmcompress.utils.errors import UserError

    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
