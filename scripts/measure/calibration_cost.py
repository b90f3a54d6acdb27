#!/usr/bin/env python
"""Time of calibrating a model of Qwen2.5-VL-7B's width on a CPU, by part, measured on two of its decoder blocks.

    scripts/measure/calibration_cost.py             measures the parts, into eval/calibration_cost.json
    scripts/measure/calibration_cost.py --render    prints the docs' table

Seconds are of the processor, with one thread of arithmetic. `SAMPLES` images of 31 x 31 visual tokens run through two layers
of the vision encoder and two decoder blocks with random weights, observed and passed on; 2,048 rows are added to the Gram
matrices of a block's inputs, and a block is solved from these. The table multiplies: the encoder by 32 layers; passes by 28
blocks (27 pass on); these by the images, and a ninth more that errors are measured on; Gram matrices by the tokens that layers
are fitted to; solving by 28. Left out are loading, reading images and writing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "calibration_cost.json"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
SAMPLES, SIDE, ROWS = 2, 868, 2048
BLOCKS, LAYERS = (2, 28), (2, 32)  # of the decoder and of the encoder: measured, and in the model
OTHERS = 1 / 8  # images that errors are measured on, for each that calibrates
SETTINGS = (("gptq-plus", 128, 0), ("gptq-plus", 128, 32768), ("gptq-plus", 32, 0), ("int8", 128, 0))
PARTS = ("encoder", "passes", "Gram matrices", "solving")


def hours(measured: dict[str, Any], scheme: str, images: int, tokens: int) -> dict[str, float]:
    """Hours of a core for the whole model, by part. `tokens`: that layers are fitted to; 0: all."""
    every, seconds = measured["tokens"] / SAMPLES * images, measured["seconds"]
    parts = {
        "encoder": (seconds["encoder"] + seconds["layers"] * (LAYERS[1] / LAYERS[0] - 1))
        * (1 + OTHERS)
        * images
        / SAMPLES,
        "passes": (
            (seconds["observing"] * BLOCKS[1] / BLOCKS[0] + seconds["passing on"] * (BLOCKS[1] - 1) / (BLOCKS[0] - 1))
            * (1 + OTHERS)
            * images
            / SAMPLES
        ),
        "Gram matrices": 0.0 if scheme == "int8" else seconds["gram"] * (tokens or every) / ROWS * BLOCKS[1],
        "solving": seconds[f"solving {scheme}"] * BLOCKS[1],
    }
    return {part: parts[part] / 3600 for part in PARTS}


def render(measured: dict[str, Any]) -> str:
    """The docs' table: hours of a core."""
    lines = [f"| scheme | images | tokens fitted to | {' | '.join(PARTS)} | hours of a core |", f"|---|{'---:|' * 7}"]
    for scheme, images, tokens in SETTINGS:
        every = measured["tokens"] // SAMPLES * images
        parts = hours(measured, scheme, images, tokens)
        cells = [f"`{scheme}`", f"{images}", f"{tokens or every:,}", *(f"{value:.1f}" for value in parts.values())]
        lines.append(f"| {' | '.join(cells)} | {sum(parts.values()):.1f} |")
    return "\n".join(lines)


def measure() -> dict[str, Any]:
    """Seconds of each part, and the number of tokens."""
    import torch
    from gpu import bare

    from vlmcompress import models
    from vlmcompress.evaluation.speed.prompts import dead_leaves
    from vlmcompress.models.data import Sample, encode
    from vlmcompress.models.devices import full_float32
    from vlmcompress.numerics.statistics.collect import Collector
    from vlmcompress.numerics.statistics.inputs import STATISTICS
    from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
    from vlmcompress.quantization.calibration.solve import QuantMethod
    from vlmcompress.quantization.run import _solve
    from vlmcompress.utils import progress

    progress.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    shape = bare.FULL["qwen2.5-vl-7b"]
    text = {**shape.text, "num_hidden_layers": BLOCKS[0], "vocab_size": 4096}
    vision = {**shape.vision, "depth": LAYERS[0], "fullatt_block_indexes": []}
    made, reads = bare.built(dataclasses.replace(shape, text=text, vision=vision))
    vlm = models.VLM(made.eval().requires_grad_(False), reads, models.spec_for(made.config.to_dict()), ROOT)
    samples = [Sample(str(n), (dead_leaves((SIDE, SIDE), n),), bare.QUESTION, "Leaves.") for n in range(SAMPLES)]
    encoded, blocks = encode(samples, vlm), models.decoder_blocks(vlm.model, vlm.spec)
    tokens = sum(int((sample["modality"] > 0).sum()) for sample in encoded)
    seconds: dict[str, float] = {}
    clock, layers = list[float](), made.model.visual.blocks
    for layer, register in ((layers[0], "register_forward_pre_hook"), (layers[-1], "register_forward_hook")):
        getattr(layer, register)(lambda *_: clock.append(time.process_time()))
    statistics = QuantMethod.named("gptq-plus").needs.statistics
    with full_float32(), torch.no_grad():
        with progress.timed_phases() as timing:  # too few rows for a Gram matrix: observing is the pass alone
            list(capture_blocks(vlm, blocks, encoded, CaptureSpec(statistics, "quantized")))
        seconds |= {name: timing[name] for name in ("observing", "passing on")}
        seconds |= {"encoder": timing["capturing block inputs"], "layers": sum(clock[1::2]) - sum(clock[::2])}
        print(seconds, file=sys.stderr, flush=True)
        for scheme in ("int8", "gptq-plus"):
            start, stats = time.process_time(), {}
            for group in blocks[0]:
                needs = STATISTICS if scheme == "gptq-plus" else {"absmax"}
                collector = Collector(vlm.model.get_submodule(group.linears[0]).in_features, needs)
                collector.add(torch.randn(ROWS, collector._stats.width, dtype=torch.bfloat16))
                stats[group.name] = collector.finish()
            seconds["gram"] = time.process_time() - start
            with progress.timed_phases() as timing:
                _solve(vlm, blocks[0], stats, QuantMethod.named(scheme), {}, torch.device("cpu"))
            seconds[f"solving {scheme}"] = timing["solving"]
            print(seconds, file=sys.stderr, flush=True)
    return {"tokens": tokens, "seconds": seconds}


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing")
    if not parser.parse_args().render:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    measured = json.loads(RESULTS.read_text())
    print(render(measured))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
