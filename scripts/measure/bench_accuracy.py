#!/usr/bin/env python
"""Accuracy of schemes and reducers on the demo models in vLLM: their test split, paired with the BF16 original. What vLLM's CPU
build has no kernel for gets its weights in 16 bits (3 bits, `w8a16`) or is measured in transformers (`fp8-static`).

    scripts/measure/bench_accuracy.py                     world: both models; writes eval/accuracy.json
    scripts/measure/bench_accuracy.py boxes               boxes and points, of demos that give them
    scripts/measure/bench_accuracy.py pages               labels to read
    scripts/measure/bench_accuracy.py clips               clips
    scripts/measure/bench_accuracy.py photo               scenes of pictures and of photographs, of demo-photo
    scripts/measure/bench_accuracy.py --recipes int8      this recipe, keeping the rows of the others
    scripts/measure/bench_accuracy.py --limit 300         fewer questions
    scripts/measure/bench_accuracy.py boxes --render      print the table from that file

A recipe that a model does not support is left out. A recipe of `Bench.repeated` is calibrated three times, with images drawn by
three seeds: a question's score is the mean of the three. `boxes` writes eval/boxes.json, and so on, and what was measured of
each question into eval/rows/boxes.npz, which `recount.py` reads. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyarrow import parquet

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from vlmcompress.evaluation.accuracy.grounding import overlap
from vlmcompress.evaluation.accuracy.scoring import normalise

if TYPE_CHECKING:
    from vlmcompress.evaluation.results import Results

ROOT = Path(__file__).resolve().parents[2]
SKILLS = ("qwen", "llava")
PICTURES = ("photo", "photographs")
SEEDS = 3  # calibrations of a repeated recipe
Arrays = dict[str, np.ndarray]  # "model|recipe|seed|name" -> a value a question


@dataclass(frozen=True)
class Bench:
    """What is asked of which models, and where results are kept.

    Attributes:
        suite: None: the one bundled with the models. Otherwise it is asked of the data next to the models if there are some.
        models: name in the table -> checkpoint.
        recipes: name in the table -> keys of a recipe.
        scores: name in the results -> family and further score of its answers, given the expected ones.
        columns: column of the table -> keys of its comparison in a result.
        repeated: recipes that are calibrated with several seeds.
        data: name in the table -> file of questions, where these are not those of the suite.
        dtype: of the engines; CPUs without BF16 instructions take several times as long for BF16 as for float32.
    """

    suite: str | None
    file: Path
    models: dict[str, Path]
    recipes: dict[str, dict]
    scores: dict[str, tuple[str, Callable[[str, str], float | None]]] = field(default_factory=dict)
    columns: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"difference": ("overall",)})
    repeated: frozenset[str] = frozenset()
    data: dict[str, Path] = field(default_factory=dict)
    dtype: str = "auto"

    @property
    def rows(self) -> Path:
        """The file with what was measured of each question."""
        return ROOT / "eval" / "rows" / f"{self.file.stem}.npz"


PLUS = {"scheme": "gptq-plus"}
HALVED = {"coverage 1/2, merged": "coverage:1/2,merge=nearest", "pool 1x2": "pool:window=1x2"}
PLUS_HALVED = {f"gptq-plus g128, {name}": PLUS | {"reduce": reduce} for name, reduce in HALVED.items()}
WORLD: dict[str, dict] = {
    "fp8": {"scheme": "fp8"},
    "int8": {"scheme": "int8"},
    "int8, tower too": {"scheme": "int8", "vision": "int8"},
    "rtn g128": {"scheme": "rtn"},
    "gptq g128": {"scheme": "gptq"},
    "awq g128": {"scheme": "awq"},
    "gptq-plus g128": PLUS,
    "gptq-plus g128, symmetric": PLUS | {"options": {"symmetric": True}},
    "gptq-plus g32": PLUS | {"options": {"group_size": 32}},
    "fp8-static": {"scheme": "fp8-static"},
    "w8a16": {"scheme": "w8a16"},
    "gptq-plus g32, 3 bits": PLUS | {"options": {"bits": 3, "group_size": 32}},
    "gptq-plus g32, 3 bits, rotated": PLUS | {"options": {"bits": 3, "group_size": 32}, "rotate": "hadamard"},
    **{
        name: {"scheme": "none", "reduce": reduce}
        for name, reduce in (
            *((f"{method} 1/2", f"{method}:1/2") for method in ("random", "divprune")),
            *HALVED.items(),
            ("pixelprune 0.1", "pixelprune:threshold=0.1"),
        )
    },
    "fp8, coverage 1/2, merged": {"scheme": "fp8", "reduce": HALVED["coverage 1/2, merged"]},
    **PLUS_HALVED,
}
SKILLED: dict[str, dict] = {
    **{name: WORLD[name] for name in ("fp8", "int8", "rtn g128", "awq g128", "int8, tower too", "gptq-plus g128")},
    "rtn g32, 3 bits": {"scheme": "rtn", "options": {"bits": 3, "group_size": 32}},
    **{name: WORLD[name] for name in ("w8a16", "gptq-plus g32, 3 bits", "gptq-plus g32, 3 bits, rotated")},
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
    "pixelprune 0.1": WORLD["pixelprune 0.1"],
    **{f"{method} 4/5": {"scheme": "none", "reduce": f"{method}:0.8"} for method in ("random", "uniform", "coverage")},
    **PLUS_HALVED,
}
WATCHED: dict[str, dict] = {
    **{name: SKILLED[name] for name in ("fp8", "int8", "gptq-plus g128", "rtn g32, 3 bits")},
    **{
        name: {"scheme": "none", "reduce": reduce}
        for share, window in (("1/2", "1x2"), ("1/4", "2x2"))
        for name, reduce in (
            *((f"{method} {share}", f"{method}:{share}") for method in ("uniform", "divprune")),
            (f"coverage {share}, merged", f"coverage:{share},merge=nearest"),
            (f"pool {window}", f"pool:window={window}"),
            (f"evs {share}", f"evs:{share}"),
            (f"evs {share}, merged", f"evs:{share},merge=nearest"),
        )
    },
    "gptq-plus g128, evs 1/2": PLUS | {"reduce": "evs:1/2"},
}
REPEATED = frozenset(
    {
        "gptq-plus g128",
        "gptq-plus g128, coverage 1/2, merged",
        "gptq-plus g32, 3 bits",
        "gptq-plus g32, 3 bits, rotated",
    }
)


def _skilled(skill: str) -> tuple[Path, dict[str, Path], dict[str, dict]]:
    """Results, models and recipes of a bench of demos with a skill."""
    return ROOT / f"eval/{skill}.json", {name: ROOT / f"build/demo-{name}-{skill}" for name in SKILLS}, SKILLED


BENCHES = {
    "world": Bench(
        None,
        ROOT / "eval/accuracy.json",
        {name: ROOT / f"eval/demo/demo-{name}" for name in SKILLS},
        WORLD,
        repeated=REPEATED,
    ),
    "boxes": Bench(
        "grounding",
        *_skilled("boxes"),
        {"iou": ("box", overlap)},
        {"boxes hit": ("families", "box"), "mean IoU": ("iou",), "points hit": ("families", "point")},
        repeated=REPEATED,
    ),
    "pages": Bench(
        "pages",
        *_skilled("pages"),
        {"exact": ("page", lambda answer, expected: float(normalise(answer) == normalise(expected)))},
        {"labels right": ("exact",), "edit similarity": ("overall",)},
        repeated=REPEATED,
    ),
    "photo": Bench(
        None,
        ROOT / "eval/photo.json",
        dict.fromkeys(PICTURES, ROOT / "build/demo-photo"),
        {name: WORLD[name] for name in ("int8", "gptq-plus g128", "random 1/2", *HALVED, *PLUS_HALVED)},
        repeated=REPEATED,
        data={name: ROOT / f"build/data/{name}/test.parquet" for name in PICTURES},
        dtype="float32",
    ),
    "clips": Bench(
        "clips",
        *_skilled("clips")[:2],
        WATCHED,
        columns={"clips right": ("overall",), **{name: ("families", name) for name in ("moved", "times", "first")}},
        repeated=REPEATED,
    ),
}


def dequantized(recipe: str) -> bool:
    """Whether vLLM gets a recipe's weights in 16 bits, as it has no kernel for them: the values that it would multiply with."""
    return "3 bits" in recipe or recipe == "w8a16"


