#!/usr/bin/env python
"""Check that stock lm-eval gives a model the same scores as we do.

    scripts/measure/compare_lm_eval.py eval/demo/demo-llava --limit 200

lm-eval's own `hf-multimodal` model and one of our engines answer the same samples of the same task files, both greedily in
the same number format, and lm-eval scores both. Prints the score of each task; the last line is JSON. Exits with 1 if a
task's scores differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from vlmcompress.engines import Settings, get
from vlmcompress.evaluation.ask import ask_suite
from vlmcompress.evaluation.tasks import LoadedSuite, load_suite, metric, quiet


def stock(model: str, suite: LoadedSuite, dtype: str, batch: int) -> tuple[dict[str, float], dict[str, str]]:
    """Run lm-eval's `hf-multimodal`; returns scores by task and answers by sample id.

    Tasks run one by one, as lm-eval takes several for text only if the first is.
    """
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import simple_evaluate

    arguments = {"pretrained": model, "dtype": dtype, "device": "cpu", "batch_size": batch}
    lm = get_model("hf-multimodal")(**arguments)
    places = {(place.task, place.index): place.id for place in suite.places}
    scores, answers = {}, {}
    for name, task in suite.tasks.items():
        with quiet():
            evaluated: Any = simple_evaluate(lm, tasks=[task], bootstrap_iters=0, apply_chat_template=True)
        scores[name] = evaluated["results"][name][f"{metric(task)},none"]
        answers |= {places[name, row["doc_id"]]: row["filtered_resps"][0].strip() for row in evaluated["samples"][name]}
        print(f"stock lm-eval: {name} {scores[name]:.4f}", file=sys.stderr, flush=True)
    return scores, answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--suite", default="world")
    parser.add_argument("--data")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="of stock lm-eval")
    args = parser.parse_args()

    suite = load_suite(args.suite, args.data, candidate=args.model, baseline=args.model, limit=args.limit)
    answered = ask_suite(args.model, suite, get(args.engine), Settings(dtype=args.dtype))
    ours = {name: answered.metrics[name][metric(task)] for name, task in suite.tasks.items()}
    theirs, answers = stock(args.model, suite, args.dtype, args.batch)
    print(f"{'task':24}{'stock':>10}{'ours':>10}")
    for name in suite.tasks:
        print(f"{name:24}{theirs[name]:10.4f}{ours[name]:10.4f}")
    result = {
        "model": args.model,
        "suite": suite.name,
        "engine": args.engine,
        "dtype": args.dtype,
        "samples": len(suite),
        "stock": theirs,
        "ours": ours,
        "equal_answers": sum(answers[sample.id] == sample.text for sample in answered.samples),
        "same": theirs == ours,
    }
    print(json.dumps(result))
    return 0 if result["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
