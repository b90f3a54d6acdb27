"""Combine reports on one page, send them to a tracker or into a model card, or show the errors of layers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import TRACKERS

GROUP = "measure"
PLACE = 33


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="DIR", nargs="+", help="folder with a results.json, from eval or bench --report"
    )
    parser.add_argument(
        "-o", "--out", metavar="FOLDER", help="folder to write; default, without --to and --card: report"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a report of other checkpoints in FOLDER")
    parser.add_argument(
        "--to",
        choices=tuple(TRACKERS),
        help="send each report to this experiment tracker, by its own client and settings",
    )
    parser.add_argument("--card", metavar="OUT", help="write the accuracy into the card of OUT, for the Hub")
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
    """Write the page or the card, send reports, or print errors.

    The exit code is 0 even for a failed gate; `eval` returns the gate's code.
    """
    if args.errors:
        if args.to or args.card:
            raise UserError("--errors prints and sends nothing; leave out --to and --card")
        if len(args.runs) > 2:
            raise UserError(f"--errors compares two checkpoints, not {len(args.runs)}; give one or two")
        from vlmcompress.evaluation.report import layers

        checkpoints = [layers.read_errors(Path(folder)) for folder in args.runs]
        return OK, {"ok": True, **layers.errors_json(*checkpoints)}, layers.errors_text(*checkpoints)
    from vlmcompress.evaluation import trackers
    from vlmcompress.evaluation.report import comparison, model_index
    from vlmcompress.evaluation.results import load_results

    data, lines = dict[str, Any](ok=True), list[str]()
    runs = [load_results(folder) for folder in args.runs]
    if args.out or not (args.to or args.card):
        files, tables = comparison.write_comparison(args.runs, args.out or "report", overwrite=args.overwrite)
        data["files"] = {kind: str(path) for kind, path in files.items()}
        lines += [tables, f"Wrote {files['html']} ({', '.join(path.name for path in files.values())})."]
    if args.card:
        data["card"] = str(model_index.write_results(runs, Path(args.card)))
        lines.append(f"Wrote the accuracy into {data['card']}.")
    if args.to:
        data["tracked"] = [trackers.send(run, args.to) for run in runs]
        lines += data["tracked"]
    return OK, data, "\n".join(lines)
