#!/usr/bin/env python
"""Choosing among an image's tokens against making the image smaller, at equal tokens, on a model that knows several sizes.

    scripts/measure/compare_resizing.py --train 30    train demo-qwen further on several sizes (minutes of a core), and ask
    scripts/measure/compare_resizing.py               ask again; what was trained and asked is kept in WORK
    scripts/measure/compare_resizing.py --render      the docs' table, from eval/resizing.json

VTC-Bench (arXiv 2510.07143) found that smaller images cost Qwen2-VL-7B less than published ways of choosing tokens. The
shipped demo-qwen never saw images at another scale, so the comparison would be unfair to `resize` there. This model is it
with `eval/demo/scales.py` on top, which writes nothing into the repository. Asked are all questions about images of the
test split, by `reduced_answers.py`: with images made smaller by the processor's limit, and with the same share of tokens
chosen by reducers, or by both in two stages. Differences are paired by question and clustered by image. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import reduced_answers
import torch
from bench_reducers import DEMO, ROOT, samples
from methods_table import about, numbered
from reduced_answers import Asker

sys.path.insert(0, str(ROOT))
from eval.demo.scales import train
from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.reduction.choice import parse
from vlmcompress.reduction.hooks import resizing
from vlmcompress.reduction.resize import Resize

RESULTS = ROOT / "eval" / "resizing.json"
LIMITS = (64, 49, 36, 25, 16)  # most tokens of an image
REDUCERS = ("random:{}", "uniform:{}", "divprune:{}", "coverage:{}", "coverage:{},merge=nearest")
TWO_STAGES = ((64, 0.5), (49, 0.5))


def ask(folder: Path, kept: Path) -> dict[str, Any]:
    """Ask about images made smaller to each of `LIMITS`, and with each reducer at the share that this leaves."""
    vlm, questions = models.load(folder), samples("demo-qwen", "test", None)
    clusters = numbered([about(sample) for sample in questions]).tolist()
    whole = Asker(vlm, reduced_answers.prepare(vlm, questions))
    before = whole.visual()
    done = json.loads(kept.read_text()) if kept.exists() else {}

    def answers(key: str, run: Any) -> list[float]:
        if key not in done:
            answered = run()
            done[key] = {"exact": answered.exact.int().tolist(), "share": float(answered.after.sum() / before.sum())}
            kept.write_text(json.dumps(done))
            print(f"{key}: {100 * sum(done[key]['exact']) / len(questions):.1f}%", file=sys.stderr, flush=True)
        return [float(right) for right in done[key]["exact"]]

    def smaller(tokens: int, chosen: str | None = None) -> Any:
        resized = resizing.resized(vlm, Resize(tokens=tokens))
        reducer = parse(chosen) if chosen else None
        return Asker(resized, reduced_answers.prepare(resized, samples("demo-qwen", "test", None))).ask(reducer)

    full = answers("full", lambda: whole.ask(None))
    rows = []
    for tokens in LIMITS:
        name = f"resize:tokens={tokens}"
        small = answers(name, lambda tokens=tokens: smaller(tokens))
        share = done[name]["share"]
        kinds = {name: small}
        for kind in REDUCERS:
            text = kind.format(round(share, 4))
            kinds[text] = answers(text, lambda text=text: whole.ask(parse(text)))
        rows += [_row(text, share, full, small, exact, clusters) for text, exact in kinds.items()]
    for tokens, keep in TWO_STAGES:
        text = f"resize:tokens={tokens} + coverage:{keep}"
        exact = answers(text, lambda tokens=tokens, keep=keep: smaller(tokens, f"coverage:{keep}"))
        share = done[text]["share"]
        other = f"coverage:{round(share, 4)}"
        alone = answers(other, lambda other=other: whole.ask(parse(other)))
        rows += [
            _row(right, share, full, exact, answered, clusters) for right, answered in ((text, exact), (other, alone))
        ]
    return {"questions": len(questions), "full": sum(full) / len(full), "rows": rows}


def _row(
    text: str, share: float, full: list[float], other: list[float], exact: list[float], clusters: list[int]
) -> dict[str, Any]:
    """A row: `less_full` and `less_other` are differences to all tokens and to the row's rival, with their interval."""
    row: dict[str, Any] = {"reduce": text, "share": round(share, 4), "exact": sum(exact) / len(exact)}
    for name, rival in (("less_full", full), ("less_other", other)):
        change = compare(rival, exact, clusters)
        row[name] = [change.difference, change.low, change.high]
    return row


def render(results: dict[str, Any]) -> str:
    """The docs' table."""
    lines = [
        "| tokens left | reducer | exact match | less all tokens | less the first row of as many tokens |",
        "|---:|---|---:|---|---|",
    ]
    shares: set[float] = set()
    for row in results["rows"]:
        change, other = (_interval(row[name]) for name in ("less_full", "less_other"))
        first = row["share"] not in shares
        shares.add(row["share"])
        name = row["reduce"].replace(f":{row['share']}", "")
        cells = [f"{100 * row['share']:.0f}%" if first else "", name, f"{100 * row['exact']:.1f}", change]
        lines.append("| " + " | ".join([*cells, "" if first else other]) + " |")
    return "\n".join(lines)


def _interval(change: list[float]) -> str:
    middle, low, high = (100 * value for value in change)
    return f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/resizing"), help="folder for what is trained and asked")
    parser.add_argument("--train", type=float, metavar="MINUTES", help="train first, unless WORK has the model")
    parser.add_argument("--render", action="store_true", help="print the docs' table of RESULTS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    if not args.render:
        args.work.mkdir(parents=True, exist_ok=True)
        folder = args.work / "demo-qwen-scales"
        if args.train and not folder.exists():
            train(DEMO / "demo-qwen", folder, args.train)
        results = ask(folder, args.work / "answers.json")
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(args.results.read_text())
    print(render(results))
    print(json.dumps({"questions": results["questions"], "full": results["full"], "rows": len(results["rows"])}))


if __name__ == "__main__":
    main()
