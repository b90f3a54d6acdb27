#!/usr/bin/env python
"""Accuracy of schemes and reducers on the demo models: their test split in vLLM, paired with the BF16 original.

    scripts/measure/bench_accuracy.py                     world: both models, all recipes; writes eval/accuracy.json
    scripts/measure/bench_accuracy.py boxes               boxes and points of the demos with that skill; eval/boxes.json
    scripts/measure/bench_accuracy.py --recipes int8      this recipe, keeping the rows of the others
    scripts/measure/bench_accuracy.py --limit 300         fewer questions
    scripts/measure/bench_accuracy.py boxes --render      print the table from that file

The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = Path(__file__).resolve().parents[2]
SKILLS = ("qwen", "llava")


@dataclass(frozen=True)
class Bench:
    """What is asked of which models, and where results are kept.

    Attributes:
        models: name in the table -> checkpoint.
        suite: None: the one bundled with the models.
        recipes: name in the table -> keys of a recipe.
    """

    models: dict[str, Path]
    suite: str | None
    file: Path
    recipes: dict[str, dict]


WORLD: dict[str, dict] = {
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
BOXES: dict[str, dict] = {name: WORLD[name] for name in ("fp8", "int8", "rtn g128", "awq g128")} | {
    "int8, tower too": {"scheme": "int8", "vision": "int8"},
    "gptq-plus g128": {"scheme": "gptq-plus"},
    "rtn g32, 3 bits": {"scheme": "rtn", "options": {"bits": 3, "group_size": 32}},
    "gptq-plus g32, 3 bits": {"scheme": "gptq-plus", "options": {"bits": 3, "group_size": 32}},
    **{
        f"{method} {share}": {"scheme": "none", "reduce": f"{method}:{share}"}
        for share in ("1/2", "1/4")
        for method in ("uniform", "pool", "divprune", "coverage", "tome", "resize")
    },
}
BENCHES = {
    "world": Bench(
        {name: ROOT / "eval/demo" / f"demo-{name}" for name in SKILLS}, None, ROOT / "eval/accuracy.json", WORLD
    ),
    "boxes": Bench(
        {name: ROOT / "build" / f"demo-{name}-boxes" for name in SKILLS}, "grounding", ROOT / "eval/boxes.json", BOXES
    ),
}


def measure(bench: Bench, model: str, names: Sequence[str], limit: int | None, folder: Path) -> list[dict]:
    """Compress the model by the named recipes and ask all checkpoints the same questions."""
    from vlmcompress import engines
    from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate_all
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve

    source, outs, manifests = bench.models[model], [], []
    for index, keys in enumerate(bench.recipes[name] for name in names):
        outs.append(folder / f"{model}-{index}")
        recipe = resolve({"model": str(source), "out": str(outs[-1]), **keys}).recipe
        manifests.append(quantize(recipe).manifest)
    rows = []
    options = EvalOptions(engines.get_engine("vllm"), engines.get_engine("vllm"), limit=limit)
    for name, manifest, results in zip(
        names, manifests, evaluate_all(outs, source, [bench.suite], None, options), strict=True
    ):
        size, suite = manifest["size"], results.suites[0].model_dump(mode="json")
        rows.append({"model": model, "recipe": name, "ratio": size["weights_before"] / size["weights_after"]})
        rows[-1] |= {key: suite[key] for key in ("overall", "families", "agreement", "divergence")}
        print(model, name, results.suites[0].overall, file=sys.stderr, flush=True)
    return rows


def render(bench: Bench, rows: list[dict]) -> str:
    """Render the results as a Markdown table: a row a recipe, differences to BF16 in points with their intervals."""
    cells = {(row["model"], row["recipe"]): row for row in rows}
    names = sorted({model for model, _ in cells}, key=list(bench.models).index)
    heads = [f"{name}: weights | difference | KL" for name in names]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---|" + "---:|" * (3 * len(heads))]
    for recipe in bench.recipes:
        parts = []
        for row in (cells[model, recipe] for model in names):
            difference, low, high = (100 * row["overall"][name] for name in ("difference", "low", "high"))
            passed = " ✓" * (row["overall"]["verdict"] == "pass")
            parts.append(f"1/{row['ratio']:.2f} | {difference:+.1f} ({low:+.1f} to {high:+.1f}){passed}")
            parts.append(f"{row['divergence']['mean']:.4f}")
        lines.append(f"| {recipe} | {' | '.join(parts)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("bench", nargs="?", choices=BENCHES, default="world")
    parser.add_argument("--limit", type=int, help="questions per model; default all of the test split")
    parser.add_argument("--models", nargs="+", choices=SKILLS, default=SKILLS, help="keep the others' rows")
    parser.add_argument("--recipes", nargs="+", help="the same of recipes; default: all")
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    args = parser.parse_args()
    bench = BENCHES[args.bench]
    if absent := set(args.recipes or ()) - set(bench.recipes):
        parser.error(f"no recipe is called {', '.join(absent)}; there are {', '.join(bench.recipes)}")
    if not args.render:
        names = args.recipes or list(bench.recipes)
        with tempfile.TemporaryDirectory() as folder:
            rows = [row for model in args.models for row in measure(bench, model, names, args.limit, Path(folder))]
        if bench.file.exists():
            new = {(row["model"], row["recipe"]) for row in rows}
            rows += [row for row in json.loads(bench.file.read_text()) if (row["model"], row["recipe"]) not in new]
        rows.sort(key=lambda row: (list(bench.models).index(row["model"]), row["recipe"]))
        bench.file.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(bench.file.read_text())
    print(render(bench, rows))
    print(json.dumps({f"{row['model']} {row['recipe']}": row["overall"]["difference"] for row in rows}))


if __name__ == "__main__":
    main()