def in_transformers(recipe: str) -> bool:
    """Whether a recipe, whose activations are rounded by scales that vLLM's CPU build does not read, is measured there."""
    return recipe == "fp8-static"


def measure(bench: Bench, model: str, names: Sequence[str], limit: int | None, folder: Path) -> None:
    """Compress the model by the named recipes, ask all checkpoints of one engine the same questions, and keep the results."""
    from vlmcompress import engines
    from vlmcompress.engines import EngineSettings
    from vlmcompress.evaluation.accuracy.accuracy import FIRST_TOKENS, EvalOptions, evaluate_all
    from vlmcompress.export.convert import convert
    from vlmcompress.models.data import bundled_data
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve
    from vlmcompress.utils.errors import UserError

    source = bench.models[model]
    outs: list[tuple[str, Path, float]] = []  # recipe, checkpoint, how many times smaller its weights are
    for name in names:
        for seed in range(SEEDS if name in bench.repeated else 1):
            out = folder / re.sub(r"\W+", "-", f"{bench.file.stem} {model} {name} {seed}")
            try:
                recipe = resolve({"model": str(source), "out": str(out), "seed": seed, **bench.recipes[name]}).recipe
                manifest = out / "vlmcompress.json"
                size = (json.loads(manifest.read_text()) if manifest.exists() else quantize(recipe).manifest)["size"]
            except UserError as error:
                print(f"{model} {name}: {error}", file=sys.stderr)
                break
            if dequantized(name) and not (plain := out.with_name(f"{out.name}-bf16")).exists():
                convert(out, plain, "bf16")
            outs.append((name, plain if dequantized(name) else out, size["weights_before"] / size["weights_after"]))
    in_vllm = not any(map(in_transformers, names))
    engine = engines.get_engine("vllm" if in_vllm else "hf")
    settings = EngineSettings(logprobs=FIRST_TOKENS, max_num_seqs=256 if in_vllm else 32, dtype=bench.dtype)
    options = EvalOptions(engine, engine, limit=limit, settings=settings)
    data = bench.data.get(model) or (bundled_data(source, "test") if bench.suite else None)
    evaluated = evaluate_all([out for _, out, _ in outs], source, [bench.suite], data, options)
    for name, pairs in itertools.groupby(zip(outs, evaluated, strict=True), key=lambda pair: pair[0][0]):
        by_seed = list(pairs)
        arrays: Arrays = {}
        for seed, (_, results) in enumerate(by_seed):
            arrays |= questions(bench, results, f"{model}|{name}|{seed}|")
        suite = by_seed[0][1].suites[0].model_dump(mode="json")
        row = {"model": model, "recipe": name, "ratio": by_seed[0][0][2], "seeds": len(by_seed)}
        if bench.suite:
            ids = {sample.id for sample in by_seed[0][1].samples}
            row["visual_tokens"] = suite["visual_tokens"] or visual_tokens(source, suite, data, ids)
        if not in_vllm:
            row["engine"] = "transformers"
        margins = {"overall": suite["overall"]["margin"]}
        margins |= {family: compared["margin"] for family, compared in suite["families"].items()}
        row |= figures(bench, arrays, model, name, margins)
        keep(bench, row, arrays)
        print(model, name, row["overall"], file=sys.stderr, flush=True)


