#!/usr/bin/env python
"""Where the tokens stand that reducers keep on demo-photo: on things or on background, and why DART's are on background.

    scripts/measure/photo_kept.py               # after assemble_demo_photo.py; validation pictures

`things` is the share of the kept tokens that stand on a thing, `gone` that of the things with no token left, and
`pivots` the share of DART's pivots, the tokens of largest L1 norm, on things; all in percent. `likeness` is the mean cosine
of tokens of things, and of background, to the pivots. DART is also run with as many pivots from background. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from random import Random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from eval.demo.photo.pool import normalized  # noqa: E402
from eval.photo import pictures  # noqa: E402
from eval.photo.scene import SIDE, sample_scene  # noqa: E402
from vlmcompress import models  # noqa: E402
from vlmcompress.cli._process import quiet_libraries  # noqa: E402
from vlmcompress.reduction.choice import parse  # noqa: E402
from vlmcompress.reduction.methods import Signals, dart, reduce  # noqa: E402
from vlmcompress.reduction.methods._base import top, unit  # noqa: E402

METHODS = ("uniform", "coverage", "divprune", "cdpruner", "dart", "dart:pivots=4")
PIVOTS = 4


def kept_by(name: str, share: float, features: Tensor) -> Tensor:
    """The tokens that a method keeps of an image."""
    method, _, option = name.partition(":")
    chosen = parse(f"{method}:{share}" + (f",{option}" if option else ""))
    return reduce(chosen.module, Signals((1, SIDE, SIDE), features=features), chosen.options).anchor


def tallies(features: Tensor, item: Tensor, share: float) -> dict[str, tuple[int, int]]:
    """Of one image, by name of a figure: how many of how many. `item`: the thing under each token, or -1."""
    things, count = item >= 0, max(1, round(share * len(item)))
    size = features.abs().sum(-1)
    pivots = top(size, PIVOTS)
    ground = top(size.masked_fill(things, -1.0), PIVOTS)
    kept = {name: kept_by(name, share, features) for name in METHODS}
    kept["dart, pivots of background"] = dart.select(features, features[:0], ground, count)
    every = item[things].unique()
    out = {"all": (int(things.sum()), len(things)), "pivots": (int(things[pivots].sum()), PIVOTS)}
    for name, index in kept.items():
        left = item[index]
        out[f"{name} things"] = (int((left >= 0).sum()), len(left))
        out[f"{name} gone"] = (len(every) - len(left[left >= 0].unique()), len(every))
    cosine = (unit(features) @ unit(features[pivots]).T).mean(1)
    for name, mask in (("things", things), ("background", ~things)):
        out[f"likeness of {name}"] = (float(cosine[mask].sum()), int(mask.sum()))  # type: ignore[assignment]
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/demo-photo", help="folder of the assembled model")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.25, help="of tokens kept")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    album, vlm = pictures.fetch(ROOT / "build/photo"), models.load(args.model, dtype=torch.float32)
    sums: dict[str, list[float]] = {}
    for number in range(args.scenes):
        drawn = sample_scene(Random(f"photo/validation/kept/{number}"), "validation", album).draw(album)
        features = vlm.model.model.get_image_features(normalized(drawn.pixels[None])).pooler_output[0]
        counted = tallies(features, torch.from_numpy(drawn.item.reshape(-1)).long(), args.share)
        for name, (part, whole) in counted.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + part, total[1] + whole
    print(json.dumps({"share": args.share} | {name: round(100 * a / b, 1) for name, (a, b) in sums.items()}))


if __name__ == "__main__":
    main()
