"""`vlmcompress tokens` and `vlmcompress inspect`: arguments in, `(exit code, data, text)` out."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from vlmcompress.common.text import size as size_text
from vlmcompress.common.text import table
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.recipe.reducer import parse
from vlmcompress.reduction import cost as planning

CACHE_BYTES = {"fp8": 1, "bf16": 2}
Outcome = tuple[int, dict[str, Any], str]


def tokens(args: argparse.Namespace) -> Outcome:
    """`vlmcompress tokens`"""
    if args.kv_cache is not None and args.kv_cache not in CACHE_BYTES:
        raise UserError(f"--kv-cache {args.kv_cache}: no such type{did_you_mean(args.kv_cache, CACHE_BYTES)}")
    sizes = [_size(text) for text in args.image_size]
    chosen = [parse(text) for text in args.reduce]
    found = planning.plan(args.model, sizes, args.question, chosen, CACHE_BYTES.get(args.kv_cache))
    for note in found.notes:
        print(f"warning: {note}", file=sys.stderr)
    data = {"ok": True, "model": str(args.model), **found.to_dict()}
    for image, size in zip(data["images"], args.image_size, strict=True):
        image["size"] = size
    return 0, data, _tokens_text(found, args.image_size)


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)[x×X*]([1-9]\d*)", text)
    if not found or len(text) > 20:
        raise UserError(f"--image-size {text[:40]} is not a size; write it WIDTHxHEIGHT, like 1024x768")
    return int(found[1]), int(found[2])


def _tokens_text(found: planning.Planned, sizes: list[str]) -> str:
    """Images, then costs."""
    images = [("image", "visual tokens", "rows x columns")]
    for size, layout in zip(sizes, found.layouts, strict=True):
        grids = [f"{piece.rows}x{piece.columns}" for piece in layout.pieces]
        same = [f"{grids.count(grid)} of {grid}" if grids.count(grid) > 1 else grid for grid in dict.fromkeys(grids)]
        images.append((size, f"{layout.tokens:,}", ", ".join(same)))
    full, none = found.full, found.text_only
    rows = [("", "visual", "kept", "prompt", "prefill", "KV cache", "of images")]
    for name, cost in {"all": full, **found.reduced}.items():
        if cost is None:
            rows.append((name, "depends on what the image shows", "", "", "", "", ""))
            continue
        kept, work = cost.visual / max(full.visual, 1), cost.multiply_adds / full.multiply_adds
        cache = size_text(cost.kv_bytes_prompt), size_text(cost.kv_bytes)
        rows.append((name, f"{cost.visual:,}", f"{kept:.1%}", f"{cost.prompt:,}", f"{work:.1%}", *cache))
    share, work = full.visual / full.prompt, 1 - none.multiply_adds / full.multiply_adds
    return "\n".join(
        [
            f"{found.family}: a prompt with {len(sizes)} image{'s' * (len(sizes) > 1)} and {found.text:,} other tokens",
            table(images),
            "",
            table(rows),
            f"\nVisual tokens are {share:.1%} of the prompt and {work:.1%} of the language model's work on it.",
        ]
    )


def inspect(args: argparse.Namespace) -> Outcome:
    """`vlmcompress inspect`"""
    from vlmcompress.data.encode import encode_prompt
    from vlmcompress.data.images import open_image
    from vlmcompress.data.samples import Sample
    from vlmcompress.models import load, read_config, spec_for
    from vlmcompress.reduction import refusal
    from vlmcompress.reduction.capture import decide
    from vlmcompress.reduction.picture import Counts, sheet

    out = Path(args.out)
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: a picture is written; name it FILE.png")
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the file to write")
    chosen = [parse(text) for text in args.reduce]
    family = spec_for(read_config(args.model))
    for one in chosen:
        if reason := refusal(family, one.method):
            raise UserError(f"--reduce {one}: {reason}")
        if "query" in one.module.NEEDS and not args.question.strip():
            raise UserError(f"--reduce {one}: '{one.method}' looks at the question; add --question")
    images = [open_image(Path(name), "--image") for name in args.image]
    vlm = load(args.model)
    inputs = encode_prompt(Sample("prompt", images, args.question, origin="the prompt"), vlm)
    layouts = [vlm.spec.layout(vlm.processor, *image.size, len(images)) for image in images]
    found = [(str(one), decide(vlm, inputs, layouts, one)) for one in chosen]
    for note in {f"{one}: {text}" for one in chosen for layout in layouts for text in planning.too_small(one, layout)}:
        print(f"warning: {note}", file=sys.stderr)
    _write(out, sheet(images, layouts, found))
    shown = [
        {
            "image": str(name),
            "tokens": layout.tokens,
            "reduced": {label: vars(Counts.of(part[number])) for label, part in found},
        }
        for number, (name, layout) in enumerate(zip(args.image, layouts, strict=True))
    ]
    lines = [
        f"{name}\n{table([(label, Counts.of(part[number])) for label, part in found])}"
        for number, name in enumerate(args.image)
    ]
    return (
        0,
        {"ok": True, "model": str(args.model), "images": shown, "file": str(out)},
        "\n".join([*lines, f"Wrote {out}."]),
    )


def _write(out: Path, picture: Any) -> None:
    """Write a PNG, whole or not at all."""
    from vlmcompress.common import folders as atomic

    part = out.with_name(f".{out.name}.part")
    with atomic.user_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            picture.save(part, "PNG")
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
