#!/usr/bin/env python
"""Test whether balancing the modalities helps: a demo model, plain and planted, with balance off and on, in transformers.

    scripts/measure/compare_balance.py [MODEL] [--balance ratio] [--questions 270] [--samples 64] [--seeds 2] 2> /dev/null

For every variant (plain; salient channels planted at random or where inputs are visual, see `plant_outliers.py`), method and
number of bits: the decoder is quantized as `vlmcompress quantize` does it (asymmetric, groups of 128), and validation
questions are asked. Compared with the original, in float32 over the whole vocabulary: the divergence KL(original || quantized)
of the first answer token, and the squared error of its logits relative to their spread, for questions with an image and
for those without. Each is a mean over questions and over calibrations with different samples, off -> balanced. In brackets:
`z`, the difference question by question in standard errors (below -2 balance helps, above 2 it hurts); the share of questions
on which balance was closer, as few questions rule such means (of 270 questions, 44% to 56% is chance; of 90, 39% to 61%); and
in how many calibrations its mean was lower, as the other two know nothing of the chance in calibration samples. The errors
of layers are those that the manifest reports.

No engine takes part: vLLM's CPU build has no kernels for 2 and 3 bits. Calibration and questions come from splits of the
bundled data. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from plant_outliers import drawn, most_visual, plant
from torch import Tensor

from vlmcompress import models
from vlmcompress.blocks.solve import QuantMethod
from vlmcompress.blocks.store import BlockStore
from vlmcompress.commands._process import quiet_libraries
from vlmcompress.common import yaml_files as _yaml
from vlmcompress.compression.blocks import compress
from vlmcompress.data import bundled, encode, load_samples
from vlmcompress.data.encode import encode_prompt
from vlmcompress.models import VLM
from vlmcompress.quantizers import REGISTRY
from vlmcompress.statistics.balance import check_balance

KINDS = ("image", "text")
Batch = tuple[list[int], dict[str, Tensor]]  # numbers of the questions, and their model inputs


def questions(vlm: VLM, count: int, size: int = 30) -> tuple[list[Batch], list[str]]:
    """Choose `count` questions with images and all without, in batches of equal shapes, and the kind of each."""
    samples = load_samples(bundled(vlm.path, "validation"), samples=None, seed=0)
    with_image = [sample for sample in samples if sample.images][:count]
    chosen = [*with_image, *(sample for sample in samples if not sample.images)]
    alike: dict[tuple, list[Batch]] = defaultdict(list)
    for number, sample in enumerate(chosen):
        inputs = encode_prompt(sample, vlm)
        alike[tuple((name, tuple(value.shape)) for name, value in inputs.items())].append(([number], inputs))
    batches = []
    for same in alike.values():
        for start in range(0, len(same), size):
            part = same[start : start + size]
            inputs = {name: torch.cat([one[name] for _, one in part]) for name in part[0][1]}
            batches.append(([number for numbers, _ in part for number in numbers], inputs))
    return batches, [KINDS[0] if sample.images else KINDS[1] for sample in chosen]


@torch.no_grad()
def first_logits(model: torch.nn.Module, batches: list[Batch]) -> Tensor:
    """Compute the logits `[questions, vocabulary]` of the first answer token, in float32."""
    model = copy.deepcopy(model).float()
    found = {}
    for numbers, inputs in batches:
        rows = model(**inputs, logits_to_keep=1).logits[:, -1]
        found.update(zip(numbers, rows, strict=True))
    return torch.stack([found[number] for number in sorted(found)])


def distances(original: Tensor, quantized: Tensor) -> dict[str, Tensor]:
    """Measure `kl [questions]` in nats, and `logit`: squared error relative to the variance of the original's logits."""
    p, q = original.double().log_softmax(-1), quantized.double().log_softmax(-1)
    error = (quantized - original).double()
    spread = original.double().var(-1, correction=0)
    return {"kl": (p.exp() * (p - q)).sum(-1), "logit": error.var(-1, correction=0) / spread}


