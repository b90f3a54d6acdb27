#!/usr/bin/env python
"""Processor time of every served reducer's choice beside that of the encoder whose tokens it chooses from.

    scripts/measure/choosing_speed.py             measure, on one thread, and write eval/choosing.json
    scripts/measure/choosing_speed.py --tokens 576    measure one size anew
    scripts/measure/choosing_speed.py --render    print the docs' table of the last measurement

Encoders have the shapes of CLIP ViT-L/14, SigLIP So400m/14 and Qwen2.5-VL's (four patches a token), random weights and
bfloat16. Their layers are alike, so one is run and its time multiplied by their number; of Qwen2.5-VL's, one with windows
and one with full attention. Tokens are random, in groups, and as wide as LLaVA-1.5-7B's. A method keeps a quarter, as in the
engine's plugin: with the values of its signals not looked at, and its rows applied. Methods within the encoder's layers
(`tome`, `dymu`) merge in all of ViT-L's but the last. Encoders and methods take turns; single images are the median of the
rounds, eight images the time of one round. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from vlmcompress.reduction import methods as reducers
from vlmcompress.reduction.methods import REGISTRY, Grid, Merger, Signals, learned

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "choosing.json"
GRIDS: dict[int, Grid] = {256: (1, 16, 16), 576: (1, 24, 24), 1280: (1, 32, 40), 4096: (1, 64, 64)}
KEEP, WIDTH = 0.25, 4096
LAYERS, KEYS, HEADS = 23, 1024, 16  # of ViT-L/14: layers that merge, and the keys in each
IMAGES = 8
MOST = (
    1280  # tokens of an image of which eight are timed, too, and that all encoders are timed at; of eight ViT-L alone
)
METHODS = [name for name in REGISTRY.names() if REGISTRY.get(name).SERVED and name != "litevlm"]  # that chooses images


def drawn(tokens: int, seed: int) -> Signals:
    """Make the signals of an image of so many tokens, a twentieth as many groups of alike ones."""
    draw = torch.Generator().manual_seed(seed)

    def alike(width: int, groups: int = max(2, tokens // 20)) -> Tensor:
        centres = torch.randn(groups, width, generator=draw)
        rows = centres[torch.randint(groups, (tokens,), generator=draw)]
        return (rows + torch.randn(tokens, width, generator=draw) / 2).bfloat16()

    words: dict[str, Any] = {"query": torch.randn(20, WIDTH, generator=draw).bfloat16()}
    words["query_keys"] = torch.randn(20, KEYS, generator=draw).bfloat16()
    fields = {"features": alike(WIDTH), "keys": alike(KEYS), "heads": HEADS, "saliency": torch.rand(tokens)} | words
    return Signals(GRIDS[tokens], **fields, windowed=torch.rand(tokens), finite=True)


def chooser(name: str, tokens: int) -> Callable[[Signals], None]:
    """A function that chooses and applies as the engine's plugin does."""
    method, chosen = REGISTRY.get(name), {"keep": KEEP}
    network = learned.Network(learned.initial(torch.zeros(WIDTH), torch.ones(WIDTH), 64, 0))
    chosen |= {"network": network, "thresholds": (0.9,) * LAYERS}
    fields = {field.name for field in dataclasses.fields(method.Options)}
    options = method.Options(**{key: value for key, value in chosen.items() if key in fields})
    count = round(KEEP * tokens)

    def choose(image: Signals) -> None:
        result = reducers.reduce(method, image, options, check=False)
        result.apply(image.features)

    def merge(image: Signals) -> None:
        merger = Merger(method, options, [image.grid], LAYERS, counts=[count])
        keys = states = image.keys[None]
        for layer in range(LAYERS):
            merger.bias(states.dtype)
            states = keys = merger.merge(layer, states, keys, HEADS)

    return torch.no_grad()(choose if hasattr(method, "reduce") else merge)


