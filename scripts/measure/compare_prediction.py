#!/usr/bin/env python
"""Test whether predicted errors rank groups of layers as the answers of a demo model do, rounding one group at a time.

For each group of the decoder at 2, 3 and 4 bits (round to nearest, groups of 128): the predicted loss with gradients, the
predicted relative output error without, and what really happens to held-out answers: the mean KL divergence of the answer
tokens' distributions from the original's. Spearman's rank correlation over groups, by width and over all; predictions come
from statistics of other samples. The last line is one JSON object.

    scripts/measure/compare_prediction.py eval/demo/demo-llava STATS --samples 64
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from vlmcompress import models, quantizers
from vlmcompress.calibration import statistics_folder
from vlmcompress.commands._terminal import quiet_libraries
from vlmcompress.compression import allocate
from vlmcompress.data import bundled, encode, load_samples
from vlmcompress.models import decoder_blocks
from vlmcompress.quantizers import REGISTRY
from vlmcompress.statistics.inputs import MODALITIES

ANSWER = 1 + MODALITIES.index("answer")
WIDTHS = (2, 3, 4)


def answers(model: Any, batches: list[dict]) -> list[torch.Tensor]:
    """Compute log probabilities `[answer tokens, vocabulary]` of each sample, teacher forced."""
    found = []
    for batch in batches:
        before = (batch["modality"][0, 1:] == ANSWER).nonzero().squeeze(1)
        inputs = {key: value for key, value in batch.items() if key != "modality"}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False, logits_to_keep=before).logits[0]
        found.append(logits.float().log_softmax(-1))
    return found


def divergence(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Mean KL divergence in nats."""
    return sum(float((p.exp() * (p - q)).sum(1).mean()) for p, q in zip(before, after, strict=True)) / len(before)


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; there are no ties among measured numbers."""
    ranks = torch.stack([torch.tensor(values).argsort().argsort().double() for values in (a, b)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 3)


def rows(vlm: models.VLM, stats: statistics_folder.Statistics, batches: list[dict]) -> list[dict]:
    """Measure a row for each group and width."""
    rtn, original, found = REGISTRY.get("rtn"), answers(vlm.model, batches), []
    read, plain = allocate.reader(vlm.path), statistics_folder.Statistics(stats.folder, {**stats.facts})
    del plain.facts["gradients"]
    for layer, groups in enumerate(decoder_blocks(vlm.model, vlm.spec)):
        loaded, _ = stats.load(layer)
        for group in groups:
            fisher, scale = allocate.predictor_of(group, loaded[group.name], stats, read, "off", 64)
            relative, _ = allocate.predictor_of(group, loaded[group.name], plain, read, "ratio", 64)
            weights = {name: vlm.model.get_parameter(f"{name}.weight") for name in group.linears}
            kept = {name: weight.detach().clone() for name, weight in weights.items()}
            for bits in WIDTHS:
                options = rtn.Options(bits=bits)
                for name, weight in weights.items():
                    solved = quantizers.solve(rtn, [kept[name]], None, options, weight.dtype).weights[0]
                    weight.data.copy_(solved.dequantize(weight.dtype))
                row = {
                    "block": layer,
                    "group": group.name,
                    "bits": bits,
                    "predicted": scale * fisher.error(rtn, options),
                }
                row |= {
                    "relative": relative.error(rtn, options),
                    "kl": divergence(original, answers(vlm.model, batches)),
                }
                found.append(row)
                print(row, flush=True)
            for name, weight in weights.items():
                weight.data.copy_(kept[name])
    return found


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("stats", type=Path, help="statistics with gradients")
    parser.add_argument("--samples", type=int, default=64, help="of the validation split")
    args = parser.parse_args()
    quiet_libraries()
    vlm = models.load(args.model)
    source = bundled(args.model, "validation")
    batches = [
        b for b in encode(load_samples(source, samples=args.samples, seed=1), vlm) if (b["modality"] == ANSWER).any()
    ]
    found = rows(vlm, statistics_folder.read(args.stats), batches)
    summary: dict[str, Any] = {"model": args.model.resolve().name, "samples": len(batches)}
    for key in ("predicted", "relative"):
        by = {str(bits): [row for row in found if row["bits"] == bits] for bits in WIDTHS} | {"all": found}
        summary[key] = {name: spearman([r[key] for r in own], [r["kl"] for r in own]) for name, own in by.items()}
    for bits in WIDTHS:
        own = [row for row in found if row["bits"] == bits]
        summary[f"sums_{bits}"] = {key: sum(row[key] for row in own) for key in ("predicted", "kl")}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
