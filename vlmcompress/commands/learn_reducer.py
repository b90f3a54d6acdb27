"""Train a small network that says which visual tokens of an image are worth keeping, for the reducer 'learned'."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from vlmcompress.commands import _flags, _outcome
from vlmcompress.commands._flags import Parser
from vlmcompress.commands._outcome import OK, Outcome, phases_text
from vlmcompress.common import distributed, hub
from vlmcompress.common.progress import ProgressBar
from vlmcompress.common.text import duration, table
from vlmcompress.errors import UserError, did_you_mean

GROUP = "compress"
PLACE = 26
DEFAULTS = {"keep": 0.25, "steps": 600, "batch": 16, "lr": 1e-3, "every": 50, "hidden": 64}


def options(parser: Parser) -> None:
    """Add the verb's flags."""
    none = argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", default=none, help=_flags.MODEL)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the file to write; .safetensors")
    parser.add_argument(
        "--keep",
        metavar="SHARE",
        default="0.25",
        help="of an image's tokens, around which it is trained; default: 0.25",
    )
    _flags.data(parser, samples="as many as the steps see once, and a tenth more to hold out")
    parser.add_argument("--steps", type=int, metavar="N", default=DEFAULTS["steps"], help="most steps; default: 600")
    parser.add_argument("--batch", type=int, metavar="B", default=DEFAULTS["batch"], help="samples a step; default: 16")
    parser.add_argument("--lr", type=float, default=DEFAULTS["lr"], help="highest learning rate; default: 1e-3")
    parser.add_argument(
        "--every", type=int, metavar="N", default=DEFAULTS["every"], help="steps between measurements; default: 50"
    )
    parser.add_argument(
        "--hidden", type=int, metavar="H", default=DEFAULTS["hidden"], help="width of the network; default: 64"
    )
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", default=[], help="calibrate.max_length or trust_remote_code"
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE once the new one is whole")
    parser.epilog = (
        "The network is trained so that MODEL answers behind the tokens that it keeps as it does with all of them. MODEL\n"
        "stays as it is, and where DATA have no answers, its own are taken. A tenth of DATA, 8 samples at least, is held\n"
        "out; the state with the lowest divergence KL(all tokens || kept tokens) there is written. Use FILE with\n"
        "--reduce learned:SHARE,scorer=FILE; a checkpoint that is made so carries it. torchrun -m vlmcompress\n"
        "learn-reducer ... shares out the samples of a step among several processes."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Train the network, and say what came of it."""
    from vlmcompress.common import yaml_files
    from vlmcompress.recipe import resolve
    from vlmcompress.recipe.reducer import choose

    if args.keep == "auto":
        raise UserError("--keep auto: training needs a share; give one above 0 and below 1, such as 0.25")
    keep = choose("learned", {"keep": yaml_files.parse(args.keep, "--keep")}, f"--keep {args.keep}").options.keep
    given = _flags.given(args)
    _refuse_foreign(given)
    from vlmcompress.runs.learn_reducer import Asked, learn_reducer

    values = {name: getattr(args, name) for name in DEFAULTS if name != "keep"}
    asked = Asked(keep, **values)  # type: ignore[arg-type]
    given["calibrate"] = {"samples": asked.samples} | given.get("calibrate", {})
    recipe = resolve(given | {"scheme": "none"}).recipe
    assert recipe.out is not None
    with closing(ProgressBar()) as progress:
        facts = learn_reducer(recipe, asked, resume=args.resume, overwrite=args.overwrite, progress=progress)
    if not distributed.is_main():
        return OK, None, ""
    data = result(recipe.out, hub.shown(recipe.model), facts, time.monotonic() - args.began, recipe.calibrate.data)
    return OK, data, text(data, args.verbose)


def _refuse_foreign(values: Mapping[str, Any]) -> None:
    """Raise `UserError` for recipe keys that mean nothing to this training."""
    for key, flag in (("text", "--text"), ("all_experts", "--all-experts")):
        if key in values.get("calibrate", {}):
            raise UserError(f"{flag} is for calibration; a scorer is trained on images with questions, leave it out")
    known = ("model", "out", "calibrate", "trust_remote_code", "seed")
    foreign = [key for key in values if key not in known]
    foreign += ["calibrate.stats"] if "stats" in values.get("calibrate", {}) else []
    if foreign:
        raise UserError(f"--set {foreign[0]}: no such key of learn-reducer{did_you_mean(foreign[0], known)}")


def result(
    out: Path, model: str, facts: Mapping[str, Any], seconds: float, calib: str | Path | None = None
) -> dict[str, Any]:
    """What was learnt, as data for `--json`. `calib`: the data that the user gave."""
    data = _outcome.calibration(model, calib, model)
    reduce = "--reduce " + shlex.quote(f"learned:{facts['keep']:g},scorer={out}")
    return {
        "ok": True,
        "out": str(out),
        "seconds": round(seconds, 3),
        **facts,
        "next": [
            _outcome.evaluation(model, model, f" --engine hf {reduce}"),
            f"vlmcompress quantize {shlex.quote(model)} {reduce} --scheme SCHEME{data} -o OUT",
        ],
    }


def text(done: Mapping[str, Any], verbose: bool = False) -> str:
    """What was learnt, in words. `done`: what `result` returns; `verbose`: with the time that each phase took."""
    kl, samples = done["held_out_kl"], done["samples"]
    beside = ", ".join(f"{name} {kl[name]:.4f}" for name in ("uniform", "coverage", "untrained"))
    written = samples["answers_of_the_teacher"]
    answers = f", {written} answers by the model itself" if written else ""
    steps = f"{done['steps']} of at most {done['training']['steps']}, step {done['best_step']} is kept"
    rows = [
        ("held-out KL", f"{kl['learned']:.4f} nats an answer token at a share of {done['keep']:g}; {beside}"),
        ("steps", steps + (f"; {done['ended']}" if done["ended"] else "")),
        ("data", f"{samples['trained_on']} samples of '{samples['source']}', {samples['held_out']} held out{answers}"),
    ]
    spent = phases_text(done["timing"], done["seconds"]) if verbose else []
    lines = [f"Wrote {done['out']} in {duration(done['seconds'])}.", table(rows), *spent]
    if kl["learned"] >= min(kl["uniform"], kl["coverage"]):
        lines.append("It is no better than reducers that need no training; give it more data, or take one of those.")
    return "\n".join([*lines, "Next:", *(f"  {command}" for command in done["next"])])
