#!/usr/bin/env python
"""What demo-photo loses with its tower in FP8 or INT8, as it is and with the largest channels of its inputs in 16 bits.

    scripts/measure/photo_vision_bits.py --images 20      try it
    scripts/measure/photo_vision_bits.py                  after assemble_demo_photo.py; all test questions

Checkpoints are written by `quantize` with `vision: fp8` or `int8` (weights to nearest, a scale a row; inputs scaled token
by token), and run with their inputs rounded as an engine rounds them. `apart` leaves in 16 bits the channels of a linear
layer's input whose largest value, over calibration images, is at least `--times` that of the median channel, and the
weights' columns that read them. `error` is the relative error of what the projector reads, less its mean over patches, in
percent; `change` the difference of exact match to 16 bits in points, with an interval of 95%, clustered by image; `same` the
share of questions that are right or wrong as before. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import reduced_answers
import torch
from bench_photo import ROOT, chosen_samples
from methods_table import about, numbered, points
from shared_answers import SharedAsker
from teacher_forcing import load_quantized, round_activations
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.models import VLM
from vlmcompress.models.data import bundled, encode, load_samples
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve

LOOKED_AT = 32  # calibration samples


def linears(vlm: VLM) -> dict[str, nn.Linear]:
    """The linear layers of the tower that run for LLaVA."""
    tower = vlm.model.model.vision_tower
    return {name: module for name, module in tower.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def largest(vlm: VLM) -> dict[str, Tensor]:
    """The largest absolute value of each channel of each linear layer's input, over calibration images."""
    tops: dict[str, Tensor] = {}

    def look(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            top = args[0].abs().flatten(0, -2).amax(0)
            tops[name] = torch.maximum(tops.get(name, top), top)

        return hook

    hooks = [module.register_forward_pre_hook(look(name)) for name, module in linears(vlm).items()]
    samples = load_samples(bundled(vlm.path, "calibration"), samples=LOOKED_AT, seed=0)
    for inputs in encode([sample for sample in samples if sample.images], vlm):
        vlm.model.model.get_image_features(inputs["pixel_values"])
    for hook in hooks:
        hook.remove()
    return tops


def quantized(plain: VLM, scheme: str) -> VLM:
    """The model with its tower in 8 bits; in float32, its inputs rounded."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"model": str(plain.path), "out": f"{folder}/out", "scheme": "none", "vision": scheme}
        quantize(resolve(keys).recipe)
        vlm = load_quantized(Path(folder) / "out", plain)
    vlm.model.float()
    round_activations(vlm.model)
    return vlm


def set_apart(vlm: VLM, plain: VLM, large: dict[str, Tensor]) -> None:
    """Take the channels `large` out of what is rounded: inputs are rounded without them, and their weights are `plain`'s."""
    originals = linears(plain)
    for name, module in linears(vlm).items():
        if module._forward_pre_hooks and large[name].any():
            (rounded,) = module._forward_pre_hooks.values()
            module._forward_pre_hooks.clear()
            module.forward = _both(module, rounded, large[name], originals[name].weight.detach().float())


def _both(module: nn.Linear, rounded: Any, apart: Tensor, weight: Tensor) -> Any:
    """The layer's function, of which the channels `apart` are in 16 bits."""
    weight, forward = weight[:, apart].clone(), module.forward
    module.weight.data[:, apart] = 0

    def both(x: Tensor) -> Tensor:
        (rest,) = rounded(module, (x.masked_fill(apart, 0.0),))
        return forward(rest) + x[..., apart] @ weight.T

    return both


def features(vlm: VLM, images: list[dict[str, Tensor]]) -> Tensor:
    """What the projector reads of images, less its mean over patches, `[images, patches, channels]`."""
    tower, at = vlm.model.model.vision_tower, vlm.model.config.vision_feature_layer
    read = [tower(image["pixel_values"], output_hidden_states=True).hidden_states[at][:, 1:] for image in images]
    rows = torch.cat(read)
    return rows - rows.mean(1, keepdim=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/demo-photo", help="folder of the assembled model")
    parser.add_argument("--images", type=int, help="ask about the first so many images; default: all")
    parser.add_argument("--times", type=float, default=6.0, help="how large a channel is that is set apart")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    plain = models.load(args.model, dtype=torch.float32)
    samples, _ = chosen_samples(args.model, "test", args.images)
    questions, clusters = reduced_answers.prepare(plain, samples), numbered([about(sample) for sample in samples])
    tops = largest(plain)
    large = {name: top >= args.times * top[top > 0].median() for name, top in tops.items()}
    counts = [int(mask.sum()) for mask in large.values()]
    summary: dict[str, Any] = {
        "questions": len(samples),
        "apart": f"{min(counts)} to {max(counts)}, {sum(counts)} in all",
    }
    some = questions.images[:32]
    before, full = features(plain, some), SharedAsker(plain, questions).ask(None).exact.double()
    summary["16 bits"] = round(100 * float(full.mean()), 1)
    for scheme in ("fp8", "int8"):
        for apart in (False, True):
            vlm = quantized(plain, scheme)
            if apart:
                set_apart(vlm, plain, large)
            error = float((features(vlm, some) - before).norm() / before.norm())
            exact = SharedAsker(vlm, questions).ask(None).exact.double()
            figures = {
                "error": round(100 * error, 2),
                "change": points((exact - full)[None], clusters, 2),
                "same": round(100 * float((exact == full).double().mean()), 1),
            }
            summary[f"{scheme}{', channels apart' if apart else ''}"] = figures
            print(scheme, apart, figures, file=sys.stderr, flush=True)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
