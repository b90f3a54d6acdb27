#!/usr/bin/env python
"""What demo-photo's tower is: DINOv2, with or without its class token, and whether it has artifact tokens and outlier
channels.

    scripts/measure/photo_tower.py --scenes 16

On scenes of the validation split: (1) the relative difference of each layer's output to transformers' own DINOv2, in
float32; (2) the cosine of the patches' features, less their mean over patches, with the class token to those without
it, as a SigLIP tower would have them; (3) of the length of patches at each layer the median, the largest, and the
share above twice the median, which is what artifact tokens (arXiv 2309.16588) would be; (4) of each linear layer's
input the largest value in the median channel and in the largest. The last line is one JSON object. Needs what
`scripts/train/assemble_demo_photo.py` fetches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2Model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from eval.demo.photo import package, pool  # noqa: E402
from eval.demo.photo.tower import HEADS, LAYERS, WIDTH  # noqa: E402
from eval.photo import pictures  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=16)
    parser.add_argument("--work", type=Path, default=ROOT / "build/photo", help="folder of the packages")
    args = parser.parse_args()
    torch.set_num_threads(1)
    album = pictures.fetch(args.work)
    package.fetch(args.work)
    dino = package.load(args.work)
    drawn = [pool.scene_of("validation", k, album).draw(album).pixels for k in range(args.scenes)]
    pixels = torch.stack([pool.normalized(image[None])[0] for image in drawn])
    with torch.inference_mode():
        figures = measure(dino, pixels)
    print(json.dumps(figures))


def measure(dino: dict[str, Tensor], pixels: Tensor) -> dict[str, Any]:
    """All figures."""
    tower = pool.load_tower(dino, exact=True)
    theirs = Dinov2Model(
        Dinov2Config(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, image_size=518)
    )
    theirs.load_state_dict(dino, strict=False)
    expected = theirs.eval()(pixels, output_hidden_states=True).hidden_states
    hooks, largest = watch(tower)
    ours = [state[..., :WIDTH] for state in tower(pixels, output_hidden_states=True).hidden_states[: LAYERS + 1]]
    for hook in hooks:
        hook.remove()
    errors = []
    for state, full in zip(ours, expected, strict=True):
        full = full - full.mean(-1, keepdim=True)
        errors.append(float((state - full).norm() / full.norm()))
    print(f"difference to DINOv2 by layer: {' '.join(f'{error:.1e}' for error in errors)}")
    drop = tower.embeddings.register_forward_hook(lambda module, inputs, out: out[:, 1:])
    alone = tower(pixels, output_hidden_states=True).hidden_states[LAYERS][..., :WIDTH]
    drop.remove()
    patches = [x - x.mean(1, keepdim=True) for x in (ours[-1][:, 1:], alone)]
    cosine = F.cosine_similarity(*patches, dim=-1)
    print(f"cosine of features with and without the class token: mean {cosine.mean():.3f}, least {cosine.min():.3f}")
    lengths = [state[:, 1:].norm(dim=-1) for state in ours]
    rows = [[float(n.median()), float(n.max()), float((n > 2 * n.median()).float().mean())] for n in lengths]
    for layer, (median, most, share) in enumerate(rows):
        print(f"layer {layer}: length of patches {median:.1f}, at most {most:.1f}; above twice the median {share:.2%}")
    channels = {name: [float(top[top > 0].median()), float(top.max())] for name, top in largest.items()}
    worst = sorted(channels, key=lambda name: channels[name][0] / channels[name][1])[:8]
    for name in worst:
        print(
            f"{name}: largest values {channels[name][0]:.2f} in the median channel, {channels[name][1]:.1f} in the largest"
        )
    return {
        "error": max(errors), "cosine": round(float(cosine.mean()), 4), "cosine_least": round(float(cosine.min()), 4),
        "lengths": [[round(value, 4) for value in row] for row in rows],
        "channels": {name: [round(value, 3) for value in values] for name, values in channels.items()},
    }  # fmt: skip


def watch(tower: nn.Module) -> tuple[list[Any], dict[str, Tensor]]:
    """Hooks that keep the largest absolute value of each channel of each linear layer's input, and where they keep it."""
    largest: dict[str, Tensor] = {}

    def look(name: str):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            largest[name] = inputs[0].abs().flatten(0, -2).amax(0)

        return hook

    layers = [(name, module) for name, module in tower.named_modules() if isinstance(module, nn.Linear)]
    used = [(name, module) for name, module in layers if f"layers.{LAYERS}." not in name]
    return [module.register_forward_pre_hook(look(name)) for name, module in used], largest


if __name__ == "__main__":
    main()
