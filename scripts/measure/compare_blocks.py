#!/usr/bin/env python
"""Find the decoder blocks that bear 2 bits: LUQ's ranking by entropy against every other choice of blocks, on a demo model.

    scripts/measure/compare_blocks.py [MODEL] [--questions 2000] [--samples 128] [--seed 0] [--balance auto] 2> /dev/null

Every subset of the decoder's blocks gets 2 bits, the others 4 (GPTQ, groups of 128, asymmetric, from statistics of the
unquantized model, so that a block's weights are the same in every subset), and the questions of the test split are asked by
teacher forcing (`teacher_forcing.py`). The four blocks of a demo model have 16 subsets, so a ranking's choice of k blocks is
seen next to all other choices of k. Rankings:

    luq        least entropy of k-means clusters first (LUQ), `reverse` the other way round
    qvlm       least entropy given the block before first
    error      least predicted increase of the answer's loss first (`vlmcompress.blocks.predict`)
    late       the last blocks first

The last line is one JSON object. No engine takes part: vLLM's CPU build has no kernel for 2 bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from teacher_forcing import encode_questions, measure, pack, predictions

from vlmcompress import models
from vlmcompress.blocks.solve import BlockResult, QuantMethod, apply, solve_block
from vlmcompress.calibration import statistics_folder
from vlmcompress.commands._process import quiet_libraries
from vlmcompress.compression import allocate
from vlmcompress.compression.calibrate import calibrate
from vlmcompress.data import bundled, load_samples
from vlmcompress.models import VLM, decoder_blocks
from vlmcompress.planning import plan
from vlmcompress.recipe import resolve

LOW, HIGH = 2, 4
MEASURES = ("exact", "nll", "kl")


def solved(
    vlm: VLM, blocks: Sequence, stats: statistics_folder.Statistics, balance: str
) -> dict[tuple[int, int], BlockResult]:
    """Solve each block at each number of bits: (block, bits) -> result."""
    found = {}
    for bits in (LOW, HIGH):
        module = resolve({"model": str(vlm.path), "scheme": "gptq"}).recipe.method
        method = QuantMethod(module, module.Options(bits=bits, symmetric=False, balance=balance))
        for layer, groups in enumerate(blocks):
            weights = {name: vlm.model.get_parameter(f"{name}.weight") for g in groups for name in g.linears}
            found[layer, bits] = solve_block(groups, weights, stats.load(layer)[0], method, torch.bfloat16)
    return found


def rankings(model: Path, stats: statistics_folder.Statistics, folder: Path, balance: str) -> dict[str, list[int]]:
    """Rank blocks: name of the ranking -> blocks, those that lose their bits first at the front."""
    entropy = stats.facts["entropy"]
    blocks = range(len(entropy["luq"]))
    given = {"model": str(model), "out": str(folder / "x"), "scheme": "gptq", "calibrate": {"stats": str(stats.folder)}}
    bits = {"budget": 3.25, "among": [LOW, HIGH]}
    recipe = resolve(given | {"bits": bits, "options": {"symmetric": False, "balance": balance}}).recipe
    errors = allocate.predicted(plan.survey(recipe), stats, allocate.reader(model), lambda *_: None)
    loss = dict.fromkeys(blocks, 0.0)
    for (layer, _), own in errors.items():
        low, high = (next(value for name, value in own.items() if name.startswith(f"{b}")) for b in (LOW, HIGH))
        loss[layer] += low - high
    luq = sorted(blocks, key=lambda block: entropy["luq"][block])
    return {
        "luq": luq,
        "reverse": luq[::-1],
        "qvlm": sorted(blocks, key=lambda block: entropy["qvlm"][block]),
        "error": sorted(blocks, key=lambda block: loss[block]),
        "late": list(blocks)[::-1],
    }


def asked(vlm: VLM, results: Mapping[tuple[int, int], BlockResult], rows: Sequence, original: tuple) -> dict:
    """Ask every subset: blocks with LOW bits -> measure -> mean over questions."""
    layers = 1 + max(layer for layer, _ in results)
    modules = dict(vlm.model.named_modules())
    logits, label, question = original
    found = {}
    for count in range(layers + 1):
        for chosen in itertools.combinations(range(layers), count):
            for layer in range(layers):
                apply(results[layer, LOW if layer in chosen else HIGH], modules)
            got = measure(logits, predictions(vlm, rows)[0], label, question)
            found[chosen] = {name: float(got[name].mean()) for name in MEASURES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("eval/demo/demo-llava"))
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=128, help="calibration samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--balance", default="auto")
    args = parser.parse_args()
    quiet_libraries()
    vlm = models.load(args.model)
    with tempfile.TemporaryDirectory() as temporary:
        given = {"model": str(args.model), "out": str(Path(temporary, "stats")), "scheme": "none", "seed": args.seed}
        calibrate(resolve(given | {"calibrate": {"samples": args.samples}}).recipe, needs=None)
        stats = statistics_folder.read(Path(temporary, "stats"))
        blocks = decoder_blocks(vlm.model, vlm.spec)
        results = solved(vlm, blocks, stats, args.balance)
        orders = rankings(args.model, stats, Path(temporary), args.balance)
    entropy = stats.facts["entropy"]
    samples = load_samples(bundled(args.model, "test"), samples=args.questions, seed=0)
    rows = pack(encode_questions(vlm, samples))
    original = predictions(vlm, rows)
    whole = float(measure(original[0], original[0], *original[1:])["exact"].mean())
    found = asked(vlm, results, rows, original)
    print(f"{args.model.name}: unquantized {whole:.4f}; entropies {entropy}")
    print("| 2-bit blocks | chosen by | exact | nll | first-token KL |\n|---|---|---|---|---|")
    for chosen, values in found.items():
        names = [name for name, order in orders.items() if tuple(sorted(order[: len(chosen)])) == chosen]
        label = ", ".join(names) if 0 < len(chosen) < len(blocks) else "all"
        cells = (f"{values[name]:.4f}" for name in MEASURES)
        print(f"| {' '.join(map(str, chosen)) or 'none'} | {label} | {' | '.join(cells)} |")
    record = {
        "model": args.model.name,
        "settings": {"samples": args.samples, "seed": args.seed, "balance": args.balance, "questions": len(samples)},
        "unquantized": whole,
        "entropy": entropy,
        "orders": orders,
        "subsets": [{"blocks": list(chosen), **values} for chosen, values in found.items()],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