def questions(bench: Bench, results: Results, prefix: str) -> Arrays:
    """What was measured of each question, `[questions]`, by names after `prefix`: numbers of images, families, scores of both
    sides, KL of the first token; further scores are NaN for questions of other families."""
    from vlmcompress.evaluation.accuracy.compare import pairs

    samples = results.samples
    numbers: dict[Any, int] = {}
    baseline, candidate, images = pairs(samples)
    arrays = {
        f"{prefix}image": np.array([numbers.setdefault(image, len(numbers)) for image in images or ()], np.int16),
        f"{prefix}family": np.array([sample.family for sample in samples]),
        f"{prefix}baseline": np.array(baseline, np.float32),
        f"{prefix}score": np.array(candidate, np.float32),
        f"{prefix}kl": np.array([math.nan if s.kl is None else s.kl for s in samples], np.float32),
    }
    for key, (family, score) in bench.scores.items():
        for side, name in (("baseline", f"baseline {key}"), ("candidate", key)):
            values = [(score(getattr(s, side), s.expected) or 0.0) if s.family == family else math.nan for s in samples]
            arrays[prefix + name] = np.array(values, np.float32)
    return arrays


def figures(bench: Bench, arrays: Arrays, model: str, recipe: str, margins: dict[str, float]) -> dict[str, Any]:
    """The comparisons of a row: of all questions, of families and by further scores, each question's score being its mean over
    seeds; `by_seed`: the differences of single calibrations."""
    from vlmcompress.evaluation.accuracy import compare

    def side(name: str) -> np.ndarray:
        rows = [key for key in arrays if key.startswith(f"{model}|{recipe}|") and key.split("|")[3] == name]
        return np.stack([arrays[key] for key in rows])

    def means(name: str) -> np.ndarray:
        return side(name).mean(0, dtype=np.float64)

    image, family = side("image")[0], side("family")[0]
    before, after = means("baseline"), means("score")
    of_families = {
        name: (before[family == name].tolist(), after[family == name].tolist(), image[family == name].tolist())
        for name in sorted(set(family.tolist()))
    }
    overall = compare.compare(before.tolist(), after.tolist(), image.tolist(), margin=margins["overall"])
    row: dict[str, Any] = {"overall": overall.model_dump(mode="json")}
    row["by_seed"] = (side("score") - side("baseline")).mean(1, dtype=np.float64).tolist()
    row["kl"] = float(np.nanmean(side("kl"), dtype=np.float64))
    compared = compare.families(of_families, margin=margins)
    row["families"] = {name: comparison.model_dump(mode="json") for name, comparison in compared.items()}
    for key in bench.scores:
        family_rows = ~np.isnan(side(key)[0])
        sides = (means(name)[family_rows].tolist() for name in (f"baseline {key}", key))
        row[key] = compare.compare(*sides, image[family_rows].tolist()).model_dump(mode="json")
    return row


