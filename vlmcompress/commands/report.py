"""`vlmcompress report`: reports of runs that were made before, one or many."""

from __future__ import annotations

import argparse
from typing import Any


def options(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "runs", metavar="DIR", nargs="+", help="folder with a results.json, from eval or bench --report"
    )
    parser.add_argument("-o", "--out", metavar="FOLDER", default="report", help="folder to write; default: report")


def run_verb(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Exit code, data, text. It reports and doesn't judge: a failed gate is for `eval` to exit with."""
    from vlmcompress.report.runs import write_comparison

    files = write_comparison(args.runs, args.out)
    data = {"ok": True, "files": {kind: str(path) for kind, path in files.items()}}
    return 0, data, f"Wrote {files['html']} ({', '.join(path.name for path in files.values())})."
