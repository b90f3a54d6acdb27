"""Collect a model's activation statistics once, so that quantize --stats needs no forward pass."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome, written_text
from vlmcompress.utils import distributed, hub, model_folder
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import size, table

GROUP = "compress"
PLACE = 23
KEYS = ("model", "out", "adapter", "kv_cache", "resize", "reduce", "rotate", "calibrate", "trust_remote_code", "seed")
STATISTICS = ("absmax", "absmean", "entropy", "gradient", "gram")  # `calibrate.KINDS`, whose module imports torch


def options(parser: Parser) -> None:
    _flags.model(parser)
    parser.add_argument("-o", "--out", metavar="STATS", required=True, help="folder to write")
    _flags.data(parser)
    _flags.kv_cache(parser, "fp8: collect ranges of keys and values, too")
    _flags.adapter(parser)
    _flags.rotation(parser)
    _flags.reducer(parser, "collect statistics after a visual-token reducer")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--for",
        dest="readers",
        metavar="A,B",
        help="collect the statistics of these schemes and bit allocation rules; e.g. gptq,mbq,luq",
    )
    choice.add_argument(
        "--needs",
        metavar="A,B",
        help="statistics to collect: gram (the large one), absmax, absmean, entropy, gradient (a backward pass over the "
        "answers); default: gram,absmax,absmean, which suffice for schemes with default options",
    )
    _flags.settings(parser, "calibrate.max_length or trust_remote_code")
    _flags.resumable(parser, "STATS", "ones are")
    parser.epilog = (
        "Statistics are those of the unquantized model (prefix float), for every scheme: for each group of layers and each\n"
        "modality (text, vision, answer) the Gram matrix X^T X, absolute maxima, means and counts. quantize without --stats\n"
        "observes each block after the quantized blocks before it instead (prefix quantized)."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Collect the statistics and describe them."""
    from vlmcompress.recipe import resolve

    values = _flags.recipe_values(args)
    _flags.require_used_values(values, "calibrate", KEYS)
    recipe = resolve(values | {"scheme": "none"}).recipe
    needs: dict[str, Any] = {"needs": frozenset(args.needs.split(","))} if args.needs else {}
    for name in args.needs.split(",") if args.needs else ():
        if name not in STATISTICS:
            raise UserError(f"--needs: no '{name}'{did_you_mean(name, STATISTICS)}")
    model_folder.require_model(recipe.model)
    from vlmcompress.quantization.calibrate import calibrate, statistics_needed

    if args.readers:
        needs = {"needs": statistics_needed(args.readers.split(","))}

    with closing(ProgressBar()) as progress:
        done = calibrate(recipe, **needs, restart=args.restart, overwrite=args.overwrite, progress=progress)
    if not distributed.is_main():
        return OK, None, ""
    adapter = hub.display_path(recipe.adapter) if recipe.adapter else None
    data = result(done.out, hub.display_path(recipe.model), done.manifest, time.monotonic() - args.began, adapter)
    return OK, data, text(data, args.verbose)


def result(
    out: Path, model: str, facts: Mapping[str, Any], seconds: float, adapter: str | None = None
) -> dict[str, Any]:
    """The result as data for `--json`.

    Args:
        facts: the manifest of the statistics.
    """
    same = "".join(f" --reduce {shlex.quote(stage)}" for stage in _stages(facts["calibration"]))
    same += f" --adapter {shlex.quote(adapter)}" if adapter else ""
    if rotation := facts.get("rotate"):
        same += f" --rotate {rotation['kind']} --seed {rotation['seed']}"
    return {
        "ok": True,
        "out": str(out),
        "seconds": round(seconds, 3),
        "bytes": sum(file["size"] for file in facts["files"].values()),
        "blocks": sum(bool(groups) for groups in facts["blocks"]),
        "groups": sum(map(len, facts["blocks"])),
        "needs": facts["needs"],
        "kv_cache": facts["kv_cache"],
        "calibration": facts["calibration"],
        "timing": facts["timing"],
        "next": [
            f"vlmcompress quantize {shlex.quote(str(model))} --stats {shlex.quote(str(out))}{same} -o OUT --scheme SCHEME"
        ],
    }


def text(done: Mapping[str, Any], verbose: bool = False) -> str:
    """The result as text. `done`: from `result`; `verbose`: add the seconds of each phase."""
    data = done["calibration"]
    tokens = ", ".join(f"{name} {count:,}" for name, count in data["tokens"].items())
    words = data.get("text")
    mixed = f" and '{words['source']}' ({words['samples']} of text alone)" if words else ""
    kinds = ", ".join(done["needs"]) + (", ranges of keys and values" if done["kv_cache"] else "")
    rows = [
        ("statistics", f"{kinds}: {done['groups']} groups in {done['blocks']} blocks, {size(done['bytes'])}"),
        ("data", f"{data['samples']} samples of '{data['source']}'{mixed}, {data['images']} different images"),
        ("tokens", tokens),
        ("prefix", "float: the model ran unquantized"),
    ]
    if stages := _stages(data):
        rows.append(("after", f"{' + '.join(stages)}, whose dropped tokens are not counted"))
    return written_text(done, [table(rows)], verbose)


def _stages(calibration: Mapping[str, Any]) -> list[str]:
    """The `resize` and reducer that were active during calibration, as values of `--reduce`."""
    from vlmcompress.reduction.choice import reducer_of_setting
    from vlmcompress.reduction.resize import Resize

    resize, reduce = calibration.get("resize"), calibration.get("reduce")
    stages = [str(Resize(**resize))] if resize else []
    return [*stages, str(reducer_of_setting(reduce).without_thresholds)] if reduce else stages
