"""Combine the reports of several runs on one page, or show the errors of a checkpoint's layers."""

from __future__ import annotations

import argparse
from pathlib import Path

from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.errors import UserError

GROUP = "measure"
PLACE = 33


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
    parser.epilog = (
        "The error of a layer is |X dW^T|^2 / |X W^T|^2 over the tokens of a modality. quantize records it. For schemes\n"
        "without data (rtn, fp8) only the error of the weights is known; with --calib they record both."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Write the page, or print errors. The exit code is 0 even for a failed gate; `eval` returns the gate's code."""
    if args.errors:
        if len(args.runs) > 2:
            raise UserError(f"--errors compares two checkpoints, not {len(args.runs)}; give one or two")
        from vlmcompress.evaluation.report import layers

        checkpoints = [layers.read_errors(Path(folder)) for folder in args.runs]
        return OK, {"ok": True, **layers.errors_json(*checkpoints)}, layers.errors_text(*checkpoints)
    from vlmcompress.evaluation.report import comparison

    files, tables = comparison.write_comparison(args.runs, args.out, overwrite=args.overwrite)
    data = {"ok": True, "files": {kind: str(path) for kind, path in files.items()}}
    return OK, data, f"{tables}\nWrote {files['html']} ({', '.join(path.name for path in files.values())})."
