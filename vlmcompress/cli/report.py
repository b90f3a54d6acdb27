"""Combine the reports of several runs on one page, or show the errors of a checkpoint's layers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    pass

GROUP = "measure"
PLACE = 33
TOP_LAYERS = 12  # layers in the table


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="DIR", nargs="+", help="folder with a results.json, from eval or bench --report"
    )
    parser.add_argument("-o", "--out", metavar="FOLDER", default="report", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a report of other checkpoints in FOLDER")
    parser.add_argument(
        "--errors",
        action="store_true",
        help="print the errors of the layers of a checkpoint DIR, or what changed from one to a second",
    )
    parser.add_argument(
        "--top", metavar="N", default=TOP_LAYERS, help=f"layers of --errors; default: {TOP_LAYERS}; 0: all"
    )
    parser.epilog = (
        "The error of a layer is |X dW^T|^2 / |X W^T|^2 over the tokens of a modality. quantize records it. For schemes\n"
        "without data (rtn, fp8) only the error of the weights is known; with --calib they record both."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Write the page, or print errors. The exit code is 0 even for a failed gate; `eval` returns the gate's code."""
    if args.errors:
        return _errors(args)
    from vlmcompress.evaluation.report import comparison

    files = comparison.write_comparison(args.runs, args.out, overwrite=args.overwrite)
    data = {"ok": True, "files": {kind: str(path) for kind, path in files.items()}}
    tables = comparison.comparison_tables(args.runs)
    text = f"Wrote {files['html']} ({', '.join(path.name for path in files.values())})."
    return OK, data, f"{tables}\n{text}" if tables else text


def _errors(args: argparse.Namespace) -> Outcome:
    """Print the errors of the layers of one checkpoint, or what changed from it to a second."""
    if args.top < 0:
        raise UserError(f"--top is {args.top}; give a number of layers, or 0 for all")
    if len(args.runs) > 2:
        raise UserError(f"--errors compares two checkpoints, not {len(args.runs)}; give one or two")
    from vlmcompress.evaluation.doctor import layer_errors
    from vlmcompress.evaluation.report import layers

    first, *others = [layer_errors.read_errors(Path(folder)) for folder in args.runs]
    other = others[0] if others else None
    return OK, {"ok": True, **layers.layer_errors_json(first, other)}, layers.layers_text(first, other, args.top)
