#!/usr/bin/env python
"""Test whether predicted errors rank groups of layers as a model's answers do, quantizing one group at a time.

For each group of the decoder at 2, 3 and 4 bits: the predicted loss with gradients (`predicted`), the same with the errors that
the method makes instead of those that it is foreseen to make (`solved`), the predicted relative output error without gradients
(`relative`), and what really happens to held-out answers (`kl`): the mean KL divergence of the answer tokens' distributions
from the original's. Spearman's rank correlation over groups, by width and over all, and the factor between sums;
predictions come from statistics of other samples. A model that brings no questions is asked English texts, each the answer to
its own first sentence. The last line is one JSON object.

    scripts/measure/compare_prediction.py eval/demo/demo-llava STATS --samples 64
    scripts/measure/compare_prediction.py MODEL STATS --scheme gptq --group-size 64 --blocks 0 1 14 29 --samples 12
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from text_probe import turns

from eval import english
from vlmcompress import models, quantizers
from vlmcompress.blocks.predict import ROWS, Predictor
from vlmcompress.calibration import statistics_folder
from vlmcompress.commands._process import quiet_libraries
from vlmcompress.compression import allocate
from vlmcompress.data import bundled, encode, load_samples
from vlmcompress.models import Source, decoder_blocks
from vlmcompress.quantizers import REGISTRY
from vlmcompress.statistics.inputs import MODALITIES, quadratic

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


def rows(
    vlm: models.VLM, stats: statistics_folder.Statistics, batches: list[dict], args: argparse.Namespace
) -> list[dict]:
    """Measure a row for each group and width."""
    module, original, found = REGISTRY.get(args.scheme), answers(vlm.model, batches), []
    read, plain = allocate.reader(Source.of(vlm.path)), statistics_folder.Statistics(stats.folder, {**stats.facts})
    del plain.facts["gradients"]
    for layer, groups in enumerate(decoder_blocks(vlm.model, vlm.spec)):
        if args.blocks is not None and layer not in args.blocks:
            continue
        loaded, _ = stats.load(layer)
        for group in groups:
            own = loaded[group.name]
            fisher, scale = allocate.predictor_of(group, own, stats, read, "off", ROWS)
            relative, _ = allocate.predictor_of(group, own, plain, read, "ratio", ROWS)
            weights = {name: vlm.model.get_parameter(f"{name}.weight") for name in group.linears}
            kept = {name: weight.detach().clone() for name, weight in weights.items()}
            for bits in WIDTHS:
                options = module.Options(bits=bits, group_size=args.group_size, symmetric=not args.asymmetric)
                solved = quantizers.solve(
                    module, [w.float() for w in kept.values()], own, options, torch.bfloat16
                ).weights
                for weight, quantized in zip(weights.values(), solved, strict=True):
                    weight.data.copy_(quantized.dequantize(weight.dtype))
                row = {
                    "block": layer,
                    "group": group.name,
                    "bits": bits,
                    "predicted": scale * fisher.error(module, options, smooths=False),
                    "solved": scale * true_loss(fisher, list(kept.values()), list(weights.values())),
                    "relative": relative.error(module, options, smooths=False),
                    "kl": divergence(original, answers(vlm.model, batches)),
                }
                found.append(row)
                print(json.dumps(row), flush=True)
            for name, weight in weights.items():
                weight.data.copy_(kept[name])
    return found


def true_loss(predictor: Predictor, before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """The predictor's loss for changes of all rows of the weights, however they came about."""
    total = 0.0
    for one, other, gram in zip(before, after, predictor.grams, strict=True):
        total += 0.0 if gram is None else 0.5 * quadratic(other.float() - one.float(), gram).sum().item()
    return total


def asked(vlm: models.VLM, count: int) -> list[dict]:
    """Encode the first `count` held-out questions that have an answer, or English texts."""
    source = bundled(vlm.path, "validation")
    if source is None:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(turns(text)) + "\n" for text in english.paragraphs("validation")[:count])
            file.flush()
            return encode(load_samples(file.name, samples=count, seed=1), vlm)
    found = encode(load_samples(source, samples=count, seed=1), vlm)
    return [batch for batch in found if (batch["modality"] == ANSWER).any()]


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("stats", type=Path, help="statistics with gradients")
    parser.add_argument("--samples", type=int, default=64, help="of the validation split")
    parser.add_argument("--scheme", choices=("rtn", "gptq"), default="rtn")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--blocks", type=int, nargs="+", help="of the decoder; by default all")
    args = parser.parse_args()
    quiet_libraries()
    vlm = models.load(args.model)
    batches = asked(vlm, args.samples)
    vlm.model.float()
    found = rows(vlm, statistics_folder.read(args.stats), batches, args)
    summary: dict[str, Any] = {"model": args.model.resolve().name, "samples": len(batches)}
    for key in ("predicted", "solved", "relative"):
        by = {str(bits): [row for row in found if row["bits"] == bits] for bits in WIDTHS} | {"all": found}
        summary[key] = {name: spearman([r[key] for r in own], [r["kl"] for r in own]) for name, own in by.items()}
    for bits in WIDTHS:
        own = [row for row in found if row["bits"] == bits]
        summary[f"sums_{bits}"] = {key: sum(row[key] for row in own) for key in ("predicted", "solved", "kl")}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