def keep(bench: Bench, row: dict[str, Any], arrays: Arrays) -> None:
    """Put a row into the bench's two files, in place of an earlier one of the same model, recipe and engine."""

    def key(row: dict[str, Any]) -> tuple[str, str, str | None]:
        return row["model"], row["recipe"], row.get("engine")

    rows = [old for old in stored(bench) if key(old) != key(row)] + [row]
    rows.sort(key=lambda row: (list(bench.models).index(row["model"]), list(bench.recipes).index(row["recipe"])))
    bench.rows.parent.mkdir(exist_ok=True)
    with np.load(bench.rows) if bench.rows.exists() else contextlib.nullcontext({}) as file:
        kept = {name: file[name] for name in file if not name.startswith(f"{row['model']}|{row['recipe']}|")}
    np.savez_compressed(bench.rows, **kept | arrays)
    bench.file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def stored(bench: Bench) -> list[dict[str, Any]]:
    """The rows that were measured, of recipes that there still are."""
    rows = json.loads(bench.file.read_text()) if bench.file.exists() else []
    return [row for row in rows if row["recipe"] in bench.recipes]


def visual_tokens(source: Path, suite: dict, data: Path | None, ids: set[str]) -> list[int]:
    """Visual tokens of a suite before and after a reducer: vLLM counts those of whole prompts alone.

    Args:
        data: file of questions about an image each; None: the suite is that of clips.
        ids: of the questions that were asked.
    """
    from PIL import Image
    from transformers import AutoProcessor

    from vlmcompress.evaluation.accuracy.clips import FRAMES, SIDE
    from vlmcompress.models import read_config, spec_for

    spec, processor = spec_for(read_config(source)), AutoProcessor.from_pretrained(source)
    if data is None:
        before = len(ids) * math.prod(spec.images.video(processor, FRAMES, SIDE, SIDE))
    else:
        rows = parquet.read_table(data, columns=["id", "image"]).to_pylist()
        sizes = [Image.open(io.BytesIO(image)).size for row in rows if row["id"] in ids for image in row["image"]]
        before = sum(spec.layout(processor, *size, 1).tokens for size in sizes)
    return [before, before - suite["prompt_tokens"][0] + suite["prompt_tokens"][1]]


