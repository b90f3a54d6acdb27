#!/usr/bin/env python
"""What training adds to a token reducer: a scorer (`vlmcompress learn-reducer`), then the model itself (`vlmcompress recover`).

    scripts/measure/compare_learning.py --models demo-llava     train on one model, and ask: half an hour on two cores
    scripts/measure/compare_learning.py                         on both
    scripts/measure/compare_learning.py --summarise             figures of what WORK has, without training
    scripts/measure/compare_learning.py --render                the docs' table, from eval/learning.json

Trained is on questions about images of the training split, drawn here anew; a tenth of them is held out by the verbs. Asked are
all questions about images of the test split, by `reduced_answers.py`. What training makes is kept in WORK, and not made again.
Intervals are 95% ones of the difference to the model with all its tokens, in points, clustered by image. Times are those of one
core. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow as pa
import pyarrow.parquet as pq
import reduced_answers
import torch
from bench_reducers import DEMO, MODELS, ROOT, samples
from methods_table import about, numbered

sys.path.insert(0, str(ROOT))
from eval.world.freeze import SCHEMA
from eval.world.rows import family_rows
from eval.world.vocab import FAMILIES
from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.evaluation.accuracy.compare import compare
from vlmcompress.reduction.choice import parse

RESULTS = ROOT / "eval" / "learning.json"
PER_FAMILY = 400
KEEP = "0.25"
SHARES = ("0.5", "0.25", "1/9")
STEPS = 400  # of the scorer
RECOVERED = {  # reducer -> how the model is trained behind it
    "learned:0.25": (),
    "coverage:1/9,merge=nearest": (
        *("--train", "projector,norms,lora,tower", "--steps", 400, "--batch", 8),
        *("--lr", 5e-5, "--every", 50),
    ),
}
UNTRAINED = ("coverage:{}", "coverage:{},merge=nearest")


def rows(work: Path, model: str) -> Path:
    """A file of questions about images of the training split, each another one, in the world that the model knows."""
    path, variant = work / f"{model}.parquet", model.removeprefix("demo-")
    if not path.exists():
        every = 4 * PER_FAMILY  # as there are up to four questions about an image
        families = [_one_each(family_rows("train", name, variant, every)) for name in FAMILIES if name != "text"]
        every = [row for together in zip(*families, strict=True) for row in together]
        pq.write_table(pa.Table.from_pylist(every, schema=SCHEMA), path, compression="zstd")
    return path


def _one_each(family: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row about each image, or pair of images, `PER_FAMILY` at most."""
    return list({tuple(row["image"]): row for row in reversed(family)}.values())[::-1][:PER_FAMILY]


def verb(out: Path, *arguments: object) -> None:
    """Run a verb of vlmcompress that writes `out`, unless it is there; its outcome as JSON goes beside."""
    if out.exists():
        return
    began, before = time.monotonic(), _children()
    command = [sys.executable, "-m", "vlmcompress", *map(str, arguments), "-o", str(out), "--json", "--resume"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    times = {"wall": time.monotonic() - began, "seconds": _children() - before}
    _about(out).write_text(json.dumps(json.loads(done.stdout) | times))


def _children() -> float:
    """Seconds that the programs that this one has started and seen end were on a core."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _about(out: Path) -> Path:
    return out.parent / f"{out.name}.json"


def train(work: Path, model: str) -> None:
    """Train the scorer of a model, and the model behind it."""
    scorer, data = work / f"{model}.safetensors", rows(work, model)
    drawn = ("--calib", data, "--samples", 9 * PER_FAMILY)
    verb(scorer, "learn-reducer", DEMO / model, *drawn, "--keep", KEEP, "--steps", STEPS)
    for number, (reducer, flags) in enumerate(RECOVERED.items()):
        reduce = _with(reducer, scorer)
        verb(work / f"{model}-recovered-{number}", "recover", DEMO / model, "--reduce", reduce, *drawn, *flags)


def _with(reducer: str, scorer: Path) -> str:
    return reducer + (f",scorer={scorer}" if reducer.startswith("learned") else "")


def ask(work: Path, model: str) -> dict[str, Any]:
    """Ask the test split with every reducer, of the model as it is and as it was trained."""
    questions = samples(model, "test", None)
    clusters = numbered([about(sample) for sample in questions]).tolist()
    scorer = work / f"{model}.safetensors"
    trained = {reducer: work / f"{model}-recovered-{number}" for number, reducer in enumerate(RECOVERED)}
    kinds = ("learned:{}", "learned:{},merge=nearest", *UNTRAINED)
    every = {DEMO / model: [kind.format(share) for share in SHARES for kind in kinds]}
    every |= {folder: [reducer] for reducer, folder in trained.items()}
    full: list[float] = []
    rows = []
    for folder, reducers in every.items():
        if not folder.exists():
            continue
        vlm = models.load(folder)
        asker = reduced_answers.Asker(vlm, reduced_answers.prepare(vlm, questions))
        full = full or asker.ask(None).exact.double().tolist()
        recovered = folder in trained.values()
        for text in reducers:
            exact = asker.ask(parse(_with(text, scorer))).exact.double().tolist()
            change = compare(full, exact, clusters)
            row = {"reduce": text, "recovered": recovered, "share": text.split(":")[1].split(",")[0]}
            row |= {"exact": sum(exact) / len(exact), "change": [change.difference, change.low, change.high]}
            rows.append(row)
            shown = f"{model} {'recovered ' if recovered else ''}{text}: {100 * row['exact']:.1f}%"
            print(shown, file=sys.stderr, flush=True)
    training = {
        what: json.loads(_about(path).read_text())
        for what, path in {"scorer": scorer, **trained}.items()
        if path.exists()
    }
    facts = {
        what: {"seconds": done["seconds"], "held_out_kl": done.get("held_out_kl") or done["recovery"]["held_out_kl"]}
        for what, done in training.items()
    }
    return {"full": sum(full) / len(full), "questions": len(full), "rows": rows, "training": facts}


def render(results: dict[str, Any]) -> str:
    """The docs' table: exact match at each share, with the 95% interval of the difference to all tokens."""
    lines = ["| model | reducer | 50% | 25% | 11% | trained for |", "|---|---|---|---|---|---|"]
    for model, result in results.items():
        lines.append(f"| {model.removeprefix('demo-')} | all tokens: {100 * result['full']:.1f} |  |  |  |  |")
        groups: dict[str, dict[str, Any]] = {}
        for row in result["rows"]:
            name = row["reduce"].replace(f":{row['share']}", "") + (", recovered" if row["recovered"] else "")
            groups.setdefault(name, {})[row["share"]] = row
        for name, by_share in groups.items():
            cells = [_cell(by_share[share]) if share in by_share else "" for share in SHARES]
            parts = ["scorer"] * name.startswith("learned") + [
                row["reduce"] for row in by_share.values() if row["recovered"]
            ]
            seconds = sum(result["training"][part]["seconds"] for part in parts)
            cells.append(f"{seconds / 60:.0f} min" if parts else "")
            lines.append(f"|  | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    low, high = (100 * value for value in row["change"][1:])
    return f"{100 * row['exact']:.1f} ({low:+.1f} to {high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("out/learning"), help="folder for what training makes")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--summarise", action="store_true", help="train nothing")
    parser.add_argument("--render", action="store_true", help="print the docs' table of RESULTS")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.render:
        args.work.mkdir(parents=True, exist_ok=True)
        for model in args.models:
            if not args.summarise:
                train(args.work, model)
            results[model] = ask(args.work, model)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))
    print(json.dumps({model: len(result["rows"]) for model, result in results.items()}))


if __name__ == "__main__":
    main()
