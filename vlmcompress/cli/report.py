"""Combine the reports of several runs on one page."""

from __future__ import annotations

import argparse

from vlmcompress.cli._outcome import OK, Outcome

GROUP = "measure"
PLACE = 33


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="DIR", nargs="+", help="folder with a results.json, from eval or bench --report"
    )
    parser.add_argument("-o", "--out", metavar="FOLDER", default="report", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace a report of other checkpoints in FOLDER")


def run(args: argparse.Namespace) -> Outcome:
    """Write the page. The exit code is 0 even for a failed gate; `eval` returns the gate's code."""
    from vlmcompress.evaluation.report import comparison

    files = comparison.write_comparison(args.runs, args.out, overwrite=args.overwrite)
    data = {"ok": True, "files": {kind: str(path) for kind, path in files.items()}}
    tables = comparison.comparison_tables(args.runs)
    text = f"Wrote {files['html']} ({', '.join(path.name for path in files.values())})."
    return OK, data, f"{tables}\n{text}" if tables else text