def render(bench: Bench, rows: list[dict]) -> str:
    """Render the results as a Markdown table: a row a recipe, differences to BF16 in points with their intervals. What
    compares with random tokens comes after it."""
    cells = {(row["model"], row["recipe"], row.get("engine", "")): row for row in rows}
    names = sorted({row["model"] for row in rows}, key=list(bench.models).index)
    engines = sorted({row.get("engine", "") for row in rows})
    columns = ["tokens", *bench.columns] if bench.suite else [*bench.columns, "KL"]
    heads = [f"{name}: {' | '.join(['weights', *columns])}" for name in names]
    lines = [f"| recipe | {' | '.join(heads)} |", "|---|" + "---:|" * (len(names) * (1 + len(columns)))]
    for engine in engines:
        parts = []
        for model in names:
            row = next((r for r in rows if (r["model"], r.get("engine", "")) == (model, engine)), None)
            shares = (
                [f"{compared['baseline']:.1%}" for compared in compared_in(bench, row)]
                if row
                else [""] * len(bench.columns)
            )
            parts += ["", "", *shares] if bench.suite else ["", *shares, ""]
        lines.append(f"| none, 16 bits{engine and f', in {engine}'} | {' | '.join(parts)} |")
    for recipe, engine in itertools.product(bench.recipes, engines):
        parts = []
        for row in (cells.get((model, recipe, engine)) for model in names):
            if row is None:
                parts += [""] * (1 + len(columns))
                continue
            parts.append(f"1/{row['ratio']:.2f}")
            if bench.suite:
                before, after = row["visual_tokens"]
                parts.append(f"{after / before:.0%}")
            parts += map(points, compared_in(bench, row))
            if not bench.suite:
                parts.append(f"{row['kl']:.4f}")
        if any(parts):
            lines.append(f"| {recipe}{engine and f', in {engine}'} | {' | '.join(parts)} |")
    won = against_random(bench)
    return "\n".join(lines + ["", *won] * bool(won))


def against_random(bench: Bench) -> list[str]:
    """A line a model: points that other halves of the tokens win over `random 1/2` on the same questions, with intervals."""
    from vlmcompress.evaluation.accuracy.compare import compare

    lines = []
    overall = [column for column, keys in bench.columns.items() if keys == ("overall",) and bench.suite]
    with np.load(bench.rows) if bench.rows.exists() else contextlib.nullcontext({}) as rows:
        for model in bench.models:
            scores = {name: rows[key] for name in ("random 1/2", *HALVED) if (key := f"{model}|{name}|0|score") in rows}
            if (random := scores.pop("random 1/2", None)) is None or not scores:
                continue
            image = rows[f"{model}|random 1/2|0|image"].tolist()
            won = {name: compare(random.tolist(), score.tolist(), image) for name, score in scores.items()}
            texts = (
                f"`{name}` {100 * c.difference:+.1f} ({100 * c.low:+.1f} to {100 * c.high:+.1f})"
                for name, c in won.items()
            )
            what = ", ".join([model, *overall])
            lines.append(f"* **{what}, against `random 1/2`**: {', '.join(texts)}")
    return lines


def compared_in(bench: Bench, row: dict) -> list[dict]:
    """The comparisons of a result that the table has."""
    return [functools.reduce(dict.__getitem__, keys, row) for keys in bench.columns.values()]


def points(compared: dict) -> str:
    """A comparison's difference in points, half its interval, and whether a loss of a point is ruled out."""
    difference, low, high = (100 * compared[name] for name in ("difference", "low", "high"))
    rounded = round(difference, 1) + 0.0  # no -0.0
    return f"{rounded:+.1f} ±{(high - low) / 2:.1f}" + " ✓" * (compared["verdict"] == "pass")


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("bench", nargs="?", choices=BENCHES, default="world")
    parser.add_argument("--limit", type=int, help="questions per model; default all of the test split")
    parser.add_argument("--models", nargs="+", choices=SKILLS + PICTURES, help="keep the others' rows; default: all")
    parser.add_argument("--recipes", nargs="+", help="the same of recipes; default: all")
    parser.add_argument("--work", type=Path, help="keep checkpoints here, and use those that an earlier call left")
    parser.add_argument("--dtype", help="of the engines; default: float32 for photo, else the checkpoint's")
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    args = parser.parse_args()
    bench = BENCHES[args.bench]
    bench = replace(bench, dtype=args.dtype or bench.dtype)
    if absent := set(args.recipes or ()) - set(bench.recipes):
        parser.error(f"no recipe is called {', '.join(absent)}; there are {', '.join(bench.recipes)}")
    if not args.render:
        names = args.recipes or list(bench.recipes)
        parts = [[name for name in names if in_transformers(name) == apart] for apart in (False, True)]
        for model, part in itertools.product(args.models or bench.models, filter(None, parts)):
            with contextlib.nullcontext(args.work) if args.work else tempfile.TemporaryDirectory() as folder:
                measure(bench, model, part, args.limit, Path(folder))
    rows = stored(bench)
    print(render(bench, rows))
    print(json.dumps({f"{row['model']} {row['recipe']}": row["overall"]["difference"] for row in rows}))


if __name__ == "__main__":
    main()
