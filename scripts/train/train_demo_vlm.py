#!/usr/bin/env python3
"""Train one of the bundled demo VLMs from scratch and write it as a checkpoint.

    scripts/train/train_demo_vlm.py --model qwen|llava -o DIR [--minutes M] [--seed S] [--resume]

Prints one JSON line per measurement (accuracy by family on validation questions); the last line sums it up, for the card.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen", "llava"), required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=90.0, help="training time of one CPU core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--language-from", type=Path, help="--work folder of the other model: start from its language model"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for the training state (default: a folder of the system's temp)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the state in --work")
    parser.add_argument("--test", action="store_true", help="measure on the test split too, not on validation alone")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    from eval.demo.export import export
    from eval.demo.measure import load_rows, measure
    from eval.demo.stages import Plan, Trainer

    work = args.work or Path(tempfile.gettempdir()) / f"train-demo-{args.model}-{args.seed}"
    began = time.monotonic()
    trainer = Trainer(Plan(args.model, args.minutes, args.seed, args.language_from), work, args.resume)
    trainer.run()
    model = trainer.learner.model.float()
    model.load_state_dict(trainer.ema)
    export(
        args.model, model, trainer.tokenizer, args.output, "---\nlicense: apache-2.0\ntags: [vlmcompress, demo]\n---\n"
    )
    splits = ("validation", "test") if args.test else ("validation",)
    summary = {
        "model": args.model, "seed": args.seed, "steps": trainer.step, "train_minutes": round(trainer.total / 60, 1),
        "minutes": round((time.monotonic() - began) / 60, 1), "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": "bfloat16", **{split: measure(args.output, load_rows(args.model, split)) for split in splits},
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
