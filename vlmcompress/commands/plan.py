"""Plan how a model is served: whether it fits, for how many requests, in which format, from config.json alone."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.commands import _flags, _lean
from vlmcompress.commands._outcome import BAD_INPUT, OK, Outcome
from vlmcompress.commands._parser import Parser
from vlmcompress.commands._plan_text import as_data, plan_text, sizes_text
from vlmcompress.common import hub
from vlmcompress.common.registry import TARGETS
from vlmcompress.common.text import parse_size
from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.capacity.model import Model
    from vlmcompress.capacity.plan import Capacity, Request

GROUP = "look first"
PLACE = 10
MOST = 10_000_000
SIZES = "224x224,448x448,672x672,896x896,1024x1024,1344x1344,2048x2048"


def options(parser: Parser) -> None:
    """Add the verb's flags."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with config.json, weights and processor may be missing; or an id on the Hub",
    )
    parser.add_argument("--target", type=TARGETS.name, help="machine to serve on; see vlmcompress list targets")
    _flags.tensor_parallel(parser, "devices that share the model (tensor parallel)")
    parser.add_argument(
        "--image-size", aliases=["--image"], default="1024x1024", metavar="WxH", help="of an image; default: 1024x1024"
    )
    parser.add_argument(
        "--images-per-request", aliases=["--images"], type=int, metavar="N", help="default: 1, or 0 with --video"
    )
    parser.add_argument("--video", metavar="FRAMESxWxH", help="a video, in frames that the model sees")
    parser.add_argument(
        "--text-tokens",
        aliases=["--text"],
        type=int,
        default=256,
        metavar="N",
        help="of a request, the chat template's included; default: 256",
    )
    parser.add_argument(
        "--out-tokens", aliases=["--out"], type=int, default=256, metavar="N", help="of its answer; default: 256"
    )
    parser.add_argument(
        "--reduce", metavar="METHOD[:KEEP]", help="compare with a visual-token reducer, e.g. coverage:0.5"
    )
    _flags.kv_cache(parser, "fp8, int8_per_token_head, ...; default: the model's", default="auto", metavar="TYPE")
    parser.add_argument(
        "--speculative", metavar="METHOD[:N]", help="mtp, ngram or suffix, N tokens at once: what drafting takes"
    )
    parser.add_argument("--memory", metavar="SIZE", help="of a device, like 80GB; default: the target's")
    parser.add_argument("--reserve", metavar="SIZE", help="for activations and the like; default: an estimate")
    parser.add_argument("--kv-cache-memory", metavar="SIZE", help="of the cache, instead of what memory leaves")
    parser.add_argument("--sizes", nargs="?", const=SIZES, metavar="WxH,...", help="a table over image sizes")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw that table")


def run(args: argparse.Namespace) -> Outcome:
    """Work out the plan. 2 when nothing fits."""
    given = _given(args)
    sizes = [_size(text.strip(), "--sizes") for text in (args.sizes or SIZES).split(",")]
    _check_plot(args.plot)
    _lean.import_transformers()
    from vlmcompress.capacity.model import open_model
    from vlmcompress.capacity.plan import Request, plan
    from vlmcompress.capacity.visual import Pictures
    from vlmcompress.recipe.reducer import parse

    chosen = parse(args.reduce) if args.reduce else None
    asked = Request(Pictures(*given.pop("pictures")), reduce=chosen, **given)
    model = open_model(Path(hub.local(args.model, weights="headers")))
    found = plan(model, asked)
    data, text = as_data(found), plan_text(found)
    if args.sizes or args.plot:
        rows = _sweep(model, asked, sizes, found)
        data["sizes"] = rows
        text += "\n\n" + sizes_text(rows, found)
        if args.plot:
            _draw(Path(args.plot), rows, found)
            text += f"\n\n  drawn into {args.plot}"
    return OK if found.best or _unknown(found) else BAD_INPUT, data, text


