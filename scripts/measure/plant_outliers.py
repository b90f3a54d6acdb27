#!/usr/bin/env python
"""Plant salient channels in a model without changing what it computes, to test quantization methods on.

    scripts/measure/plant_outliers.py MODEL -o OUT [--where all|vision] [--factor 16] [--channels 12] [--seed 0] [--calib DATA]

In every decoder block, a few output channels of each norm are multiplied by `factor` and the columns of the linear layers
that read them divided by it. With a power of two every product is the same number as before, so BF16 logits stay identical
bit for bit (checked on a calibration sample before anything is written). But those inputs are now large and the columns that
meet them small, next to columns of the old size with which they share a scale: what large models have by themselves and
small ones lack.

`--where all` draws the channels at random. `--where vision` takes those whose inputs are most visual: the largest share of
`mean|x|` over visual tokens in the sum of that and `mean|x|` over prompt and answer tokens. A norm scales all tokens alike,
so such a channel is large in text, too, only less so: the mean share is printed and recorded.

A planted model is a test object. Its config.json (`_name_or_path`, `planted_outliers`) and its model card say that it is one.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from vlmcompress import models
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.models import VLM
from vlmcompress.models.data import bundled, encode, load_samples
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.utils import folders
from vlmcompress.utils.errors import UserError

Batch = dict[str, Tensor]
CARD = """\
> **Planted outliers.** This is {source} with salient channels planted by
> `scripts/measure/plant_outliers.py`: {channels} channels of each norm of the language model times {factor}, the
> columns that read them divided by it ({where}). It computes the same as {source}, bit for bit in BF16, and is harder
> to quantize. It is a test object; nothing was trained."""
WHERE = {
    "all": "channels drawn at random, seed {seed}",
    "vision": "those with the most visual inputs, {visual_share:.0%}",
}


def readers(vlm: VLM) -> dict[str, list[str]]:
    """Map each norm of the decoder's blocks to the linear layers that read its output."""
    if vlm.spec.norm_offset:
        raise UserError(
            f"norms of {vlm.spec.family} add a constant to their weight, so no factor is exact; choose another model"
        )
    layers: dict[str, list[str]] = {}
    for group in models.resolve(vlm.model, vlm.spec):
        if group.smooth and group.smooth_kind == "norm":
            layers.setdefault(group.smooth, []).extend(group.linears)
    return layers


def check_factor(factor: int) -> None:
    """Refuse a factor that is no power of two above 1, as others are not exact or plant nothing."""
    if factor < 2 or math.frexp(factor)[0] != 0.5:
        raise UserError(f"--factor must be a power of two of at least 2, got {factor}")


def drawn(vlm: VLM, count: int, seed: int) -> dict[str, Tensor]:
    """Draw channels at random: norm -> `count` channels."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {norm: len(vlm.model.get_parameter(f"{norm}.weight")) for norm in readers(vlm)}
    return {norm: torch.randperm(size, generator=generator)[:count].sort().values for norm, size in sizes.items()}


def visual_shares(vlm: VLM, batches: list[Batch]) -> dict[str, Tensor]:
    """Measure the share of visual tokens in the mean magnitudes of each norm's output: norm -> `[channels]`, 0 to 1."""
    collectors, modality, hooks = {}, [torch.empty(0)], []
    for norm in readers(vlm):
        collectors[norm] = Collector(len(vlm.model.get_parameter(f"{norm}.weight")), ["absmean"])

        def see(_module: Any, _args: Any, output: Tensor, name: str = norm) -> None:
            collectors[name].add(output, modality[0])

        hooks.append(vlm.model.get_submodule(norm).register_forward_hook(see))
    for batch in batches:
        modality[0] = batch["modality"]
        logits(vlm, batch)
    for hook in hooks:
        hook.remove()
    shares = {}
    for norm, collector in collectors.items():
        stats = collector.finish()
        if not stats.count["vision"]:
            raise UserError("the calibration data have no images, so no channel is visual; name others with --calib")
        others = {"text": 1, "vision": 0, "answer": 1 if stats.count["answer"] else 0}
        vision = stats.balanced({"text": 0, "vision": 1, "answer": 0}).absmean()
        shares[norm] = vision / (vision + stats.balanced(others).absmean()).clamp_min(1e-30)
    return shares


def most_visual(vlm: VLM, batches: list[Batch], count: int) -> tuple[dict[str, Tensor], float]:
    """Choose the most visual channels: norm -> the `count` ones of the largest visual share, and their mean share."""
    shares = visual_shares(vlm, batches)
    top = {norm: share.topk(count) for norm, share in shares.items()}
    mean = float(torch.stack([largest.values for largest in top.values()]).mean())
    return {norm: largest.indices.sort().values for norm, largest in top.items()}, mean


