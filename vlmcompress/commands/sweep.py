"""Score dozens of settings from statistics alone: predicted error against size."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.commands import _flags
from vlmcompress.commands._flags import Parser
from vlmcompress.commands._outcome import OK, Outcome
from vlmcompress.common.progress import ProgressBar
from vlmcompress.common.text import parse_size, size, table
from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.runs.sweep import Point, Sweep

GROUP = "compress"
PLACE = 24
MOST_BITS = 16
PLOTS = (".html", ".svg")


def options(parser: Parser) -> None:
    parser.add_argument("stats", metavar="STATS", help="what calibrate wrote")
    _flags.model(parser)
    _flags.target(parser, "leave out what this machine does not run")
    parser.add_argument(
        "--max-bits",
        aliases=["--budget"],
        type=float,
        metavar="BITS",
        help="choose among settings of at most so many bits per weight",
    )
    parser.add_argument("--max-size", metavar="SIZE", help="choose among settings of at most this size, like 2.4GB")
    parser.add_argument("--save", metavar="FILE", help="write the chosen setting as a recipe; .yaml")
    parser.add_argument("--plot", metavar="FILE", help="write predicted error against size; .html or .svg")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of each group of layers to look at; default: 16")
    _flags.settings(parser, "recipe keys that hold for all: skip, kv_cache, vision")
    parser.epilog = (
        "Without --max-bits or --max-size the setting of least predicted error is chosen. Where the statistics hold\n"
        "gradients, errors are the loss's, to second order; they rank settings, and small ones may be far from what a large\n"
        "change costs."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Predict the error of each setting, choose one, write recipe and plot."""
    _check(args)
    from vlmcompress.recipe import resolve
    from vlmcompress.runs import sweep

    values = _flags.recipe_values(args)
    if foreign := [key for key in values if key in ("scheme", "options", "bits")]:
        raise UserError(f"--set {foreign[0]}: a sweep tries these itself; leave it out")
    if values.get("rotate"):
        raise UserError("--set rotate: a sweep predicts errors of the model as it is; leave it out")
    base = {"scheme": "rtn", "options": {"group_size": -1, "bits": 8}}
    target = values.pop("target", None)
    recipe = resolve(values | base).recipe.model_copy(update={"target": target})
    if target is not None:
        from vlmcompress import targets

        targets.get(target)
    limit = None if args.max_size is None else parse_size(args.max_size, "--max-size")
    budgets = sweep.BUDGETS if args.max_bits is None else sorted({*sweep.BUDGETS, args.max_bits})
    with closing(ProgressBar()) as progress:
        scored, _ = sweep.run(recipe, progress, rows=args.rows or sweep.ROWS, budgets=budgets)
    chosen = sweep.choose(scored.points, budget=args.max_bits, nbytes=limit)
    data = {"ok": True, "unit": scored.unit, "left_out": scored.left_out, "chosen": dataclasses.asdict(chosen)}
    data["points"] = [dataclasses.asdict(point) for point in scored.points]
    text = _text(scored, chosen)
    written = {"recipe": (args.save, sweep.recipe_text(chosen, scored.unit))} if args.save else {}
    if args.plot:
        written["plot"] = (args.plot, _plot(scored, chosen, Path(args.plot).suffix, recipe.model.resolve().name))
    for kind, (name, content) in written.items():
        from vlmcompress.common.folders import save

        data[kind] = str(save(Path(name).parent, {kind: (Path(name).name, content)})[kind])
        text += f"\nWrote {name}."
    return OK, data, text


def _check(args: argparse.Namespace) -> None:
    """Raise `UserError` for flags that do not go together, or files that cannot be written."""
    if args.max_bits is not None and args.max_size is not None:
        raise UserError("give one of --max-bits and --max-size")
    if args.max_bits is not None and not 0 < args.max_bits <= MOST_BITS:
        raise UserError(f"--max-bits is {args.max_bits:g}; give bits per weight, more than 0 and at most {MOST_BITS}")
    if args.rows is not None and args.rows < 1:
        raise UserError(f"--rows is {args.rows}; give at least 1")
    if args.plot and Path(args.plot).suffix not in PLOTS:
        raise UserError(f"--plot {args.plot}: name it FILE.html or FILE.svg")
    if args.save and Path(args.save).suffix not in (".yaml", ".yml"):
        raise UserError(f"--save {args.save}: a recipe is written; name it FILE.yaml")
    for name in (args.plot, args.save):
        if name and Path(name).is_dir():
            raise UserError(f"{name} is a folder; name the file to write")


def _text(scored: Sweep, chosen: Point) -> str:
    """The settings as a table."""
    rows: list[tuple] = [("setting", "bits", "weights", "predicted", "")]
    for point in scored.points:
        mark = "chosen" if point is chosen else "best of its size" if point.best else ""
        rows.append((point.name, f"{point.bits:.3f}", size(point.nbytes), f"{point.error:.3g}", mark))
    left = f"\nLeft out, as a layer's shape, the target or the statistics forbid them: {', '.join(scored.left_out)}."
    head = f"{len(scored.points)} settings; predicted error in {scored.unit}"
    return f"{head}\n{table(rows)}{left if scored.left_out else ''}"


def _plot(scored: Sweep, chosen: Point, suffix: str, model: str) -> str:
    """Predicted error against size, as a page or as a picture."""
    from vlmcompress.report.html import render
    from vlmcompress.report.plot import both
    from vlmcompress.report.scatter import legend, tradeoff

    draw = functools.partial(tradeoff, scored.points, scored.unit, chosen)
    if suffix == ".svg":
        return f"{draw()}\n"
    facts = {"points": scored.points, "chosen": chosen, "unit": scored.unit, "model": model}
    return render("sweep.html.j2", chart=both(lambda frame: draw(frame=frame)), legend=legend(scored.points), **facts)
