"""Measure prefill time and KV cache of reduced models: random weights, about 0.5 B parameters, 1,024 visual tokens.

`resize` is timed with a smaller image of as many tokens, which is what the processor's limit makes of a large one; a scorer of
`learned` has random weights, as it costs the same whatever it knows.

The models have the families of the demo models and a language model of 28 layers, 1,024 wide, in bfloat16. What is timed is one
forward pass over image and question, with the encoder and the reducer's own work, as `generate` begins with; the cache's bytes
are those that it leaves behind. Settings take turns, and a ratio is the median over rounds of that to the same round's full
model, so that a machine that slows down for a while doesn't favour one of them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.reduction.choice import ReducerChoice, parse
from vlmcompress.reduction.hooks import attach, resizing
from vlmcompress.reduction.methods import learned
from vlmcompress.reduction.support import family_refusal

SIDE = 32  # tokens down and across: 1,024 together
WORDS = 48  # tokens of the question
SHARES = (0.5, 0.25, 1 / 9)
METHODS = (
    "random", "resize", "coverage", "learned", "cdpruner", "scope", "dart", "divprune", "visionzip", "vscan",
    "tome", "fastv", "dart-llm",
)  # fmt: skip
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
VISION: dict[str, dict[str, Any]] = {
    "llava": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "patch_size": 14,
        "image_size": 14 * SIDE,
    },
    "qwen2_5_vl": {
        "hidden_size": 640,
        "intermediate_size": 1280,
        "depth": 12,
        "num_heads": 10,
        "fullatt_block_indexes": [2, 5, 8, 11],
        "out_hidden_size": TEXT["hidden_size"],
    },
}


def build(demo: Path, layers: int) -> VLM:
    """Build a random model of a demo model's family, with that model's processor and `layers` decoder blocks."""
    settings = json.loads((demo / "config.json").read_text())
    settings["text_config"] |= TEXT | {"num_hidden_layers": layers}
    if "layer_types" in settings["text_config"]:
        settings["text_config"]["layer_types"] = ["full_attention"] * layers
    settings["vision_config"] |= VISION[settings["model_type"]]
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with models.quiet():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        processor = models.load_processor(demo)
    return VLM(model.eval().requires_grad_(False), processor, models.spec_for(settings), demo)


def prompt(vlm: VLM, side: int = SIDE) -> dict[str, torch.Tensor]:
    """Make a prompt of an image of noise, `side` tokens down and across, and a question of `WORDS` random tokens."""
    config, draw = vlm.model.config, torch.Generator().manual_seed(0)
    image = torch.full((1, side * side), getattr(config, vlm.spec.image_token))
    ids = torch.cat([image, torch.randint(100, 600, (1, WORDS), generator=draw)], 1)
    vision = config.vision_config
    if vlm.spec.visual_grid != "thw":
        pixels = torch.randn(1, 3, vision.image_size, vision.image_size, generator=draw)
        return {"input_ids": ids, "pixel_values": pixels.bfloat16()}
    rows = side * vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(rows * rows, width, generator=draw).bfloat16(),
        "image_grid_thw": torch.tensor([[1, rows, rows]]),
        "mm_token_type_ids": (ids == image[0, 0]).long(),
    }


@dataclass(frozen=True)
class Setting:
    """A reducer, or none, and an image of so many tokens down and across."""

    name: str
    chosen: ReducerChoice | None = None
    side: int = SIDE


def settings(vlm: VLM, methods: Sequence[str]) -> list[Setting]:
    """List the full model, and each method that goes with it at each share."""
    rows = [Setting("full")]
    for method in methods:
        for share in SHARES:
            if method == "resize" and resizing.refusal(vlm.spec) is None:
                rows.append(Setting(f"resize:{_shown(share)}", side=round(SIDE * share**0.5)))
            elif method != "resize" and family_refusal(vlm.spec, method) is None:
                rows.append(Setting(f"{method}:{_shown(share)}", _scored(vlm, parse(f"{method}:{share}"))))
    return rows


def _shown(share: float) -> str:
    return "1/9" if share < 0.12 else str(share)


def _scored(vlm: VLM, chosen: ReducerChoice) -> ReducerChoice:
    """The reducer, with a network of random weights if it goes by one."""
    if chosen.method != "learned":
        return chosen
    width = vlm.model.config.get_text_config().hidden_size
    network = learned.Network(learned.initial(torch.zeros(width), torch.ones(width), 64, 0))
    return ReducerChoice("learned", replace(chosen.options, network=network))  # type: ignore[type-var]


@torch.no_grad()
def prefill(vlm: VLM, inputs: dict[str, torch.Tensor], chosen: ReducerChoice | None) -> tuple[float, float, int]:
    """Run one pass; returns its seconds, those of them in the encoder, and bytes of the cache that it leaves."""
    tower, clock = vlm.model.get_submodule(vlm.spec.vision[0]), [0.0, 0.0]
    with contextlib.ExitStack() as stack:
        for number, hook in enumerate((tower.register_forward_pre_hook, tower.register_forward_hook)):
            stack.callback(hook(lambda *_, number=number: clock.__setitem__(number, time.perf_counter())).remove)
        if chosen:
            stack.enter_context(attach(vlm, chosen))
        start = time.perf_counter()
        out = vlm.model(**inputs, use_cache=True, logits_to_keep=1)
        seconds = time.perf_counter() - start
    cache = sum(part.keys.nbytes + part.values.nbytes for part in out.past_key_values.layers)
    return seconds, clock[1] - clock[0], cache


def measure(demos: Sequence[Path], rounds: int, layers: int, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Measure a row for each model and setting."""
    rows = []
    for demo in demos:
        vlm = build(demo, layers)
        todo = settings(vlm, methods)
        inputs = {timed.side: prompt(vlm, timed.side) for timed in todo}
        prefill(vlm, inputs[SIDE], None)  # the first pass also lays out memory
        taken = []
        for number in range(rounds):
            taken.append([prefill(vlm, inputs[timed.side], timed.chosen) for timed in todo])
            print(f"{demo.name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        common = {"model": demo.name, "parameters": vlm.model.num_parameters(), "rounds": rounds}
        for at, setting in enumerate(todo):
            seconds, encoder, cache = zip(*(turn[at] for turn in taken), strict=True)
            ratios = [turn[at][0] / turn[0][0] for turn in taken]
            row = common | {"reduce": setting.name, "time": round(statistics.median(ratios), 3)}
            row |= {"times": [round(min(ratios), 3), round(max(ratios), 3)]}
            row |= {"seconds": round(statistics.median(seconds), 3), "encoder": round(statistics.median(encoder), 3)}
            rows.append(row | {"bytes": cache[0], "cache": round(cache[0] / taken[0][0][2], 3)})
    return rows


def joined(kept: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put new rows in the place of those that they measured anew, in the order of `METHODS`."""
    rows = {(row["model"], row["reduce"]): row for row in (*kept, *measured)}
    order = ("full", *METHODS)
    return sorted(rows.values(), key=lambda row: (row["model"], order.index(row["reduce"].split(":")[0])))


def render(speed: Sequence[dict[str, Any]]) -> str:
    """Render the docs' table: time and cache as parts of the full model's, one model after the other."""
    names = list(dict.fromkeys(row["model"] for row in speed))
    lines = ["| | " + " | ".join(f"{name.removeprefix('demo-')}: prefill, cache" for name in names) + " |"]
    lines.append("|---|" + "---|" * len(names))
    for reduce in dict.fromkeys(row["reduce"] for row in speed):
        cells = []
        for name in names:
            rows = [row for row in speed if (row["model"], row["reduce"]) == (name, reduce)]
            cells.append(_cell(rows[0], reduce) if rows else "")
        lines.append(f"| {reduce} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], reduce: str) -> str:
    if reduce == "full":
        return f"{row['seconds']:.2f} s ({row['encoder']:.2f} s in the encoder), {row['bytes'] / 1e6:.0f} MB"
    return f"{row['time']:.2f}x, {row['cache']:.2f}x"
