"""Count the tokens, compute and cache of images before and after a reducer, without reading weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vlmcompress.cli import _flags, _process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.text import parse_pixels, table
from vlmcompress.utils.text import size as size_text

GROUP = "look first"
PLACE = 12
CACHE_BYTES = {"fp8": 1, "bf16": 2}


def options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder with config.json and the processor's files, or an id")
    parser.add_argument(
        "--image-size", metavar="WxH", action="append", required=True, help="may be repeated: images of one prompt"
    )
    _flags.reducers(parser, required=False)
    parser.add_argument("--question", metavar="Q", default="", help="text after the images")
    _flags.kv_cache(parser, "fp8 or bf16; default: the model's own type", default=None, metavar="TYPE")
    parser.epilog = (
        "Prefill and KV cache are those of the language model. The encoder processes whole images, whatever a reducer drops;\n"
        "only resize makes them smaller. It is shown alone and before each reducer."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Count the tokens, their compute and their cache."""
    if args.kv_cache is not None and args.kv_cache not in CACHE_BYTES:
        raise UserError(f"--kv-cache {args.kv_cache}: no such type{did_you_mean(args.kv_cache, CACHE_BYTES)}")
    sizes = [parse_pixels(text, "--image-size", most=999_999_999) for text in args.image_size]
    _flags.check_model(args.model)
    from vlmcompress.reduction.choice import compared

    resize, reducers = compared(args.reduce)
    _process.import_transformers()
    from vlmcompress.quantization.plan import prompt_cost

    model = hub.local(args.model, weights="none")
    costs = prompt_cost.prompt_costs(model, sizes, args.question, reducers, CACHE_BYTES.get(args.kv_cache), resize)
    for note in costs.notes:
        print(f"warning: {note}", file=sys.stderr)
    data = {"ok": True, "model": str(args.model), **costs.to_dict()}
    for image, size in zip(data["images"], args.image_size, strict=True):
        image["size"] = size
    images = [("image", "visual tokens", "rows x columns")]
    for size, layout in zip(args.image_size, costs.layouts, strict=True):
        grids = [f"{piece.rows}x{piece.columns}" for piece in layout.pieces]
        same = [f"{grids.count(grid)} of {grid}" if grids.count(grid) > 1 else grid for grid in dict.fromkeys(grids)]
        images.append((size, f"{layout.tokens:,}", ", ".join(same)))
    full, none = costs.full, costs.text_only
    rows = [("", "visual", "kept", "prompt", "prefill", "KV cache", "of images")]
    for name, cost in {"all": full, **costs.reduced}.items():
        if cost is None:
            rows.append((name, "depends on what the image shows", "", "", "", "", ""))
            continue
        kept, work = cost.visual / max(full.visual, 1), cost.multiply_adds / full.multiply_adds
        cache = size_text(cost.kv_bytes_prompt), size_text(cost.kv_bytes)
        rows.append((name, f"{cost.visual:,}", f"{kept:.1%}", f"{cost.prompt:,}", f"{work:.1%}", *cache))
    steps = [f"{name}: {_steps(cost.blocks)}" for name, cost in costs.reduced.items() if cost and cost.differs]
    share, work = full.visual / full.prompt, 1 - none.multiply_adds / full.multiply_adds
    count = len(args.image_size)
    head = f"{costs.family}: a prompt with {count} image{'s' * (count > 1)} and {costs.text:,} other tokens"
    lines = [head, table(images), "", table(rows), *(["", *steps] if steps else []), ""]
    lines.append(f"Visual tokens are {share:.1%} of the prompt and {work:.1%} of the language model's work on it.")
    return OK, data, "\n".join(lines)


def _steps(blocks: Sequence[int]) -> str:
    """Visual tokens by decoder block as text: each count, and the block from which it applies."""
    starts = [block for block, count in enumerate(blocks) if not block or count != blocks[block - 1]]
    first, *others = [f"{blocks[block]:,} {{}}from block {block} on" for block in starts]
    return ", ".join([first.format("visual tokens "), *(step.format("") for step in others)])