def encoders(tokens: int, images: int) -> dict[str, Callable[[], float]]:
    """Functions that run an encoder's layers of each kind, and return seconds of all its layers."""
    from transformers import AutoConfig, CLIPVisionConfig, SiglipVisionConfig
    from transformers.models.clip.modeling_clip import CLIPEncoderLayer
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    def layers(kinds: list[tuple[Any, int, dict[str, Any]]], states: Tensor) -> Callable[[], float]:
        def run() -> float:
            return sum(count * timed(partial(layer, states, **settings)) for layer, count, settings in kinds)

        return torch.no_grad()(run)

    def layer(kind: Any, config: Any) -> Any:
        config._attn_implementation = "sdpa"
        return kind(config).bfloat16().eval()

    clip = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
    vit = [(layer(CLIPEncoderLayer, clip), 24, {"attention_mask": None})]
    runs = {"CLIP ViT-L/14": layers(vit, states(images, tokens + 1, 1024))}
    if images > 1 or tokens > MOST:
        return runs
    siglip = SiglipVisionConfig(hidden_size=1152, intermediate_size=4304, num_attention_heads=16)
    so400m = [(layer(SiglipEncoderLayer, siglip), 27, {"attention_mask": None})]
    qwen = AutoConfig.for_model("qwen2_5_vl").vision_config
    qwen.hidden_size, qwen.intermediate_size, qwen.num_heads, patches = 1280, 3420, 16, 4 * tokens
    angles, block = torch.randn(patches, 80), layer(Qwen2_5_VLVisionBlock, qwen)
    kinds = []
    for count, span in ((28, 64), (4, patches)):  # layers with windows of 64 patches, and with full attention
        starts = torch.arange(0, patches + 1, span, dtype=torch.int32)
        kinds.append((block, count, {"cu_seqlens": starts, "position_embeddings": (angles.cos(), angles.sin())}))
    runs["SigLIP So400m"] = layers(so400m, states(1, tokens, 1152))
    return runs | {"Qwen2.5-VL": layers(kinds, states(patches, 1280))}


def states(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def timed(run: Callable[[], Any]) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Measure a row for each size, number of images, and encoder or method."""
    rows = []
    for tokens in sizes:
        for images, turns in ((1, rounds), (IMAGES, 1)) if tokens <= MOST else ((1, rounds),):
            runs: dict[str, Callable[[], float]] = dict(encoders(tokens, images))
            made = [drawn(tokens, seed) for seed in range(images)]
            for name in METHODS:
                choose = chooser(name, tokens)
                choose(made[0])
                runs[name] = lambda choose=choose, made=made: timed(lambda: [choose(image) for image in made])
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(turns):
                for name, run in runs.items():
                    taken[name].append(run())
                print(f"{tokens} tokens, {images} images: round {number + 1} of {turns}", file=sys.stderr, flush=True)
            for name, seconds in taken.items():
                row = {"tokens": tokens, "images": images, "what": name, "rounds": turns}
                rows.append(row | {"ms": round(1000 * statistics.median(seconds), 2)})
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """Render milliseconds of encoders and methods, single images and eight, and the share of ViT-L's time at 576 tokens."""
    times = {(row["what"], row["tokens"], row["images"]): row["ms"] for row in rows}
    sizes = sorted({row["tokens"] for row in rows})
    columns = [(size, images) for images in (1, IMAGES) for size in sizes if images == 1 or size <= MOST]
    titles = [f"{size:,}" if images == 1 else f"{images} x {size:,}" for size, images in columns]
    lines = ["| | " + " | ".join(titles) + " | of ViT-L/14 at 576 |", "|---|" + "---|" * (len(titles) + 1)]
    for what in dict.fromkeys(row["what"] for row in rows):
        share = times[what, 576, 1] / times["CLIP ViT-L/14", 576, 1]
        cells = [_shown(times.get((what, *column))) for column in columns]
        lines.append(f"| {what} | {' | '.join(cells)} | {share:.1%} |")
    return "\n".join(lines)


def _shown(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.1f}" if ms < 10 else f"{ms:,.0f}"


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of single images (default 3)")
    parser.add_argument("--tokens", type=int, nargs="+", choices=GRIDS, default=list(GRIDS), help="sizes of images")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the rows go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.render:
        torch.manual_seed(0)
        kept = json.loads(args.output.read_text()) if args.output.exists() else []
        rows = [row for row in kept if row["tokens"] not in args.tokens] + measure(args.tokens, args.rounds)
        args.output.write_text(json.dumps(sorted(rows, key=lambda row: row["tokens"]), indent=1) + "\n")
    rows = json.loads(args.output.read_text())
    print(render(rows))
    times = {row["what"]: row["ms"] for row in rows if (row["tokens"], row["images"]) == (576, 1)}
    most = max(METHODS, key=lambda name: times[name])
    share = times[most] / times["CLIP ViT-L/14"]
    print(json.dumps({"slowest": most, "ms": times[most], "of_encoder": round(share, 4)}))


if __name__ == "__main__":
    main()
