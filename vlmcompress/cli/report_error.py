"""Show each layer's error by modality, and what changed between two checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.evaluation.doctor.layer_errors import LayerErrors

GROUP = "measure"
PLACE = 34
TOP_LAYERS = 12  # layers in the table


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="OUT", help="folder written by vlmcompress quantize")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a second one: show what changed from OUT to OTHER")
    parser.add_argument("-o", "--out", metavar="FILE", help="write a page with heat maps; .html")
    parser.add_argument(
        "--top", metavar="N", default=TOP_LAYERS, help=f"layers in the table; default: {TOP_LAYERS}; 0: all"
    )
    parser.add_argument("--stats", metavar="STATS", help="measure the errors with these statistics; needs --model")
    parser.add_argument("--model", metavar="MODEL", help="the original, for --stats")
    parser.epilog = (
        "The error of a layer is |X dW^T|^2 / |X W^T|^2 over the calibration tokens of a modality. quantize records it. For\n"
        "schemes without data (rtn, fp8) only the error of the weights is known; --stats measures the rest."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Read or measure the errors, and write a page of them with `--out`."""
    from vlmcompress.evaluation.report import layers
    from vlmcompress.utils.folders import save_files

    if args.top < 0:
        raise UserError(f"--top is {args.top}; give a number of layers, or 0 for all")
    if bool(args.stats) != bool(args.model):
        raise UserError("--stats and --model belong together; give both or none")
    if args.out is not None and Path(args.out).suffix not in (".html", ".htm"):
        raise UserError(f"--out {args.out} is a page; name it FILE.html")
    first, *rest = _errors(args)
    other = rest[0] if rest else None
    data = {"ok": True, **layers.layer_errors_json(first, other)}
    text = layers.layers_text(first, other, args.top)
    if args.out is not None:
        out = Path(args.out)
        if out.is_dir():
            raise UserError(f"{out} is a folder; name the file to write")
        data["file"] = str(save_files(out.parent, {"html": (out.name, layers.layers_page(first, other))})["html"])
        text += f"\n\nWrote {out}."
    return OK, data, text


def _errors(args: argparse.Namespace) -> list[LayerErrors]:
    """The errors of the checkpoint, and of the other one if given."""
    folders = [Path(folder) for folder in (args.checkpoint, args.other) if folder is not None]
    if args.stats is None:
        from vlmcompress.evaluation.doctor import layer_errors

        return [layer_errors.read_errors(folder) for folder in folders]
    from vlmcompress.evaluation.doctor import measured_errors
    from vlmcompress.quantization.calibration import statistics_folder
    from vlmcompress.utils import hub

    statistics, model = statistics_folder.read_statistics(Path(args.stats)), hub.local(args.model)
    if not model.is_dir():
        raise UserError(f"{model} is not a folder; give the original model of the statistics")
    return [measured_errors.measure(folder, statistics, model) for folder in folders]
