#!/usr/bin/env python
"""How many visual tokens `pixelprune` keeps, by kind of image and threshold. Needs no model, only processors.

    scripts/measure/kept_share.py             measures, into eval/kept_share.json
    scripts/measure/kept_share.py --render    prints the docs' table

Pages are those of the suite `pages` without its labels, photographs the backgrounds of eval/photo (fetched once, see
scripts/train/assemble_demo.py), screenshots are drawn here: windows with menus, buttons, icons and text on a plain, shaded or
photographed desktop. These three are cut as Qwen2.5-VL does, into units of 28 pixels; labels, things to box and scenes as
demo-qwen does, into 16. Labels and things are those of the calibration split, scenes of validation. Screenshots are given as
drawn and at two thirds of that size, by bicubic interpolation. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "kept_share.json"
sys.path.insert(0, str(ROOT))
THRESHOLDS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
COUNT = 60  # images of a kind
Color = tuple[int, int, int]
MENUS = ("File", "Edit", "View", "Insert", "Format", "Tools", "Window", "Help")
BUTTONS = ("OK", "Cancel", "Apply", "Save", "Open", "Search", "Next", "Back", "Delete", "Share", "Print", "Close")


def screenshot(number: int, photographs: list[Image.Image]) -> Image.Image:
    """Draw a desktop with one to four windows, in RGB; a function of `number` and the photographs."""
    rng = Random(f"screenshot {number}")
    width, height = rng.choice(((1280, 800), (1440, 900), (1920, 1080), (1024, 768)))
    color = tuple(rng.randrange(40, 200) for _ in range(3))
    kind = rng.choice(("plain", "plain", "shaded", "photograph"))
    screen = Image.new("RGB", (width, height), color)
    if kind == "shaded":
        rows = np.linspace(0.5, 1, height)[:, None, None] * np.array(color) * np.ones((1, width, 1))
        screen = Image.fromarray(rows.astype(np.uint8))
    elif kind == "photograph":
        screen = rng.choice(photographs).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(screen)
    for icon in range(rng.randint(0, 6)):
        draw.rounded_rectangle(
            (24, 24 + 90 * icon, 72, 72 + 90 * icon), 8, rng.choice(("#e8b020", "#3070d0", "#40a060"))
        )
        draw.text((24, 76 + 90 * icon), rng.choice(MENUS), "white", ImageFont.load_default(14))
    for _ in range(rng.randint(1, 4)):
        left, top = rng.randrange(width // 2), rng.randrange(height // 2)
        _window(draw, rng, (left, top, rng.randint(left + 400, width + 100), rng.randint(top + 260, height + 50)))
    draw.rectangle((0, height - 40, width, height), "#202428")
    for place in range(rng.randint(3, 9)):
        draw.ellipse(
            (12 + 48 * place, height - 34, 40 + 48 * place, height - 6), rng.choice(("#d04040", "#50a0e0", "#e0e0e0"))
        )
    draw.text(
        (width - 60, height - 28),
        f"{rng.randrange(24):02d}:{rng.randrange(60):02d}",
        "white",
        ImageFont.load_default(15),
    )
    return screen


def _window(draw: ImageDraw.ImageDraw, rng: Random, box: tuple[int, int, int, int]) -> None:
    """Draw a window with a title, a menu, a side bar, lines of text and buttons."""
    from vlmcompress.evaluation.accuracy.pages import WORDS

    left, top, right, bottom = box
    paper, ink, bar = rng.choice(
        (("#ffffff", "#202020", "#e4e6ea"), ("#1e2228", "#d8dce0", "#2c323a"), ("#f6f6f4", "#101010", "#d0d4da"))
    )
    font = ImageFont.load_default(rng.choice((13, 14, 15, 16)))
    draw.rectangle(box, paper, "#808080")
    draw.rectangle((left, top, right, top + 32), bar)
    draw.text((left + 12, top + 7), " ".join(rng.sample(WORDS, 2)).title(), ink, font)
    draw.text((right - 24, top + 7), "x", ink, font)
    for place, menu in enumerate(MENUS[: rng.randint(3, 8)]):
        draw.text((left + 12 + 62 * place, top + 38), menu, ink, font)
    draw.line((left, top + 62, right, top + 62), "#808080")
    side = rng.choice((0, 0, 140))
    if side:
        draw.rectangle((left + 1, top + 63, left + side, bottom - 1), bar)
        for row in range(rng.randint(3, 8)):
            draw.ellipse((left + 10, top + 76 + 30 * row, left + 26, top + 92 + 30 * row), "#5080c0")
            draw.text((left + 34, top + 76 + 30 * row), rng.choice(WORDS), ink, font)
    for row in range(rng.randint(2, 12)):
        place = top + 80 + 24 * row
        if place > bottom - 70:
            break
        words = rng.choices(WORDS, k=max(1, min(rng.randint(2, 12), (right - left - side - 40) // 70)))
        draw.text((left + side + 20, place), " ".join(words), ink, font)
    for place, name in enumerate(rng.sample(BUTTONS, rng.randint(1, 3))):
        end = right - 16 - 96 * place
        draw.rounded_rectangle((end - 84, bottom - 44, end, bottom - 14), 5, "#3060c0" if not place else bar, "#808080")
        draw.text((end - 70, bottom - 38), name, "white" if not place else ink, font)


def kinds() -> Iterator[tuple[str, str, list[Image.Image]]]:
    """Name, processor and images of each kind."""
    from pyarrow import parquet

    from eval.photo.pictures import BACKGROUND, fetch
    from vlmcompress.evaluation.accuracy import pages

    album = fetch(ROOT / "build" / "photo")
    backgrounds = [
        album.image(number).convert("RGB")
        for split in ("train", "validation")
        for number in album.numbers(split, BACKGROUND)
    ][:COUNT]
    families = [family for family in pages.FAMILIES if family != "label"]
    for family in families:
        yield f"pages, {family}", "large", [pages.draw(family, number) for number in range(COUNT // 4)]
    drawn = [screenshot(number, backgrounds) for number in range(COUNT)]
    yield "screenshots", "large", drawn
    smaller = [image.resize((image.width * 2 // 3, image.height * 2 // 3), Image.Resampling.BICUBIC) for image in drawn]
    yield "screenshots, resized", "large", smaller
    yield "photographs", "large", backgrounds
    for name, file in (
        ("labels", ROOT / "build/data/qwen-pages/calibration.parquet"),
        ("things to box", ROOT / "build/data/qwen-boxes/calibration.parquet"),
        ("scenes", ROOT / "eval/demo/data/qwen/validation.parquet"),
    ):
        rows = [row["image"] for row in parquet.read_table(file, columns=["image"]).to_pylist() if row["image"]]
        images = dict.fromkeys(image for row in rows for image in row)
        yield name, "demo", [Image.open(io.BytesIO(image)).convert("RGB") for image in [*images][:COUNT]]


def measure() -> dict[str, dict]:
    """By kind, the number of images, of their tokens on average, and the mean share of an image's that is kept by threshold."""
    from transformers import AutoImageProcessor, Qwen2VLImageProcessor

    from vlmcompress.reduction import methods
    from vlmcompress.reduction.hooks.pixels import unit_pixels
    from vlmcompress.reduction.methods import Signals
    from vlmcompress.reduction.methods.pixelprune import PixelPrune

    processors = {
        "large": Qwen2VLImageProcessor(),
        "demo": AutoImageProcessor.from_pretrained(ROOT / "eval/demo/demo-qwen"),
    }
    measured = {}
    for name, which, images in kinds():
        processor, shares, tokens = processors[which], {threshold: [] for threshold in THRESHOLDS}, []
        for image in images:
            made = processor([image], return_tensors="pt")
            frames, rows, columns = made["image_grid_thw"][0].tolist()
            grid = frames, rows // processor.merge_size, columns // processor.merge_size
            (pixels,) = unit_pixels(made["pixel_values"], [grid], True, processor)
            signals = Signals(grid, pixels=pixels, finite=True)
            tokens.append(signals.n)
            for threshold in THRESHOLDS:
                kept = len(methods.reduce(PixelPrune(threshold=threshold), signals).anchor)
                shares[threshold].append(kept / signals.n)
        measured[name] = {
            "images": len(images),
            "tokens": float(np.mean(tokens)),
            "kept": {str(threshold): float(np.mean(values)) for threshold, values in shares.items()},
        }
        print(name, measured[name], file=sys.stderr, flush=True)
    return measured


def render(measured: dict[str, dict]) -> str:
    """The docs' table."""
    lines = [f"| kind | images | tokens | {' | '.join(f'{value:g}' for value in THRESHOLDS)} |", f"|---|{'---:|' * 8}"]
    for name, row in measured.items():
        shares = " | ".join(f"{row['kept'][str(threshold)]:.0%}" for threshold in THRESHOLDS)
        lines.append(f"| {name} | {row['images']} | {row['tokens']:.0f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    if not parser.parse_args().render:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    measured = json.loads(RESULTS.read_text())
    print(render(measured))
    print(json.dumps({name: row["kept"]["0.0"] for name, row in measured.items()}))


if __name__ == "__main__":
    main()
