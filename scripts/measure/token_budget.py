#!/usr/bin/env python
"""How many tokens layers have to be fitted to: errors of outputs on other samples, by the number of tokens.

    scripts/measure/token_budget.py MODEL --work DIR    measures the decoder's blocks `--blocks`, into eval/token_budget.json
    scripts/measure/token_budget.py MODEL --kl          and how far it diverges with its first blocks quantized
    scripts/measure/token_budget.py --render            prints the docs' table

Samples are those of `compare_weights.py`; `--samples` calibrate, a quarter as many more measure. All run through the model in
16 bits once. For each number of tokens and seed so many are drawn, as by `calibrate.tokens`, or whole samples with about as
many; a block's layers are quantized from these, and their relative output errors are measured on the other samples' tokens.
The table has the ratio of that error to the one with all tokens: geometric means over layers and seeds, the lowest and the
highest, and what a regression on d independent inputs would have. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from argparse import Namespace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from paired import about, numbered
from weights_table import ratio

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "token_budget.json"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
TOKENS = (2048, 4096, 8192, 16384)
WAYS = ("drawn", "whole samples")
FIRST, KL_TOKENS = 6, (0, 4096, 8192)  # blocks that are quantized where divergences are measured; 0: all
DIVERGENCES = {"texts": "text/kl", "answers": "answers/path"}


def measure(args: Namespace) -> dict[str, Any]:
    """Errors of each layer for each number of tokens and seed."""
    from weights_bench import Bench

    from vlmcompress import models
    from vlmcompress.models.data import encode, load_samples
    from vlmcompress.models.devices import full_float32
    from vlmcompress.numerics.statistics.collect import Collector
    from vlmcompress.numerics.statistics.inputs import GroupStats
    from vlmcompress.numerics.statistics.tokens import split_modalities, thinned
    from vlmcompress.quantization.calibration.block_inputs import StopForward
    from vlmcompress.quantization.calibration.solve import QuantMethod
    from vlmcompress.quantization.run import _solve

    bench = Bench(args.model.resolve(), "validation", Namespace(work=args.work.resolve(), samples=0, questions=0))
    vlm = models.load(bench.folder)
    vlm.model.float()
    others = args.samples // 4
    encoded = encode(load_samples(bench.data, samples=args.samples + others, seed=0), vlm)
    every = models.decoder_blocks(vlm.model, vlm.spec)
    blocks = [(number, every[number]) for number in args.blocks]
    masks = [sample["modality"].flatten() for sample in encoded]
    rows: dict[str, list[torch.Tensor]] = {group.linears[0]: [] for _, groups in blocks for group in groups}
    last = models.decoder_layers(vlm.model, vlm.spec)[max(args.blocks)]

    def stop(*_: Any) -> None:
        raise StopForward

    for name, kept in rows.items():
        hook = lambda _module, inputs, kept=kept: kept.append(inputs[0].flatten(0, -2).bfloat16())  # noqa: E731
        vlm.model.get_submodule(name).register_forward_pre_hook(hook)
    vlm.model.get_submodule(last).register_forward_hook(stop)
    with torch.no_grad(), full_float32():
        for sample in encoded:
            with contextlib.suppress(StopForward):
                vlm.model(**{key: value for key, value in sample.items() if key != "modality"}, use_cache=False)
        print("captured", sum(map(len, masks)), file=sys.stderr, flush=True)
        vlm.model.bfloat16()
        method, results = QuantMethod.named(args.scheme, group_size=64), []
        held = torch.cat(masks[args.samples :])
        fitted = torch.cat(masks[: args.samples])
        draws = [(seed, tokens, way) for seed in range(args.seeds) for tokens in TOKENS for way in WAYS]
        for seed, tokens, way in [(0, 0, "drawn"), *draws]:
            if way == "drawn":
                chosen = thinned(masks[: args.samples], tokens, seed)
            else:  # so many samples at random that have about as many tokens
                order = torch.randperm(args.samples, generator=torch.Generator().manual_seed(seed))
                sizes = torch.stack([(masks[index] > 0).sum() for index in order]).cumsum(0)
                kept = {int(index) for index, size in zip(order, sizes, strict=True) if size <= tokens}
                chosen = [mask * (index in kept) for index, mask in enumerate(masks[: args.samples])]
            split = split_modalities(torch.cat(chosen))
            for number, groups in blocks:
                stats = {}
                for group in groups:
                    x = torch.cat(rows[group.linears[0]])
                    collector = Collector(x.shape[1], method.needs.statistics)
                    collector.add(x[: len(fitted)], split)
                    stats[group.name] = collector.finish()
                    other = x[len(fitted) :][held > 0]
                    stats[group.name].held_out = GroupStats.of_rows({"text": other[:: -(-len(other) // 2048)]})
                result = _solve(vlm, groups, stats, method, {}, torch.device("cpu"))
                row = {"block": number, "tokens": tokens, "way": way, "seed": seed}
                row["errors"] = {
                    name.rpartition(".")[2]: [vlm.model.get_submodule(name).in_features, error["text"]]
                    for name, error in result.errors.items()
                }
                results.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    return {
        "model": args.model.name,
        "scheme": args.scheme,
        "samples": args.samples,
        "tokens": int((fitted > 0).sum()),
        "rows": results,
    }


def divergences(args: Namespace) -> dict[str, Any]:
    """Nats by which the model diverges with its first blocks quantized, on each text and each answer about an image.

    For each number of tokens as many calibrations as `--seeds`: each has its own samples and its own draw of their tokens.
    """
    import teacher_forcing
    from weight_methods import FORMATS, METHODS
    from weights_bench import Bench

    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve

    work = args.work.resolve()
    settings = Namespace(work=work, samples=args.samples, questions=args.questions, paragraphs=24)
    bench, results = Bench(args.model.resolve(), "validation", settings), []
    for seed, tokens in itertools.product(range(args.seeds), KL_TOKENS):
        keys = bench.recipe_keys(work / "checkpoint", seed) | METHODS[args.scheme].recipe_in(FORMATS["W4 g64"])
        keys["calibrate"] |= {"tokens": tokens}
        quantize(resolve(keys | {"skip": [rf"layers\.(?![0-{FIRST - 1}]\.)"]}).recipe, overwrite=True, restart=True)
        measures = bench.measure(teacher_forcing.load_quantized(work / "checkpoint", bench.plain))
        row = {name: [float(f"{x:.5g}") for x in measures[key].tolist()] for name, key in DIVERGENCES.items()}
        results.append({"seed": seed, "tokens": tokens} | row)
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return {"images": numbered([about(sample) for sample in bench.questions]).tolist(), "rows": results}


def render(measured: dict[str, Any]) -> str:
    """The docs' table."""
    rows, every = measured["rows"], measured["tokens"]
    whole = {
        (row["block"], name): error for row in rows if not row["tokens"] for name, (_, error) in row["errors"].items()
    }
    logs: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in rows:
        for name, (inputs, error) in row["errors"].items() if row["tokens"] else ():
            ways = logs.setdefault((row["tokens"], inputs), {})
            ways.setdefault(row["way"], []).append(log(error / whole[row["block"], name]))
    lines = ["| tokens for each input | tokens, inputs | drawn from all samples | whole samples | n / (n - d) |"]
    lines += ["|---:|---:|---:|---:|---:|"]
    for (tokens, inputs), ways in sorted(logs.items(), key=lambda item: item[0][0] / item[0][1]):
        cells = [
            f"{exp(fmean(ways[way])):.2f} ({exp(min(ways[way])):.2f} to {exp(max(ways[way])):.2f})" for way in WAYS
        ]
        expected = tokens / (tokens - inputs) / (every / (every - inputs))
        lines.append(f"| {tokens / inputs:.1f} | {tokens:,}, {inputs:,} | {' | '.join(cells)} | {expected:.2f} |")
    kl = {
        (name, tokens): torch.tensor([row[name] for row in measured["kl"]["rows"] if row["tokens"] == tokens])
        for name, tokens in itertools.product(DIVERGENCES, KL_TOKENS)
    }
    texts, answers = (kl[name, 0].shape[1] for name in DIVERGENCES)
    clusters = {"texts": torch.arange(texts), "answers": torch.tensor(measured["kl"]["images"])}
    lines += [
        "",
        f"| tokens | KL of {texts} texts | KL of {answers} answers about images |",
        "|---:|---:|---:|",
    ]
    for tokens in KL_TOKENS[1:]:
        ratios = [ratio(kl[name, tokens], kl[name, 0], clusters[name]) for name in DIVERGENCES]
        cells = [f"{x['ratio']:.2f} ({x['low']:.2f} to {x['high']:.2f})" for x in ratios]
        lines.append(f"| {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path, default=Path("out/tokens"))
    parser.add_argument("--scheme", default="gptq-plus")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument(
        "--questions", type=int, default=120, help="of a kind about images, where divergences are measured"
    )
    parser.add_argument("--kl", action="store_true", help="measure divergences on texts and answers instead")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.kl:
        RESULTS.write_text(json.dumps(json.loads(RESULTS.read_text()) | {"kl": divergences(args)}) + "\n")
    elif not args.render:
        RESULTS.write_text(json.dumps(measure(args)) + "\n")
    measured = json.loads(RESULTS.read_text())
    print(render(measured))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
