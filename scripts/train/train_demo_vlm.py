#!/usr/bin/env python3
"""Train one of the bundled demo VLMs from scratch and write it as a checkpoint.

    scripts/train/train_demo_vlm.py --model qwen|llava -o DIR [--minutes M] [--seed S] [--resume] [--device cpu|cuda]

Prints one JSON line per measurement (accuracy by family on validation questions); the last line sums it up.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen", "llava"), required=True)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=90.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=8, help="conversations per step")
    parser.add_argument("--shares", type=float, nargs=3, default=(0.50, 0.10, 0.40), help="time of each stage")
    parser.add_argument(
        "--rates", type=float, nargs=3, default=(1e-3, 1.5e-3, 8e-4), help="learning rate of each stage"
    )
    parser.add_argument(
        "--language-from", type=Path, help="--work folder of the other model: start from its language model"
    )
    parser.add_argument("--adamw", action="store_true", help="AdamW for the layers' matrices too, not Muon")
    parser.add_argument(
        "--work", type=Path, help="folder for the training state (default: a folder of the system's temp)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the state in --work")
    parser.add_argument("--test", action="store_true", help="measure on the test split too, not on validation alone")
    return parser.parse_args()


def main() -> None:
    args = parse()
    import torch

    torch.set_num_threads(args.threads)
    from eval.demo.card import model_card
    from eval.demo.export import export
    from eval.demo.measure import measure
    from eval.demo.stages import Plan, Trainer

    plan = Plan(
        args.model, args.minutes, args.seed, args.device, tuple(args.shares), tuple(args.rates), args.batch,
        muon=not args.adamw, donor=args.language_from,
    )  # fmt: skip
    work = args.work or Path(tempfile.gettempdir()) / f"train-demo-{args.model}-{args.seed}"
    began = time.monotonic()
    trainer = Trainer(plan, work, args.resume)
    trainer.run()
    model = trainer.learner.model.float().cpu()
    model.load_state_dict(trainer.ema)
    export(args.model, model, trainer.tokenizer, args.output, "not yet measured\n")
    measured = {
        s: measure(args.output, args.model, s) for s in ("validation", "test") if s == "validation" or args.test
    }
    summary = {
        "model": args.model, "seed": args.seed, "steps": trainer.step, "train_minutes": round(trainer.total / 60, 1),
        "minutes": round((time.monotonic() - began) / 60, 1), "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": "bfloat16", **measured,
    }  # fmt: skip
    (args.output / "README.md").write_text(model_card(args.model, summary))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