def _unknown(found: Capacity) -> bool:
    """Whether there is no verdict, as the machine's memory is not known."""
    return all(row.space is None for row in found.rows)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `capacity.plan.Request` but its reducer, checked; `pictures` are images and video."""
    from vlmcompress import targets
    from vlmcompress.capacity import speculation

    counts = {"--tp": 1, "--text-tokens": 0, "--out-tokens": 1, "--images-per-request": 0}
    for flag, least in counts.items():
        value = getattr(args, flag[2:].replace("-", "_")) or 0
        if not least <= value <= MOST:
            raise UserError(f"{flag} {value} should be a whole number from {least} to {MOST:,}")
    image = _size(args.image_size, "--image-size")
    images = args.images_per_request if args.images_per_request is not None else int(args.video is None)
    if images > 10_000:
        raise UserError(f"--images-per-request {images} is more than a request can hold; give up to 10,000")
    named = {"memory": "--memory", "reserve": "--reserve", "space": "--kv-cache-memory"}
    given = {key: getattr(args, flag[2:].replace("-", "_")) for key, flag in named.items()}
    bytes_of: dict[str, Any] = {key: text and parse_size(text, named[key]) for key, text in given.items()}
    return {
        "pictures": ((image,) * images, _video(args.video)),
        "text": args.text_tokens,
        "out": args.out_tokens,
        "target": targets.get(args.target) if args.target else None,
        "target_name": args.target,
        "tp": args.tp,
        "kv_cache": args.kv_cache,
        "speculative": speculation.parse(args.speculative) if args.speculative else None,
        **bytes_of,
    }


def _check_plot(file: str | None) -> None:
    """Refuse, before anything is worked out, a file that could not be drawn into."""
    if file is None:
        return
    path = Path(file)
    if path.suffix != ".svg":
        raise UserError(f"--plot {file} should end in .svg")
    if not path.parent.is_dir():
        raise UserError(f"--plot {file}: {path.parent} does not exist; make the folder first")


def _size(text: str, flag: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d{0,6})[x×X*]([1-9]\d{0,6})", text)
    if not found:
        raise UserError(f"{flag} {text[:40]} is not a size; write it WIDTHxHEIGHT, like 1024x768")
    return int(found[1]), int(found[2])


def _video(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,6})[x×X*]([1-9]\d{0,6})[x×X*]([1-9]\d{0,6})", text)
    if not found:
        raise UserError(f"--video {text[:40]} is not a size; write it FRAMESxWIDTHxHEIGHT, like 16x640x360")
    return int(found[1]), int(found[2]), int(found[3])


def _sweep(model: Model, asked: Request, sizes: list[tuple[int, int]], found: Capacity) -> list[dict[str, Any]]:
    """A row for each image size: what a request takes, and how many the recommended format serves at once."""
    from vlmcompress.capacity.plan import plan
    from vlmcompress.capacity.visual import Pictures

    number = max(len(asked.pictures.images), 1)
    best = found.best
    rows = []
    for size in sizes:
        one = plan(model, replace(asked, pictures=Pictures((size,) * number, asked.pictures.video)), rows=False)
        loads = {}
        for name, load in one.loads.items():
            space = best.space if best else None
            if space is not None:
                space += found.encoder + found.reserve - one.encoder - one.reserve if asked.space is None else 0
            enough = space is not None and space - one.pool.block_bytes >= load.bytes
            flight = one.defaults.in_flight(load.context)
            loads[name] = {
                "visual": load.visual,
                "context": load.context,
                "bytes": load.bytes,
                "requests": float(one.pool.requests(space or 0, load.context, flight)) if enough else 0.0,
            }
        rows.append({"size": f"{size[0]}x{size[1]}", "pixels": size[0] * size[1], "loads": loads})
    return rows


def _draw(file: Path, rows: list[dict[str, Any]], found: Capacity) -> None:
    from vlmcompress.report.charts.capacity import requests

    rows = sorted(rows, key=lambda row: row["pixels"])
    names = list(rows[0]["loads"])
    title = "Requests at once" + (f" in {found.best.weights.name}" if found.best else "")
    if found.request.target:
        title += f" on {found.request.target.title}"
    drawn = requests(
        title,
        [row["size"] for row in rows],
        [row["pixels"] for row in rows],
        {name: [row["loads"].get(name, {}).get("requests") for row in rows] for name in names},
    )
    if not drawn:
        raise UserError(f"--plot {file}: no size fits, so there is nothing to draw")
    file.write_text(str(drawn) + "\n", encoding="utf-8")
