#!/usr/bin/env python
"""What training adds to a token reducer: a scorer (`vlmcompress learn-reducer`), then the model itself (`vlmcompress recover`).

    scripts/measure/compare_learning.py --models demo-llava     train on one model, and ask: half an hour on two cores
    scripts/measure/compare_learning.py                         on both
    scripts/measure/compare_learning.py --summarise             figures of what WORK has, without training
    scripts/measure/compare_learning.py --render                the docs' table, from eval/learning.json

Trained is on questions about images of the training split, drawn here anew; a tenth of them is held out by the verbs. Asked are
all questions about images of the test split, by `reduced_answers.py`. What training makes is kept in WORK, and not made again.
Differences are to the model with all its tokens, in points, with their 95% interval, clustered by image. The last line is one
JSON object.
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
from methods_table import about

sys.path.insert(0, str(ROOT))
from eval.world.freeze import SCHEMA
from eval.world.rows import family_rows
from eval.world.vocab import FAMILIES
from vlmcompress import models
from vlmcompress.commands._terminal import quiet_libraries
from vlmcompress.evaluation.compare import compare
from vlmcompress.recipe.reducer import parse

RESULTS = ROOT / "eval" / "learning.json"
PER_FAMILY = 400
KEEP = "0.25"
SHARES = ("0.5", "0.25", "1/9")
STEPS = 400  # of the scorer
RECOVERED = {  # share -> how the model is trained behind the scorer's selection
    "0.25": (),
    "1/9": ("--train", "projector,norms,lora,tower", "--steps", 600),
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


def _one_each(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first row about each image, or pair of images, `PER_FAMILY` at most."""
    return list({tuple(row["image"]): row for row in reversed(found)}.values())[::-1][:PER_FAMILY]


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
    for share, how in RECOVERED.items():
        reduce = f"learned:{share},scorer={scorer}"
        verb(_recovered(work, model, share), "recover", DEMO / model, "--reduce", reduce, *drawn, *how)


def _recovered(work: Path, model: str, share: str) -> Path:
    return work / f"{model}-recovered-{share.replace('/', 'in')}"


def ask(work: Path, model: str) -> dict[str, Any]:
    """Ask the test split with every reducer, of the model as it is and as it was trained."""
    asked = samples(model, "test", None)
    names: dict[str, int] = {}
    clusters = [names.setdefault(about(sample), len(names)) for sample in asked]
    scorer = work / f"{model}.safetensors"
    folders = {share: _recovered(work, model, share) for share in RECOVERED}
    full: list[float] = []
    found = []
    for trained, folder in ("", DEMO / model), *folders.items():
        if not folder.exists():
            continue
        vlm = models.load(folder)
        asker = reduced_answers.Asker(vlm, reduced_answers.prepare(vlm, asked))
        full = full or asker.ask(None).exact.double().tolist()
        kinds = ("learned:{}",) if trained else ("learned:{}", "learned:{},merge=nearest", *UNTRAINED)
        for share in (trained,) if trained else SHARES:
            for kind in kinds:
                text = kind.format(share)
                more = f",scorer={scorer}" if text.startswith("learned") else ""
                exact = asker.ask(parse(text + more)).exact.double().tolist()
                change = compare(full, exact, clusters)
                row = {"reduce": text, "recovered": bool(trained), "share": share, "exact": sum(exact) / len(exact)}
                row |= {"change": [change.difference, change.low, change.high]}
                found.append(row)
                print(
                    f"{model} {'recovered ' if trained else ''}{text}: {100 * row['exact']:.1f}%",
                    file=sys.stderr,
                    flush=True,
                )
    training = {
        what: json.loads(_about(path).read_text())
        for what, path in {"scorer": scorer, **folders}.items()
        if path.exists()
    }
    known = {
        what: {"seconds": done["seconds"], "held_out_kl": done.get("held_out_kl") or done["recovery"]["held_out_kl"]}
        for what, done in training.items()
    }
    return {"full": sum(full) / len(full), "questions": len(full), "rows": found, "training": known}


def render(found: dict[str, Any]) -> str:
    """The docs' table: exact match at each share, and the difference to all tokens at `KEEP`."""
    lines = [
        "| model | reducer | 50% | 25% | 11% | 25% less all tokens | trained for |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for model, one in found.items():
        seconds = [done["seconds"] for done in one["training"].values()]
        groups: dict[str, dict[str, Any]] = {}
        for row in one["rows"]:
            name = row["reduce"].replace(f":{row['share']}", "") + (", recovered" if row["recovered"] else "")
            groups.setdefault(name, {})[row["share"]] = row
        for name, own in groups.items():
            cells = [f"{100 * own[share]['exact']:.1f}" if share in own else "" for share in SHARES]
            change, low, high = (100 * value for value in own["0.25"]["change"])
            spent = sum(seconds[: 2 if "recovered" in name else 1]) if name.startswith("learned") else 0
            time_spent = f"{spent / 60:.0f} min" if spent else ""
            cells += [f"{change:+.1f} ({low:+.1f} to {high:+.1f})", time_spent]
            lines.append(f"| {model.removeprefix('demo-')} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
    found = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.render:
        args.work.mkdir(parents=True, exist_ok=True)
        for model in args.models:
            if not args.summarise:
                train(args.work, model)
            found[model] = ask(args.work, model)
        args.results.write_text(json.dumps(found, indent=1) + "\n")
    print(render(found))
    print(json.dumps({model: len(one["rows"]) for model, one in found.items()}))


if __name__ == "__main__":
    main()
