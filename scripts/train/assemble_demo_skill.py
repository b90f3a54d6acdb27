#!/usr/bin/env python3
"""Put a demo together that describes scenes, gives boxes, reads labels or watches clips.

scripts/train/assemble_demo_skill.py SKILL qwen|llava [-o DIR]     the checkpoint, build/demo-MODEL-SKILL

SKILL is describe, boxes, pages or clips; pages are read and clips watched by qwen alone.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("skill", choices=("describe", "boxes", "pages", "clips"))
    parser.add_argument("model", choices=("qwen", "llava"))
    parser.add_argument("-o", "--output", type=Path, help="folder of the checkpoint; default: build/demo-MODEL-SKILL")
    args = parser.parse_args()
    from eval.demo.skills import assemble
    from vlmcompress.utils.errors import UserError

    try:
        folder = args.output or ROOT / f"build/demo-{args.model}-{args.skill}"
        assemble.assemble(args.skill, args.model, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
