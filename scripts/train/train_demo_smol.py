#!/usr/bin/env python3
"""Train what demo-smol has besides the PyPI package's language model: a projector and low-rank adapters.

    scripts/train/train_demo_smol.py [--minutes M] [--threads N] [--work FOLDER]      goes on from where --work is
    scripts/train/train_demo_smol.py --finish FILE                                    writes what was learned so far

Prints one JSON line per measurement (accuracy by family on validation questions).
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=360.0, help="training time, that of earlier runs included")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="learning rate of the adapters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--work", type=Path, default=ROOT / "build/smol", help="folder of the package and the state")
    parser.add_argument("--finish", type=Path, help="write what was learned to this file; train no more")
    return parser.parse_args()


def main() -> None:
    args = parse()
    import torch

    torch.set_num_threads(args.threads)
    from eval.demo.smol import package
    from eval.demo.smol.assemble import save_trained, tokenizer_of, untrained
    from eval.demo.smol.learner import Learner
    from eval.demo.smol.training import Plan, Trainer
    from vlmcompress.errors import UserError

    try:
        package.fetch(args.work)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    language, original = package.load(args.work)
    tokenizer = tokenizer_of(original)
    learner = Learner(untrained(language, tokenizer, args.seed), tokenizer)
    trainer = Trainer(Plan(args.minutes, rate=args.rate, seed=args.seed), learner, args.work)
    if args.finish:
        save_trained(trainer.ema, args.finish)
    else:
        trainer.run()


if __name__ == "__main__":
    main()
