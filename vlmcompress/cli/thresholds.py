"""Learn DyMU's thresholds: the similarity at which tokens merge, per layer."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

GROUP = "compress"
PLACE = 27


def options(parser: Parser) -> None:
    none = argparse.SUPPRESS
    _flags.model(parser)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the file to write; .json")
    parser.add_argument("--keep", metavar="SHARE", default="1/3", help="average share of tokens to keep")
    parser.add_argument("--calib", metavar="DATA", default=none, help="folder of images, .jsonl, .parquet or data set")
    _flags.rows(parser)
    parser.add_argument("--samples", type=int, metavar="N", default=none, help="calibration samples; default: 128")
    parser.add_argument("--seed", type=int, metavar="S", default=none, help="of their choice; default: 0")
    parser.set_defaults(set=[])
    parser.epilog = (
        "In each layer, tokens that are more similar than its threshold merge, so plain images keep fewer than detailed ones.\n"
        "Use the file with --reduce dymu:thresholds=FILE."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Learn the thresholds and write them."""
    from vlmcompress import models
    from vlmcompress.quantization.inputs import on_accelerator, read_inputs
    from vlmcompress.recipe import resolve
    from vlmcompress.reduction import support, threshold_file
    from vlmcompress.reduction.choice import parse_reducer
    from vlmcompress.reduction.hooks import learning

    out = Path(args.out)
    if out.suffix != ".json" or out.is_dir():
        raise UserError(f"--out {out} is a file of thresholds; name it FILE.json")
    reducer = parse_reducer(f"{threshold_file.METHOD}:{args.keep}")
    values = {key: value for key, value in _flags.recipe_values(args).items() if key != "out"}
    recipe = resolve(values | {"scheme": "none"}).recipe
    if reason := support.family_refusal(models.spec_for(models.read_config(recipe.model)), reducer.method):
        raise UserError(reason)
    vlm = models.load(recipe.model, trust_remote_code=recipe.trust_remote_code)
    support.check_reducer(vlm, reducer)
    with closing(ProgressBar()) as progress:
        inputs = read_inputs(recipe, vlm, "vlmcompress thresholds", progress)
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
