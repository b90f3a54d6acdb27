#!/usr/bin/env python
"""Tokens on demand, on mixed traffic: does a client that asks for more tokens where its question needs them lose less?

    scripts/measure/mixed_traffic.py             measures, into eval/mixed.json and eval/rows/mixed.npz
    scripts/measure/mixed_traffic.py --render    prints the docs' table

One checkpoint with `REDUCER` answers questions of ten kinds, about charts, scenes, texts and pairs of images. What a kind needs
is decided on the validation split, in transformers: the smallest of `SHARES` at which, and above which, it loses at most
`ALLOWED` of its questions. Then vLLM answers the test split: on demand; with one share for all that keeps as many tokens; and
with the smallest share for all. All are paired with the original. The last line is one JSON object.
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
from pyarrow import parquet

if TYPE_CHECKING:
    from vlmcompress.evaluation.results import Results

ROOT = bench_accuracy.ROOT
REDUCER = "coverage:0.5,merge=nearest,keep_max=1"
SHARES, ALLOWED = (0.25, 0.5, 0.75), 0.012  # 1 of 90
POLICIES = ("on demand", "as many for all", "smallest for all")
MODELS = {name: ROOT / f"eval/demo/demo-{name}" for name in bench_accuracy.SKILLS}
BENCH = bench_accuracy.Bench(None, ROOT / "eval/mixed.json", MODELS, dict.fromkeys(POLICIES, {}), dtype="float32")


def ask(checkpoint: Path, source: Path, split: str, shares: dict[str, float], args: Namespace) -> Results:
    """Ask both models a split's questions, of the checkpoint with a share for each kind of question."""
    from vlmcompress import engines
    from vlmcompress.engines import EngineSettings
    from vlmcompress.evaluation.accuracy.accuracy import FIRST_TOKENS, EvalOptions, evaluate
    from vlmcompress.models.data import bundled_data

    table = parquet.read_table(bundled_data(source, split))
    data = args.work / f"{source.name}-{split}.parquet"
    parquet.write_table(table.append_column("keep", [[shares[name] for name in table["family"].to_pylist()]]), data)
    engine = engines.get_engine("vllm" if split == "test" else "hf")
    settings = EngineSettings(logprobs=FIRST_TOKENS, max_num_seqs=256 if split == "test" else 32, dtype=BENCH.dtype)
    options = EvalOptions(engine, engine, limit=args.limit, settings=settings)
    return evaluate(checkpoint, source, [None], data, options)


def losses(results: Results) -> dict[str, float]:
    """The share of its questions that each kind loses."""
    return {name: -compared.difference for name, compared in results.suites[0].families.items()}


def measure(model: str, args: Namespace) -> None:
    """Decide a share for each kind of question, ask the test split by each policy, and keep the results."""
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve

    source, out = MODELS[model], args.work / model
    recipe = {"model": str(source), "out": str(out), "scheme": "none", "reduce": REDUCER}
    quantize(resolve(recipe).recipe, overwrite=True)
    kinds = sorted(
        set(parquet.read_table(source / "../data" / model / "test.parquet", columns=["family"])["family"].to_pylist())
    )
    lost = {share: losses(ask(out, source, "validation", dict.fromkeys(kinds, share), args)) for share in SHARES}
    print(model, lost, file=sys.stderr, flush=True)
    needs = {}
    for kind in kinds:
        enough = [share for share in SHARES if all(lost[other][kind] <= ALLOWED for other in SHARES if other >= share)]
        needs[kind] = min(enough, default=1.0)
    kept = 0.0
    for policy in POLICIES:
        same = {"as many for all": round(kept, 3), "smallest for all": min(needs.values())}
        shares = needs if policy == "on demand" else dict.fromkeys(kinds, same[policy])
        results = ask(out, source, "test", shares, args)
        suite = results.suites[0].model_dump(mode="json")
        before, after = bench_accuracy.visual_tokens(source, suite, bundled(source), {s.id for s in results.samples})
        kept = kept or after / before
        arrays = bench_accuracy.questions(BENCH, results, f"{model}|{policy}|0|")
        row: dict[str, Any] = {"model": model, "recipe": policy, "seeds": 1, "visual_tokens": [before, after]}
        row |= {"shares": shares, "validation": {str(share): lost[share] for share in SHARES}}
        margins = dict.fromkeys(["overall", *kinds], suite["overall"]["margin"])
        row |= bench_accuracy.figures(BENCH, arrays, model, policy, margins)
        bench_accuracy.keep(BENCH, row, arrays)
        print(model, policy, row["overall"], file=sys.stderr, flush=True)


def bundled(source: Path) -> Path:
    """The test split."""
    from vlmcompress.models.data import bundled_data

    path = bundled_data(source, "test")
    assert path is not None
    return path


def render(rows: list[dict[str, Any]]) -> str:
    """The docs' table: tokens, points lost of all questions, and of the kind of question that lost most."""
    lines = ["| model | tokens | of all | difference | worst kind |", "|---|---|---:|---:|---|"]
    for row in rows:
        before, after = row["visual_tokens"]
        worst = min(row["families"], key=lambda name: row["families"][name]["difference"])
        cells = [row["model"], row["recipe"], f"{after / before:.0%}", bench_accuracy.points(row["overall"])]
        lines.append(f"| {' | '.join(cells)} | {worst} {bench_accuracy.points(row['families'][worst])} |")
    lines.append("")
    for row in (row for row in rows if row["recipe"] == POLICIES[0]):
        more = {kind: share for kind, share in row["shares"].items() if share > min(row["shares"].values())}
        of = ", ".join(f"{kind} {share:.0%}" for kind, share in more.items())
        lines.append(f"* **{row['model']}**: {of}; the rest {min(row['shares'].values()):.0%}")
    return "\n".join(lines)


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
