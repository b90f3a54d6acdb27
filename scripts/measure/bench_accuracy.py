#!/usr/bin/env python
"""Accuracy of schemes and reducers on the demo models: exact match on their test split in vLLM, paired with the BF16 original.

    scripts/measure/bench_accuracy.py                     both models, all recipes; writes eval/accuracy.json
    scripts/measure/bench_accuracy.py --recipes int8      this recipe, keeping the rows of the others
    scripts/measure/bench_accuracy.py --limit 300         fewer questions
    scripts/measure/bench_accuracy.py --render            print the table from that file

The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "accuracy.json"
MODELS = ("demo-qwen", "demo-llava")
RECIPES: dict[str, dict] = {
    "fp8": {"scheme": "fp8"},
    "int8": {"scheme": "int8"},
    "rtn g128": {"scheme": "rtn"},
    "gptq g128": {"scheme": "gptq"},
    "awq g128": {"scheme": "awq"},
    "awq g32": {"scheme": "awq", "options": {"group_size": 32}},
    "divprune 1/2": {"scheme": "none", "reduce": "divprune:1/2"},
    "divprune 1/4": {"scheme": "none", "reduce": "divprune:1/4"},
    "coverage 1/2": {"scheme": "none", "reduce": "coverage:1/2"},
    "coverage 1/4, merged": {"scheme": "none", "reduce": "coverage:1/4,merge=nearest"},
    "awq g128, divprune 1/2": {"scheme": "awq", "reduce": "divprune:1/2"},
    "int8, divprune 1/2": {"scheme": "int8", "reduce": "divprune:1/2"},
}


def measure(model: str, names: Sequence[str], limit: int | None, folder: Path) -> list[dict]:
    """Compress `model` by the named recipes and ask all checkpoints the same questions."""
    from vlmcompress import engines
    from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate_all
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve

    source, outs, manifests = ROOT / "eval" / "demo" / model, [], []
    for index, keys in enumerate(RECIPES[name] for name in names):
        outs.append(folder / f"{model}-{index}")
        recipe = resolve({"model": str(source), "out": str(outs[-1]), **keys}).recipe
        manifests.append(quantize(recipe).manifest)
    rows = []
    options = EvalOptions(engines.get_engine("vllm"), engines.get_engine("vllm"), limit=limit)
    for name, manifest, results in zip(
        names, manifests, evaluate_all(outs, source, [None], None, options), strict=True
    ):
        size, suite = manifest["size"], results.suites[0].model_dump(mode="json")
        rows.append({"model": model, "recipe": name, "ratio": size["weights_before"] / size["weights_after"]})
        rows[-1] |= {key: suite[key] for key in ("overall", "families", "agreement", "divergence")}
        print(model, name, results.suites[0].overall, file=sys.stderr, flush=True)
    return rows


def render(rows: list[dict]) -> str:
    """Render the results as a Markdown table: a row a recipe, differences to BF16 in points with their intervals."""
    cells = {(row["model"], row["recipe"]): row for row in rows}
    names = [model.removeprefix("demo-") for model in MODELS]
    heads = [f"{name}: weights | difference | KL" for name in names]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---|" + "---:|" * (3 * len(heads))]
    for recipe in RECIPES:
        parts = []
        for row in (cells[model, recipe] for model in MODELS):
            difference, low, high = (100 * row["overall"][name] for name in ("difference", "low", "high"))
            passed = " ✓" * (row["overall"]["verdict"] == "pass")
            parts.append(f"1/{row['ratio']:.2f} | {difference:+.1f} ({low:+.1f} to {high:+.1f}){passed}")
            parts.append(f"{row['divergence']['mean']:.4f}")
        lines.append(f"| {recipe} | {' | '.join(parts)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--limit", type=int, help="questions per model; default all of the test split")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MODELS, help="measure these, keep the others' rows"
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="the same of recipes")
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    args = parser.parse_args()
    if not args.render:
        with tempfile.TemporaryDirectory() as folder:
            rows = [row for model in args.models for row in measure(model, args.recipes, args.limit, Path(folder))]
        if RESULTS.exists():
            new = {(row["model"], row["recipe"]) for row in rows}
            rows += [row for row in json.loads(RESULTS.read_text()) if (row["model"], row["recipe"]) not in new]
        rows.sort(key=lambda row: (MODELS.index(row["model"]), row["recipe"]))
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps({f"{row['model']} {row['recipe']}": row["overall"]["difference"] for row in rows}))


if __name__ == "__main__":
    main()
