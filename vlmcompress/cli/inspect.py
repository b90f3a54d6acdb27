"""Draw which parts of an image a reducer keeps, merges and drops."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from vlmcompress.cli import _flags, _process
from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import table

GROUP = "look first"
PLACE = 13


def options(parser: argparse.ArgumentParser) -> None:
    _flags.model(parser)
    parser.add_argument("image", metavar="IMAGE", nargs="+", help="a file; several are the images of one prompt")
    parser.add_argument(
        "--question", metavar="Q", default="", help="text after the images; query-aware methods need it"
    )
    _flags.reducers(parser, required=True)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the picture to write; .png")


def run(args: argparse.Namespace) -> Outcome:
    """Draw which tokens of each image are kept, merged and dropped, and count them."""
    out = Path(args.out)
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out} is a picture; name it FILE.png")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the file to write")
    _flags.read_model_config(args.model)
    _process.import_transformers()
    from vlmcompress.models import load, read_config, spec_for
    from vlmcompress.models.data.encode import encode_prompt
    from vlmcompress.models.data.samples import Sample, open_image
    from vlmcompress.quantization.plan.prompt_cost import too_small
    from vlmcompress.reduction.choice import parse_reducer
    from vlmcompress.reduction.hooks.picture import Counts, decide, sheet
    from vlmcompress.reduction.support import family_problem
    from vlmcompress.utils.folders import save_files

    reducers = [parse_reducer(text) for text in args.reduce]
    model = hub.local(args.model)
    family = spec_for(read_config(model))
    for reducer in reducers:
        if reason := family_problem(family, reducer.method):
            raise UserError(f"--reduce {reducer}: {reason}")
        if "query" in reducer.reducer.NEEDS and not args.question.strip():
            raise UserError(f"--reduce {reducer}: '{reducer.method}' is query-aware; add --question")
    images = [open_image(Path(name), "inspect") for name in args.image]
    vlm = load(model)
    inputs = encode_prompt(Sample("prompt", images, args.question, origin="the prompt"), vlm)
    layouts = [vlm.spec.layout(vlm.processor, *image.size, len(images)) for image in images]
    decisions = [(str(reducer), decide(vlm, inputs, layouts, reducer)) for reducer in reducers]
    for note in {
        f"{reducer}: {text}" for reducer in reducers for layout in layouts for text in too_small(reducer, layout)
    }:
        print(f"warning: {note}", file=sys.stderr)
    png = io.BytesIO()
    sheet(images, layouts, decisions).save(png, "PNG")
    save_files(out.parent, {"picture": (out.name, png.getvalue())})
    pictures = [
        {
            "image": str(name),
            "tokens": layout.tokens,
            "reduced": {label: vars(Counts.of(part[number])) for label, part in decisions},
        }
        for number, (name, layout) in enumerate(zip(args.image, layouts, strict=True))
    ]
    lines = [
        f"{name}\n{table([(label, Counts.of(part[number])) for label, part in decisions])}"
        for number, name in enumerate(args.image)
    ]
    data = {"ok": True, "model": str(args.model), "images": pictures, "file": str(out)}
    return OK, data, "\n".join([*lines, f"Wrote {out}."])
