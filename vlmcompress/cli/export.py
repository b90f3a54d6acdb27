"""Write a compressed checkpoint, also another tool's, in another format, without quantizing again."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from pathlib import Path

from vlmcompress.cli import _flags, _process
from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.text import duration, size, table

GROUP = "carry on"
PLACE = 41


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="OUT", help="folder of the quantized checkpoint, or its id on the Hub")
    about = "see vlmcompress list formats"
    parser.add_argument("--format", metavar="FORMAT", default="compressed-tensors", help=about)
    about = "q8_0 or f16: type of GGUF's tower and projector; default: q8_0"
    parser.add_argument("--mmproj", choices=("q8_0", "f16"), help=about)
    parser.add_argument("-o", "--out", metavar="NEW", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace NEW once the new one is complete")
    parser.epilog = (
        "Codes and scales are only packed differently: unpacked, they are equal bit for bit. Layers that the format cannot\n"
        "hold are refused by name. Of other tools it reads compressed-tensors, AutoAWQ (gemm), GPTQ (v1, v2), auto-round,\n"
        "FP8, ModelOpt and MLX, from safetensors only."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Write the checkpoint in the other format."""
    from vlmcompress.utils import hub

    _flags.read_model_config(args.checkpoint, family=False)
    FORMATS.require(args.format)
    source, out = hub.local(args.checkpoint), Path(args.out)
    _process.import_transformers()
    from vlmcompress.export import manifest
    from vlmcompress.export.convert import convert

    earlier = manifest.read_manifest(source)["warnings"] if (source / manifest.MANIFEST).is_file() else ()
    with closing(ProgressBar()) as bar:
        record = convert(
            source,
            out,
            args.format,
            mmproj=args.mmproj,
            overwrite=args.overwrite,
            progress=lambda written, total: bar("writing", written, total),
        )
    seconds, changed, sizes = time.monotonic() - args.began, record["converted"], record["size"]
    warnings = [line for line in record["warnings"] if line not in earlier]
    for line in warnings:
        print(f"warning: {line}", file=sys.stderr)
    data = {"ok": True, "out": str(out), **changed, **sizes, "warnings": warnings, "seconds": round(seconds, 3)}
    rows = [
        ("format", f"{changed['from']} -> {changed['to']}"),
        ("weights", size(sizes["weights_after"])),
        ("time", duration(seconds)),
    ]
    return OK, data, f"{out}\n{table(rows)}"