def quantized(vlm: VLM, samples: list, name: str, bits: int, balance: Any) -> tuple[torch.nn.Module, dict[str, float]]:
    """Quantize the model's decoder; returns the model and the mean error of its layers by modality."""
    module = REGISTRY.get(name)
    options = {"bits": bits, "group_size": 128, "symmetric": False} | ({} if name == "rtn" else {"balance": balance})
    own = replace(vlm, model=copy.deepcopy(vlm.model))
    groups = models.resolve(own.model, own.spec)
    blocks = [[g for g in groups if g.layer == i] for i in range(1 + groups[-1].layer)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        store = BlockStore(Path(folder, "layers"), "", False)
        compress(own, blocks, QuantMethod(module, module.Options(**options)), samples, store)
        errors = [error for i in range(len(blocks)) for error in store.load(i, weights=False).errors.values()]
    return own.model, {modality: fmean(error[modality] for error in errors) for modality in errors[0]}


def variant(path: Path, which: str) -> VLM:
    """Load the model as it is (`plain`) or with 12 channels a norm planted, times 16 (`all`, `vision`)."""
    vlm = models.load(path)
    if which == "plain":
        return vlm
    samples = encode(load_samples(bundled(path, "calibration"), samples=64, seed=0), vlm)
    plant(vlm, drawn(vlm, 12, 0) if which == "all" else most_visual(vlm, samples, 12)[0], 16)
    return vlm


def measure(vlm: VLM, asked: list[Batch], original: Tensor, calibrations: list, name: str, bits: int, balance: Any):
    """Measure distances `[calibrations, questions]`, and the layers' mean errors."""
    runs, errors = [], []
    for samples in calibrations[:1] if name == "rtn" else calibrations:
        model, error = quantized(vlm, [] if name == "rtn" else samples, name, bits, balance)
        runs.append(distances(original, first_logits(model, asked)))
        errors.append(error)
    stacked = {key: torch.stack([run[key] for run in runs]) for key in runs[0]}
    return stacked, {key: fmean(error[key] for error in errors) for key in errors[0]}


def compare(off: Tensor, balanced: Tensor) -> dict[str, float]:
    """Compare values `[calibrations, questions]` of one kind, balance off and on."""
    difference = (balanced - off).mean(0)
    deviation = float(difference.std() / len(difference) ** 0.5)
    z = float(difference.mean()) / deviation if deviation else 0.0
    won = float((difference < 0).double().mean())
    better = int((balanced.mean(1) < off.mean(1)).sum())
    return {"off": float(off.mean()), "balanced": float(balanced.mean()), "z": z, "won": won, "better": better}


def rows(args: argparse.Namespace):
    """Yield a record for each variant, method and number of bits."""
    for which in args.variants:
        vlm = variant(args.model, which)
        asked, kinds = questions(vlm, args.questions)
        original = first_logits(vlm.model, asked)
        data = bundled(args.model, "calibration")
        calibrations = [encode(load_samples(data, samples=args.samples, seed=s), vlm) for s in range(args.seeds)]
        for name, bits in product(args.methods, args.bits):
            record: dict = {"variant": which, "method": name, "bits": bits}
            off, record["layers_off"] = measure(vlm, asked, original, calibrations, name, bits, "off")
            balanced = None
            if name != "rtn":
                found = measure(vlm, asked, original, calibrations, name, bits, args.balance)
                balanced, record["layers_balanced"] = found
            for kind, key in product(KINDS, off):
                one = off[key][:, [k == kind for k in kinds]]
                other = None if balanced is None else balanced[key][:, [k == kind for k in kinds]]
                record[f"{key}_{kind}"] = {"off": float(one.mean())} if other is None else compare(one, other)
            yield record


def line(record: dict) -> str:
    """Render a row of the table."""
    cells = [record["variant"], record["method"], str(record["bits"])]
    for key in ("kl_image", "kl_text", "logit_image", "logit_text"):
        found = record[key]
        if record["method"] == "rtn":
            cells.append(f"{found['off']:.4f}")
        else:
            cells.append(
                f"{found['off']:.4f} -> {found['balanced']:.4f} (z {found['z']:+.1f}, {found['won']:.0%}, {found['better']})"
            )
    for modality in ("text", "vision", "answer"):
        values = (record.get(key, {}).get(modality) for key in ("layers_off", "layers_balanced"))
        cells.append(" -> ".join(f"{value:.4f}" for value in values if value is not None) or "")
    return "| " + " | ".join(cells) + " |"


def weights(text: str) -> Any:
    """Read a balance in the form of the command line of `vlmcompress quantize`."""
    return check_balance(_yaml.parse(text, "--balance"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("eval/demo/demo-llava"))
    parser.add_argument(
        "--questions", type=int, default=270, help="questions with an image; all without are asked, too"
    )
    parser.add_argument("--balance", type=weights, default="ratio", help="ratio or {text: w, vision: w, answer: w}")
    parser.add_argument("--samples", type=int, default=64, help="calibration samples")
    parser.add_argument("--seeds", type=int, default=2, help="calibrations, each with samples of its own")
    parser.add_argument("--variants", nargs="+", default=["plain", "all", "vision"], choices=["plain", "all", "vision"])
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "awq"], choices=["rtn", "gptq", "awq"])
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3, 2])
    args = parser.parse_args()
    quiet_libraries()  # llm-compressor logs to stdout; it isn't imported yet
    names = ["kl_image", "kl_text", "logit_image", "logit_text", "layers: text", "vision", "answer"]
    print("| variant | method | bits | " + " | ".join(names) + " |\n|" + "---|" * (3 + len(names)), flush=True)
    found = []
    for record in rows(args):
        found.append(record)
        print(line(record), flush=True)
    verdicts = {}
    for key in ("kl_image", "kl_text", "logit_image", "logit_text"):
        z = [record[key]["z"] for record in found if record["method"] != "rtn"]
        verdicts[key] = {"helps": sum(one < -2 for one in z), "hurts": sum(one > 2 for one in z), "of": len(z)}
    settings = {"model": args.model.name, "balance": args.balance, "samples": args.samples, "seeds": args.seeds}
    print(json.dumps(settings | {"verdicts": verdicts, "rows": found}))


if __name__ == "__main__":
    main()
