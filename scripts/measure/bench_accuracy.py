#!/usr/bin/env python
"""Accuracy of schemes and reducers on the demo models: their test split, paired with the BF16 original.

    scripts/measure/bench_accuracy.py                     world in vLLM: both models; writes eval/accuracy.json
    scripts/measure/bench_accuracy.py boxes               boxes and points, in transformers, of demos that give them
    scripts/measure/bench_accuracy.py pages               labels to read, likewise
    scripts/measure/bench_accuracy.py clips               clips; reducers in vLLM, as those in transformers take no videos
    scripts/measure/bench_accuracy.py --recipes int8      this recipe, keeping the rows of the others
    scripts/measure/bench_accuracy.py --limit 300         fewer questions
    scripts/measure/bench_accuracy.py boxes --render      print the table from that file

A recipe that a model does not support is left out. `boxes` writes eval/boxes.json, and so on. The last stdout line is one JSON
object.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from vlmcompress.evaluation.accuracy.grounding import overlap
from vlmcompress.evaluation.accuracy.scoring import normalise

ROOT = Path(__file__).resolve().parents[2]
SKILLS = ("qwen", "llava")


@dataclass(frozen=True)
class Bench:
    """What is asked of which models, and where results are kept.

    Attributes:
        suite: None: the one bundled with the models. Otherwise it is asked in transformers, of the data next to the models if
            there are some.
        models: name in the table -> checkpoint.
        recipes: name in the table -> keys of a recipe.
        scores: name in the results -> family and further score of its answers, given the expected ones.
        columns: column of the table -> keys of its comparison in a result.
        served: recipes of a suite that are asked in vLLM, next to a baseline there.
    """

    suite: str | None
    file: Path
    models: dict[str, Path]
    recipes: dict[str, dict]
    scores: dict[str, tuple[str, Callable[[str, str], float | None]]] = field(default_factory=dict)
    columns: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"difference": ("overall",)})
    served: frozenset[str] = frozenset()


WORLD: dict[str, dict] = {
    "fp8": {"scheme": "fp8"},
    "int8": {"scheme": "int8"},
    "rtn g128": {"scheme": "rtn"},
    "gptq g128": {"scheme": "gptq"},
    "awq g128": {"scheme": "awq"},
    "awq g32": {"scheme": "awq", "options": {"group_size": 32}},
    "divprune 1/2": {"scheme": "none", "reduce": "divprune:1/2"},
    "awq g128, divprune 1/2": {"scheme": "awq", "reduce": "divprune:1/2"},
    "int8, divprune 1/2": {"scheme": "int8", "reduce": "divprune:1/2"},
}
SKILLED: dict[str, dict] = {name: WORLD[name] for name in ("fp8", "int8", "rtn g128", "awq g128")} | {
    "int8, tower too": {"scheme": "int8", "vision": "int8"},
    "gptq-plus g128": {"scheme": "gptq-plus"},
    "rtn g32, 3 bits": {"scheme": "rtn", "options": {"bits": 3, "group_size": 32}},
    "gptq-plus g32, 3 bits": {"scheme": "gptq-plus", "options": {"bits": 3, "group_size": 32}},
    **{
        name: {"scheme": "none", "reduce": reduce}
        for share, window in (("1/2", "1x2"), ("1/4", "2x2"))
        for name, reduce in (
            *((f"{method} {share}", f"{method}:{share}") for method in ("random", "uniform", "divprune", "coverage")),
            (f"coverage {share}, merged", f"coverage:{share},merge=nearest"),
            (f"pool {window}", f"pool:window={window}"),
            *((f"{method} {share}", f"{method}:{share}") for method in ("dymu", "visionzip", "resize")),
        )
    },
}
WATCHED: dict[str, dict] = {
    **{name: SKILLED[name] for name in ("fp8", "int8", "gptq-plus g128", "rtn g32, 3 bits")},
    **{
        f"{name}, in vLLM": {"scheme": "none", "reduce": reduce}
        for share, window in (("1/2", "1x2"), ("1/4", "2x2"))
        for name, reduce in (
            *((f"{method} {share}", f"{method}:{share}") for method in ("uniform", "divprune")),
            (f"coverage {share}, merged", f"coverage:{share},merge=nearest"),
            (f"pool {window}", f"pool:window={window}"),
            (f"evs {share}", f"evs:{share}"),
        )
    },
}


def _skilled(skill: str) -> tuple[Path, dict[str, Path], dict[str, dict]]:
    """Results, models and recipes of a bench of demos with a skill."""
    return ROOT / f"eval/{skill}.json", {name: ROOT / f"build/demo-{name}-{skill}" for name in SKILLS}, SKILLED


BENCHES = {
    "world": Bench(
        None, ROOT / "eval/accuracy.json", {name: ROOT / f"eval/demo/demo-{name}" for name in SKILLS}, WORLD
    ),
    "boxes": Bench(
        "grounding",
        *_skilled("boxes"),
        {"iou": ("box", overlap)},
        {"boxes hit": ("families", "box"), "mean IoU": ("iou",), "points hit": ("families", "point")},
    ),
    "pages": Bench(
        "pages",
        *_skilled("pages"),
        {"exact": ("page", lambda answer, expected: float(normalise(answer) == normalise(expected)))},
        {"labels right": ("exact",), "edit similarity": ("overall",)},
    ),
    "clips": Bench(
        "clips",
        *_skilled("clips")[:2],
        WATCHED,
        columns={"clips right": ("overall",), **{name: ("families", name) for name in ("moved", "times", "first")}},
        served=frozenset(name for name in WATCHED if name.endswith("in vLLM")),
    ),
}


def measure(bench: Bench, model: str, names: Sequence[str], limit: int | None, folder: Path) -> list[dict]:
    """Compress the model by the named recipes and ask all checkpoints of one engine the same questions."""
    from vlmcompress import engines
    from vlmcompress.engines import EngineSettings
    from vlmcompress.evaluation.accuracy.accuracy import FIRST_TOKENS, EvalOptions, evaluate_all
    from vlmcompress.evaluation.accuracy.compare import compare, pairs
    from vlmcompress.models.data import bundled_data
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve
    from vlmcompress.utils.errors import UserError

    source, outs = bench.models[model], {}
    for index, name in enumerate(names):
        out = folder / f"{model}-{index}"
        try:
            recipe = resolve({"model": str(source), "out": str(out), **bench.recipes[name]}).recipe
            outs[name] = out, quantize(recipe).manifest
        except UserError as error:
            print(f"{model} {name}: {error}", file=sys.stderr)
    in_vllm = not bench.suite or bench.served.issuperset(names)
    rows, engine = [], engines.get_engine("vllm" if in_vllm else "hf")
    options = EvalOptions(
        engine,
        engine,
        limit=limit,
        settings=EngineSettings(logprobs=FIRST_TOKENS, max_num_seqs=0 if in_vllm else 32),
    )
    data = bundled_data(source, "test") if bench.suite else None
    evaluated = evaluate_all([out for out, _ in outs.values()], source, [bench.suite], data, options)
    for (name, (_, manifest)), results in zip(outs.items(), evaluated, strict=True):
        size, suite = manifest["size"], results.suites[0].model_dump(mode="json")
        rows.append({"model": model, "recipe": name, "ratio": size["weights_before"] / size["weights_after"]})
        rows[-1] |= {key: suite[key] for key in ("overall", "families", "agreement", "divergence")}
        for key, (family, score) in bench.scores.items():
            samples = [sample for sample in results.samples if sample.family == family]
            sides = [
                [score(getattr(s, side), s.expected) or 0.0 for s in samples] for side in ("baseline", "candidate")
            ]
            rows[-1][key] = compare(*sides, pairs(samples)[2]).model_dump(mode="json")
        if bench.suite:
            rows[-1]["visual_tokens"] = suite["visual_tokens"] or in_clips(source, suite)
        if bench.served:
            rows[-1]["engine"] = engine.title
        print(model, name, results.suites[0].overall, file=sys.stderr, flush=True)
    return rows


def in_clips(source: Path, suite: dict) -> list[int]:
    """Visual tokens of all clips before and after a reducer, of a suite whose engine counts those of whole prompts alone."""
    from transformers import AutoProcessor

    from vlmcompress.evaluation.accuracy.clips import FRAMES, SIDE
    from vlmcompress.models import read_config, spec_for

    spec = spec_for(read_config(source))
    before = math.prod(spec.images.video(AutoProcessor.from_pretrained(source), FRAMES, SIDE, SIDE)) * suite["samples"]
    return [before, before - suite["prompt_tokens"][0] + suite["prompt_tokens"][1]]


def render(bench: Bench, rows: list[dict]) -> str:
    """Render the results as a Markdown table: a row a recipe, differences to BF16 in points with their intervals."""
    cells = {(row["model"], row["recipe"]): row for row in rows}
    names = sorted({model for model, _ in cells}, key=list(bench.models).index)
    columns = ["tokens", *bench.columns] if bench.suite else [*bench.columns, "KL"]
    heads = [f"{name}: {' | '.join(['weights', *columns])}" for name in names]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---|" + "---:|" * (len(names) * (1 + len(columns)))]
    for engine in sorted({row.get("engine", "") for row in rows if bench.suite}):
        first = [
            next(row for row in rows if (row["model"], row.get("engine", "")) == (model, engine)) for model in names
        ]
        parts = [["", "", *(f"{compared['baseline']:.1%}" for compared in compared_in(bench, row))] for row in first]
        lines.append(f"| none, 16 bits{engine and f', in {engine}'} | {' | '.join(itertools.chain(*parts))} |")
    for recipe in bench.recipes:
        parts = []
        for row in (cells.get((model, recipe)) for model in names):
            if row is None:
                parts += [""] * (1 + len(columns))
                continue
            parts.append(f"1/{row['ratio']:.2f}")
            if bench.suite:
                before, after = row["visual_tokens"]
                parts.append(f"{after / before:.0%}")
            parts += map(points, compared_in(bench, row))
            if not bench.suite:
                parts.append(f"{row['divergence']['mean']:.4f}")
        if any(parts):
            lines.append(f"| {recipe} | {' | '.join(parts)} |")
    return "\n".join(lines)


def compared_in(bench: Bench, row: dict) -> list[dict]:
    """The comparisons of a result that the table has."""
    return [functools.reduce(dict.__getitem__, keys, row) for keys in bench.columns.values()]


def points(compared: dict) -> str:
    """A comparison's difference in points, half its interval, and whether a loss of a point is ruled out."""
    difference, low, high = (100 * compared[name] for name in ("difference", "low", "high"))
    return f"{difference:+.1f} ±{(high - low) / 2:.1f}" + " ✓" * (compared["verdict"] == "pass")


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
        parts = [[name for name in names if (name in bench.served) == served] for served in (False, True)]
        rows = []
        for model, part in itertools.product(args.models, filter(None, parts)):
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(bench, model, part, args.limit, Path(folder))
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
