#!/usr/bin/env python
"""Tokens on demand, on mixed traffic: does a client that asks for more tokens where its question needs them lose less?

    scripts/measure/mixed_traffic.py             measures, into eval/mixed.json and eval/rows/mixed.npz
    scripts/measure/mixed_traffic.py --render    prints the docs' table

One checkpoint with `REDUCER` answers questions of ten kinds, about charts, scenes, texts and pairs of images. What a kind needs
is decided on the validation split, in transformers: the smallest of `SHARES` at which, and above which, it loses at most
`ALLOWED` of its questions. Then vLLM answers the test split on demand, and with one share for all that keeps as many tokens;
both are paired with the original. What `bench_accuracy.py` measured with the smallest share stands next to them in the table.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import bench_accuracy
import numpy as np
from pyarrow import parquet

if TYPE_CHECKING:
    from vlmcompress.evaluation.results import Results

ROOT = bench_accuracy.ROOT
REDUCER = "coverage:0.5,merge=nearest,keep_max=1"
HALF = "coverage 1/2, merged"
SHARES, ALLOWED = (0.5, 0.75), 0.012  # 1 of 90
POLICIES = ("on demand", "as many, for all")
MODELS = {name: ROOT / f"eval/demo/demo-{name}" for name in bench_accuracy.SKILLS}
BENCH = bench_accuracy.Bench(None, ROOT / "eval/mixed.json", MODELS, dict.fromkeys(POLICIES, {}), dtype="float32")


def ask(checkpoint: Path, source: Path, data: Path, shares: dict[str, float], args: Namespace) -> Results:
    """Ask both models the questions of a split, the checkpoint with a share for each kind of question."""
    from vlmcompress import engines
    from vlmcompress.engines import EngineSettings
    from vlmcompress.evaluation.accuracy.accuracy import FIRST_TOKENS, EvalOptions, evaluate

    table = parquet.read_table(data)
    keep = [[shares[name] for name in table["family"].to_pylist()]]
    parquet.write_table(table.append_column("keep", keep), args.work / data.name)
    in_vllm = data.stem == "test"
    engine = engines.get_engine("vllm" if in_vllm else "hf")
    settings = EngineSettings(logprobs=FIRST_TOKENS, max_num_seqs=256 if in_vllm else 32, dtype=BENCH.dtype)
    options = EvalOptions(engine, engine, limit=args.limit, settings=settings)
    return evaluate(checkpoint, source, [None], args.work / data.name, options)


def losses(results: Results) -> dict[str, float]:
    """The share of its questions that each kind loses."""
    return {name: -compared.difference for name, compared in results.suites[0].families.items()}


def measure(model: str, args: Namespace) -> None:
    """Decide a share for each kind of question, ask the test split by each policy, and keep the results."""
    from vlmcompress.models.data import bundled_data
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve

    source, out = MODELS[model], args.work / model
    recipe = {"model": str(source), "out": str(out), "scheme": "none", "reduce": REDUCER}
    quantize(resolve(recipe).recipe, overwrite=True)
    validation, test = (bundled_data(source, split) for split in ("validation", "test"))
    assert validation is not None and test is not None
    kinds = sorted(set(parquet.read_table(test, columns=["family"])["family"].to_pylist()))
    lost = {share: losses(ask(out, source, validation, dict.fromkeys(kinds, share), args)) for share in SHARES}
    needs = {}
    for kind in kinds:
        enough = [share for share in SHARES if all(lost[other][kind] <= ALLOWED for other in SHARES if other >= share)]
        needs[kind] = min(enough, default=1.0)
    kept = 0.0
    for policy in POLICIES:
        shares = dict.fromkeys(kinds, round(kept, 3)) if kept else needs
        results = ask(out, source, test, shares, args)
        suite = results.suites[0].model_dump(mode="json")
        before, after = bench_accuracy.visual_tokens(source, suite, test, {sample.id for sample in results.samples})
        kept = kept or after / before
        arrays = bench_accuracy.questions(BENCH, results, f"{model}|{policy}|0|")
        row: dict[str, Any] = {"model": model, "recipe": policy, "seeds": 1, "visual_tokens": [before, after]}
        row |= {"shares": shares, "validation": {str(share): lost[share] for share in SHARES}}
        margins = dict.fromkeys(["overall", *kinds], suite["overall"]["margin"])
        row |= bench_accuracy.figures(BENCH, arrays, model, policy, margins)
        bench_accuracy.keep(BENCH, row, arrays)
        print(model, policy, row["overall"], file=sys.stderr, flush=True)


def render(rows: list[dict[str, Any]]) -> str:
    """The docs' table: tokens, and points lost of all questions and of the kinds that ask for more tokens. After it the shares
    that kinds ask for, and what asking wins over one share for all."""
    from vlmcompress.evaluation.accuracy.compare import compare

    half = {
        row["model"]: row for row in bench_accuracy.stored(bench_accuracy.BENCHES["world"]) if row["recipe"] == HALF
    }
    lines = ["| model | tokens | of all | difference | of kinds that ask for more |", "|---|---|---:|---:|---|"]
    won = []
    for model in sorted({row["model"] for row in rows}, key=list(MODELS).index):
        measured = [row for row in rows if row["model"] == model]
        shares, (before, _) = measured[0]["shares"], measured[0]["visual_tokens"]
        larger = {kind: share for kind, share in shares.items() if share > min(shares.values())}
        for row in [half[model] | {"recipe": "half, for all", "visual_tokens": [before, before / 2]}, *measured]:
            share = row["visual_tokens"][1] / before
            kinds = [f"{kind} {bench_accuracy.points(row['families'][kind])}" for kind in larger]
            cells = [model, row["recipe"], f"{share:.0%}", bench_accuracy.points(row["overall"]), ", ".join(kinds)]
            lines.append(f"| {' | '.join(cells)} |")
        needs = ", ".join(f"`{kind}` {share:.0%}" for kind, share in larger.items())
        with np.load(BENCH.rows) as arrays:
            ours, others = (arrays[f"{model}|{policy}|0|score"].tolist() for policy in POLICIES)
            win = compare(others, ours, arrays[f"{model}|{POLICIES[0]}|0|image"].tolist())
        points = f"{100 * win.difference:+.1f} points ({100 * win.low:+.1f} to {100 * win.high:+.1f})"
        won.append(f"* **{model}**: {needs}, the rest {min(shares.values()):.0%}. Against as many for all {points}")
    return "\n".join([*lines, "", *won])


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--limit", type=int, help="questions of each split; default: all")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args.work = Path(folder)
        for model in [] if args.render else args.models:
            measure(model, args)
    rows = json.loads(BENCH.file.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