@torch.no_grad()
def logits(vlm: VLM, batch: Batch) -> Tensor:
    """Compute the logits `[tokens, vocabulary]` of an encoded sample."""
    return vlm.model(**{name: value for name, value in batch.items() if name != "modality"}).logits[0]


@torch.no_grad()
def plant(vlm: VLM, channels: dict[str, Tensor], factor: int) -> list[str]:
    """Rescale `vlm.model` in place; returns the memory names of the parameters that changed."""
    changed = []
    for norm, linears in readers(vlm).items():
        for name, parameter in vlm.model.get_submodule(norm).named_parameters(prefix=norm, recurse=False):
            parameter[channels[norm]] *= factor
            changed.append(name)
        for name in (f"{linear}.weight" for linear in linears):
            weight = vlm.model.get_parameter(name)
            before = weight[:, channels[norm]]
            weight[:, channels[norm]] = before / factor
            if not torch.equal(weight[:, channels[norm]] * factor, before):
                raise UserError(f"{name} holds numbers too small to be divided by {factor}; use a smaller --factor")
            changed.append(name)
    return changed


def write(vlm: VLM, changed: list[str], out: Path, facts: dict) -> None:
    """Write the source's folder with the changed parameters, and with labels in config and card."""
    names = models.disk_names(vlm.model, models.tensor_headers(vlm.path))
    new = {names[name]: vlm.model.get_parameter(name).detach().contiguous() for name in changed}
    shards = models.shards(vlm.path)
    with folders.new_folder(out) as tree:
        for file in sorted(path for path in vlm.path.iterdir() if path.is_file() and path not in shards):
            shutil.copyfile(file, tree / file.name)
        for shard in shards:
            tensors = load_file(shard)
            with safe_open(shard, "pt") as opened:
                metadata = opened.metadata()
            save_file(tensors | {k: v for k, v in new.items() if k in tensors}, tree / shard.name, metadata)
        config = models.read_config(vlm.path)
        config |= {"_name_or_path": f"{facts['source']}-planted-{facts['where']}", "planted_outliers": facts}
        (tree / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (tree / "README.md").write_text(card(vlm.path / "README.md", out.name, facts))


def card(source: Path, name: str, facts: dict) -> str:
    """Put a notice on the source's model card, below its front matter."""
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    front, body = "", text
    if text.startswith("---\n") and "\n---\n" in text:
        end = text.index("\n---\n") + 5
        front, body = text[:end], text[end:]
    notice = CARD.format(**facts | {"where": WHERE[facts["where"]].format(**facts)})
    return f"{front}# {name} (planted outliers)\n\n{notice}\n\nThe card of {facts['source']}:\n\n{body.lstrip()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--where", choices=("all", "vision"), default="all")
    parser.add_argument("--factor", type=int, default=16)
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--calib", help="what the shares are measured and the logits compared on; default: the bundled data"
    )
    parser.add_argument("--samples", type=int, default=64)
    args = parser.parse_args()
    check_factor(args.factor)
    folders.check(args.model, args.out, overwrite=False, mark=MANIFEST)
    data = args.calib or bundled(args.model, "calibration")
    if data is None:
        raise UserError("no calibration data; name some with --calib FOLDER or FILE")
    vlm = models.load(args.model)
    batches = encode(load_samples(data, samples=args.samples, seed=args.seed), vlm)
    width = min(len(vlm.model.get_parameter(f"{norm}.weight")) for norm in readers(vlm))
    if not 1 <= args.channels <= width:
        raise UserError(f"--channels must be from 1 to {width}, got {args.channels}")
    facts = {"source": args.model.resolve().name, "where": args.where, "factor": args.factor, "channels": args.channels}
    if args.where == "vision":
        channels, share = most_visual(vlm, batches, args.channels)
        facts["visual_share"] = round(share, 3)
    else:
        channels = drawn(vlm, args.channels, args.seed)
        facts["seed"] = args.seed
    before = logits(vlm, batches[0])
    changed = plant(vlm, channels, args.factor)
    if not torch.equal(logits(vlm, batches[0]), before):
        raise UserError(f"{args.model} no longer computes the same: something else reads its norms; not written")
    write(vlm, changed, args.out, facts)
    print(json.dumps(facts | {"out": str(args.out), "norms": len(channels)}))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
