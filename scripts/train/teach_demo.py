#!/usr/bin/env python3
"""Teach a demo model to describe scenes, to give boxes, to read labels or to watch clips, or put one together.

scripts/train/teach_demo.py train SKILL qwen|llava|smol [--minutes M]   goes on from where it is in --work
scripts/train/teach_demo.py finish SKILL qwen|llava|smol FILE           writes what was learned so far
scripts/train/teach_demo.py assemble SKILL qwen|llava|smol [-o DIR]     the checkpoint, build/demo-NAME-SKILL

SKILL is describe, boxes, pages or clips; clips are watched by qwen alone.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "finish", "assemble"))
    parser.add_argument("skill", choices=("describe", "boxes", "pages", "clips"))
    parser.add_argument("model", choices=("qwen", "llava", "smol"))
    parser.add_argument("file", type=Path, nargs="?", help="of finish")
    parser.add_argument("-o", "--output", type=Path, help="folder of the checkpoint; default: build/demo-MODEL-SKILL")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time, that of earlier runs included")
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--batch", type=int, default=8, help="answers per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="begin with this file, what was learned of another skill")
    parser.add_argument("--work", type=Path, default=ROOT / "build/skills", help="folder of the state")
    args = parser.parse_args()
    if (args.part == "finish") != (args.file is not None):
        parser.error("finish takes a file, train and assemble take none")
    return args


def main() -> None:
    args = parse()
    import torch

    from eval.demo.skills import assemble
    from vlmcompress.utils.errors import UserError

    state = args.work / f"{args.skill}-{args.model}.pt"
    try:
        if args.part == "train":
            from eval.demo.skills.training import Plan, Teaching

            torch.set_num_threads(1)
            args.work.mkdir(parents=True, exist_ok=True)
            variant = "qwen" if args.model == "qwen" else "llava"
            settings = {name: getattr(args, name) for name in ("minutes", "rate", "batch", "seed", "start")}
            Teaching(Plan(args.skill, assemble.base(args.model), variant, **settings), state).run()
        elif args.part == "finish":
            assemble.finish(state, args.file)
        else:
            folder = args.output or ROOT / f"build/demo-{args.model}-{args.skill}"
            assemble.assemble(args.skill, args.model, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
