"""Train a model for a few steps to answer with a token reducer as it did without; the result is a plain checkpoint."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome, calibration_flag, evaluation_command, written_text
from vlmcompress.utils import distributed, hub
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import table

GROUP = "compress"
PLACE = 25
KEYS = ("model", "out", "reduce", "resize", "calibrate", "trust_remote_code", "seed", "engine", "shard_size")
DEFAULTS = {"steps": 300, "batch": 4, "lr": 2e-4, "every": 25}


def options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of the original, in 16 bits or more")
    parser.add_argument("-o", "--out", required=True, help="folder to write")
    _flags.reducer(parser, "visual-token reducer to train for, which the checkpoint carries")
    _flags.data(parser, samples="enough for the steps, and a tenth more to hold out")
    parser.add_argument(
        "--train",
        metavar="A,B",
        default="projector,norms,lora",
        help="projector, norms (of the language model), lora (adapters of its linear layers, merged at the end), tower; "
        "default: projector,norms,lora",
    )
    _flags.training(parser, DEFAULTS, lr="2e-4")
    _flags.settings(parser, "calibrate.max_length, engine, shard_size or trust_remote_code")
    _flags.resumable(parser, "OUT")
    parser.epilog = (
        "The objective is the divergence KL(original || reduced model) at answer tokens; the original's own answers are used\n"
        "if DATA have none. A tenth of DATA, at least 8 samples, is held out. The state with the lowest divergence there is\n"
        "written, or the original weights if none is lower. The run ends after 4 measurements in a row without improvement,\n"
        "or one that is twice as bad as the first. Recover before you quantize: quantize OUT with the same --reduce.\n"
        "torchrun -m vlmcompress recover ... splits the samples of a step among several processes."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Train the model and report its held-out divergence."""
    values = _flags.recipe_values(args)
    _flags.require_used_values(values, "recover", KEYS, "recover trains on images with questions alone")
    from vlmcompress.training.recover import TrainingOptions, recover

    training = TrainingOptions(tuple(args.train.split(",")), **{name: getattr(args, name) for name in DEFAULTS})
    recipe = _flags.training_recipe(values, training)
    with closing(ProgressBar()) as progress:
        done = recover(recipe, training, restart=args.restart, overwrite=args.overwrite, progress=progress)
    if not distributed.is_main():
        return OK, None, ""
    for line in done.manifest["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    original, seconds = hub.display_path(recipe.model), time.monotonic() - args.began
    data = result(done.out, original, done.manifest, seconds, recipe.calibrate.data)
    return OK, data, text(data, args.verbose)


def result(
    out: Path, model: str, manifest: Mapping[str, Any], seconds: float, calib: str | Path | None = None
) -> dict[str, Any]:
    """The result as data for `--json`. `model`: the teacher; `calib`: the data that the user gave."""
    recovery, recipe = manifest["recovery"], manifest["recipe"]
    folder, data = shlex.quote(str(out)), calibration_flag(out, calib, model)
    flags = "".join(f" --reduce {shlex.quote(reducer)}" for reducer in _reducers(recipe))
    engine = "" if recipe.get("engine", "vllm") == "vllm" else " --engine hf"
    return {
        "ok": True,
        "out": str(out),
        "seconds": round(seconds, 3),
        "reduce": recipe.get("reduce"),
        "resize": recipe.get("resize"),
        "recovery": recovery,
        "calibration": manifest["calibration"],
        "warnings": manifest["warnings"],
        "timing": manifest.get("timing", {}),
        "next": [
            evaluation_command(out, model, engine),
            f"vlmcompress quantize {folder}{flags} --scheme SCHEME{data} -o OUT",
        ],
    }


def _reducers(recipe: Mapping[str, Any]) -> list[str]:
    """The reducer of a recipe as values of `--reduce`. A `resize` is already in the processor's files."""
    from vlmcompress.reduction.choice import reducer_of_setting

    return [str(reducer_of_setting(recipe["reduce"]).without_thresholds)] if recipe.get("reduce") else []


def text(done: Mapping[str, Any], verbose: bool = False) -> str:
    """The result as text. `done`: from `result`; `verbose`: add the seconds of each phase."""
    recovery, data = done["recovery"], done["calibration"]
    samples, kl = recovery["samples"], recovery["held_out_kl"]
    parts = ", ".join(f"{name} {count:,}" for name, count in recovery["parameters"].items())
    written = samples["answers_of_the_teacher"]
    answers = f", {written} answers by the original itself" if written else ""
    steps = f"{recovery['steps']} of at most {recovery['settings']['steps']}"
    best = f", step {recovery['best_step']} is kept" if recovery["changed"] else ""
    change = f"{1 - kl['after'] / kl['before']:.0%} less" if recovery["changed"] else "no better"
    rows = [
        ("held-out KL", f"{_nats(kl['before'])} -> {_nats(kl['after'])} nats an answer token, {change}"),
        ("trained", f"{parts} numbers"),
        ("steps", steps + best + (f"; {recovery['ended']}" if recovery["ended"] else "")),
        ("data", f"{samples['trained_on']} samples of '{data['source']}', {samples['held_out']} held out{answers}"),
    ]
    kept = "the original weights, which were written with the reducer"
    notes = [] if recovery["changed"] else [f"Nothing was better than {kept}."]
    return written_text(done, [table(rows)], verbose, notes)


def _nats(value: float) -> str:
    return f"{value:.4f}" if value >= 0.001 else f"{value:.2g}"
