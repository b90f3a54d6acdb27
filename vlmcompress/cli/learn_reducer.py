"""Train what a reducer needs: the scorer of 'learned', or the thresholds of 'dymu'."""

from __future__ import annotations

import argparse
import shlex
import time
from contextlib import closing
from pathlib import Path

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome, evaluation_command, written_text
from vlmcompress.utils import distributed, hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import table

GROUP = "compress"
PLACE = 26
DEFAULTS = {"keep": 0.25, "steps": 600, "batch": 16, "lr": 1e-3, "every": 50}


def options(parser: Parser) -> None:
    _flags.model(parser)
    parser.add_argument(
        "-o", "--out", metavar="FILE", required=True, help="FILE.safetensors: a scorer; FILE.json: thresholds"
    )
    parser.add_argument(
        "--keep", metavar="SHARE", help="share of an image's tokens to keep; default: 0.25, of thresholds 1/3"
    )
    parser.add_argument(
        "--to",
        type=float,
        metavar="SHARE",
        help="train for all shares from --keep to this one, and measure at both ends",
    )
    _flags.data(parser, samples="enough for the steps, and a tenth more to hold out")
    _flags.training(parser, DEFAULTS, lr="1e-3")
    _flags.settings(parser, "calibrate.max_length or trust_remote_code")
    _flags.resumable(parser, "FILE")
    parser.epilog = (
        "A scorer is a small network that is trained so that MODEL answers with the kept tokens as it does with all tokens.\n"
        "MODEL does not change; its own answers are used if DATA have none. A tenth of DATA, at least 8 samples, is held out;\n"
        "the state with the lowest divergence KL(all tokens || kept tokens) there is written. Use FILE.safetensors with\n"
        "--reduce learned:SHARE,scorer=FILE.safetensors; checkpoints include it. torchrun -m vlmcompress learn-reducer ...\n"
        "splits the samples of a step among processes.\n"
        "Thresholds are cosines: in each layer of the encoder tokens merge that are more similar than its threshold, so that\n"
        "plain images keep fewer tokens than detailed ones. Use FILE.json with --reduce dymu:thresholds=FILE.json."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Learn thresholds if OUT ends in .json, else train a scorer and report its held-out divergence."""
    return _thresholds(args) if args.out.endswith(".json") else _scorer(args)


def _thresholds(args: argparse.Namespace) -> Outcome:
    from vlmcompress import models
    from vlmcompress.quantization.inputs import on_accelerator, read_inputs
    from vlmcompress.recipe import resolve
    from vlmcompress.reduction import support, threshold_file
    from vlmcompress.reduction.choice import parse_reducer
    from vlmcompress.reduction.hooks import learning

    unused = {name: value for name, value in DEFAULTS.items() if name != "keep"} | {"to": None, "restart": False}
    for name, default in unused.items():
        if getattr(args, name) != default:
            raise UserError(f"--{name} is for a scorer, FILE.safetensors; leave it out for thresholds, {args.out}")
    out = Path(args.out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give another name for the file of thresholds")
    reducer = parse_reducer(f"{threshold_file.METHOD}:{args.keep or '1/3'}")
    values = {key: value for key, value in _flags.recipe_values(args).items() if key != "out"}
    _flags.require_used_values(values, "learn-reducer", "thresholds are learned from images")
    recipe = resolve(values | {"scheme": "none"}).recipe
    if reason := support.family_problem(models.spec_for(models.read_config(recipe.model)), reducer.method):
        raise UserError(reason)
    vlm = models.load(recipe.model, trust_remote_code=recipe.trust_remote_code)
    support.require_reducer(vlm, reducer)
    with closing(ProgressBar()) as progress:
        inputs = read_inputs(recipe, vlm, "vlmcompress learn-reducer", progress)
        with on_accelerator(vlm):
            learned = learning.learn_thresholds(vlm, inputs.samples, reducer, progress)
            kept = learning.count_kept(vlm, inputs.samples, learned)
    content = threshold_file.save_thresholds(out, vlm, learned, kept, inputs.origin or {})
    facts = content["kept"]
    lines = [
        f"Thresholds of {len(content['reduce']['thresholds'])} layers, with which {facts['pictures']} pictures keep "
        f"{facts['mean']:g} tokens on average, {facts['least']} to {facts['most']}.",
        f"Wrote {out}; use it with --reduce {threshold_file.METHOD}:thresholds={out}",
    ]
    return OK, {"ok": True, "out": str(out), **content}, "\n".join(lines)


def _scorer(args: argparse.Namespace) -> Outcome:
    values = _flags.recipe_values(args)
    from vlmcompress.reduction.choice import make_choice
    from vlmcompress.utils import yaml_files

    if args.keep == "auto":
        raise UserError("--keep auto: training needs a share; give one above 0 and below 1, such as 0.25")
    share = DEFAULTS["keep"] if args.keep is None else yaml_files.parse_yaml(args.keep, "--keep")
    keep = make_choice("learned", {"keep": share}, f"--keep {args.keep}").reducer.keep
    _flags.require_used_values(values, "learn-reducer", "a scorer is trained on images with questions")
    from vlmcompress.training.learn_reducer import ScorerTraining, learn_reducer

    training = ScorerTraining(keep, **{name: getattr(args, name) for name in DEFAULTS if name != "keep"}, to=args.to)  # type: ignore[arg-type]
    recipe = _flags.training_recipe(values, training)
    with closing(ProgressBar()) as progress:
        facts = learn_reducer(recipe, training, restart=args.restart, overwrite=args.overwrite, progress=progress)
    if not distributed.is_main():
        return OK, None, ""
    model = hub.display_path(recipe.model)
    calib = f" --calib {shlex.quote(str(recipe.calibrate.data))}" if recipe.calibrate.data else ""  # else bundled data
    reduce = "--reduce " + shlex.quote(f"learned:{facts['keep']:g},scorer={recipe.out}")
    data = {
        "ok": True,
        "out": str(recipe.out),
        "seconds": round(time.monotonic() - args.began, 3),
        **facts,
        "next": [
            evaluation_command(model, model, f" --engine hf {reduce}"),
            f"vlmcompress quantize {shlex.quote(model)} {reduce} --scheme SCHEME{calib} -o OUT",
        ],
    }
    kl, samples = data["held_out_kl"], data["samples"]
    baselines = ", ".join(f"{name} {kl[name]:.4f}" for name in ("uniform", "coverage", "untrained"))
    written = samples["answers_of_the_teacher"]
    answers = f", {written} answers by the model itself" if written else ""
    steps = f"{data['steps']} of at most {data['training']['steps']}, step {data['best_step']} is kept"
    share = f"a share of {data['keep']:g}" if data["to"] is None else f"shares from {data['keep']:g} to {data['to']:g}"
    rows = [
        ("held-out KL", f"{kl['learned']:.4f} nats an answer token at {share}; {baselines}"),
        ("steps", steps + (f"; {data['ended']}" if data["ended"] else "")),
        ("data", f"{samples['trained_on']} samples of '{samples['source']}', {samples['held_out']} held out{answers}"),
    ]
    weak = "It is no better than reducers that need no training; give it more data, or take one of those."
    remarks = [weak] * (kl["learned"] >= min(kl["uniform"], kl["coverage"]))
    return OK, data, written_text(data, [table(rows)], args.verbose, remarks)
