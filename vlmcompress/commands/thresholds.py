"""`vlmcompress thresholds`: what DyMU merges in each layer of a model's encoder, learnt once, kept in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vlmcompress.errors import UserError


def options(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    none = argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", help="folder of the original")
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the file to write; .json")
    parser.add_argument("--keep", metavar="SHARE", default="1/3", help="of the tokens, on average; default: 1/3")
    parser.add_argument("--calib", metavar="DATA", default=none, help="folder of images, .jsonl, .parquet or data set")
    parser.add_argument("--samples", type=int, metavar="N", default=none, help="calibration samples")
    parser.add_argument("--seed", type=int, metavar="S", default=none, help="of their choice")
    parser.set_defaults(set=[])
    parser.epilog = (
        "Tokens merge in each layer where they are more alike than its threshold, so plain images keep fewer than rich ones.\n"
        "Use the file with --reduce dymu:thresholds=FILE."
    )


def run_verb(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Exit code, data, text."""
    from vlmcompress import models, reduction
    from vlmcompress.commands import _arguments as arguments
    from vlmcompress.commands import _terminal as terminal
    from vlmcompress.compression.inputs import read_inputs
    from vlmcompress.recipe import reducer as chosen
    from vlmcompress.recipe import resolve
    from vlmcompress.reduction import learning, threshold_file

    out = Path(args.out)
    if out.suffix != ".json" or out.is_dir():
        raise UserError(f"--out {out}: thresholds go to a file; name it FILE.json")
    reducer = chosen.parse(f"{threshold_file.METHOD}:{args.keep}")
    given = {key: value for key, value in arguments.given(args).items() if key != "out"}
    recipe = resolve(given | {"scheme": "none"}).recipe
    if reason := reduction.refusal(models.spec_for(models.read_config(recipe.model)), reducer.method):
        raise UserError(reason)
    vlm = models.load(recipe.model, trust_remote_code=recipe.trust_remote_code)
    reduction.check(vlm, reducer.method, reducer.options)
    inputs = read_inputs(recipe, vlm, "vlmcompress thresholds")
    progress = terminal.Progress()
    try:
        learnt = learning.learn(vlm, inputs.batches, reducer, progress)
    finally:
        progress.close()
    content = threshold_file.save(out, vlm, learnt, learning.kept(vlm, inputs.batches, learnt), inputs.origin or {})
    facts = content["kept"]
    lines = [
        f"Thresholds of {len(content['reduce']['thresholds'])} layers, with which {facts['pictures']} pictures keep "
        f"{facts['mean']:g} tokens on average, {facts['least']} to {facts['most']}.",
        f"Wrote {out}; use it with --reduce {threshold_file.METHOD}:thresholds={out}",
    ]
    return 0, {"ok": True, "out": str(out), **content}, "\n".join(lines)
