#!/usr/bin/env python
"""What was measured once, by scripts that are no longer kept: prints the docs' tables of it from `eval/earlier.json`.

    scripts/measure/earlier.py --render NAME    joint, drafts, engines, ...

Each entry has the commit whose `scripts/measure` has its scripts, the day, the figures or the file that has them, and the table
that was printed then. The last line is one JSON object: the entry without its table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "earlier.json"


def main() -> None:
    """Print a table."""
    entries = json.loads(RESULTS.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", required=True, choices=entries)
    entry = entries[parser.parse_args().render]
    print("\n".join(entry.pop("table")))
    print(json.dumps(entry))


if __name__ == "__main__":
    main()
