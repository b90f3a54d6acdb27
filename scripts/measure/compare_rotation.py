#!/usr/bin/env python
"""Quantize a model's decoder as it is and rotated, and compare perplexity and divergence on English prose.

    scripts/measure/compare_rotation.py MODEL WORK none hadamard -- gptq:bits=3,group_size=64 awq:bits=3,group_size=64

For the model as it is and for each kind of rotation the outliers of Gram matrices (the largest over the mean diagonal), then
each scheme's mean layer error, perplexity, and divergence from the model as it is. Started again it goes on. Calibrated on
the split "calibration" of `eval.english`, measured on "validation". Statistics are of the unquantized model (prefix float),
rounding is emulated, that of 8-bit inputs included, and everything else is computed in float32. Results are added to
WORK/results.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.english import paragraphs as _split
from vlmcompress import models
from vlmcompress.blocks.solve import QuantMethod, apply, solve_block
from vlmcompress.calibration.observe import Wanted, observe
from vlmcompress.calibration.statistics_folder import Collected
from vlmcompress.checkpoint import rotate
from vlmcompress.common import yaml_files
from vlmcompress.common.block_files import block_file
from vlmcompress.common.registry import SCHEMES
from vlmcompress.models import VLM, Source
from vlmcompress.numerics import round_activations
from vlmcompress.statistics.inputs import NEEDS, GroupStats

CALIBRATION, VALIDATION, LONGEST = 32, 12, 160  # paragraphs, and tokens of one
SEED = 0


def main() -> None:
    """Do one step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("kinds", nargs="+", help="none, hadamard, random; behind --: schemes with options")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    args, schemes = parser.parse_args(given[:cut]), given[cut + 1 :]
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with torch.no_grad():
        for scheme in (None, *schemes):
            for kind in args.kinds:
                if time.monotonic() - began > args.seconds:
                    return
                if scheme is None:
                    prepare(args.model, args.work, kind)
                    outliers(args.model, args.work, kind)
                else:
                    measure(args.model, args.work, kind, scheme)


def _folder(model: Path, work: Path, kind: str) -> Path:
    return model if kind == "none" else work / kind / "model"


def _texts(vlm: VLM, split: str, count: int) -> list[dict[str, Tensor]]:
    """The first texts of a split as inputs of the model."""
    made = []
    for text in _split(split)[:count]:
        ids = vlm.processor.tokenizer(text, return_tensors="pt").input_ids[:, :LONGEST]
        ones = torch.ones_like(ids)
        made.append({"input_ids": ids, "attention_mask": ones, "modality": ones.to(torch.uint8)})
    return made


def prepare(model: Path, work: Path, kind: str) -> None:
    """Write the rotated model and its statistics; of the model as it is, also its logits on the validation texts."""
    folder = _folder(model, work, kind)
    if (work / kind / "done").exists():
        return
    if kind != "none":
        rotate.write(Source.of(model), folder, rotate.Rotations(kind, SEED))  # type: ignore[arg-type]
    vlm = models.load(folder, dtype=torch.float32)
    if kind == "none" and not (work / "logits.pt").is_file():
        logits = [_logits(vlm.model, batch).half() for batch in _texts(vlm, "validation", VALIDATION)]
        torch.save(logits, work / "logits.pt")
    target = work / kind / "statistics"
    store = Collected(target, "", resume=True)
    blocks = models.decoder_blocks(vlm.model, vlm.spec)
    samples = _texts(vlm, "calibration", CALIBRATION)
    for layer, seen in observe(vlm, blocks, samples, Wanted(frozenset(NEEDS)), twice=False, known=store.has):
        if seen is not None:
            store.save(layer, seen.stats, {})
    (work / kind / "done").touch()


def _stats(work: Path, kind: str, layer: int) -> dict[str, GroupStats]:
    states: dict[str, dict[str, Tensor]] = {}
    for name, value in load_file(work / kind / "statistics" / block_file(layer)).items():
        group, _, key = name.partition("/")
        states.setdefault(group, {})[key] = value
    return {group: GroupStats.from_state_dict(state) for group, state in states.items()}


def outliers(model: Path, work: Path, kind: str) -> None:
    """Print the largest over the mean diagonal of the Gram matrices of each group: median and largest of all blocks."""
    if _known(work, kind, "outliers"):
        return
    ratios: dict[str, list[float]] = {}
    for layer in range(len(Source.of(model).blocks)):
        for name, stats in _stats(work, kind, layer).items():
            diagonal = stats.gram().diagonal()
            ratios.setdefault(name, []).append(float(diagonal.max() / diagonal.mean()))
    found = {name: [round(sorted(own)[len(own) // 2], 1), round(max(own), 1)] for name, own in ratios.items()}
    _add(work, {"kind": kind, "scheme": "outliers", "median and largest": found})


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits `[tokens, vocabulary]` in float32."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0].float()


def measure(model: Path, work: Path, kind: str, asked: str) -> None:
    """Quantize one model by one scheme (`none`: not at all), and compare its logits with those of the original."""
    if _known(work, kind, asked):
        return
    name, _, rest = asked.partition(":")
    module = SCHEMES.get(name)
    options = dict(part.split("=") for part in rest.split(",")) if rest else {}
    method = QuantMethod(
        module, module.Options(**{key: yaml_files.parse(value, asked) for key, value in options.items()})
    )
    vlm, began = models.load(_folder(model, work, kind), dtype=torch.float32), time.monotonic()
    error = quantize(vlm, work, kind, method) if name != "none" else {}
    seconds = time.monotonic() - began
    known = torch.load(work / "logits.pt")
    nll, divergence, tokens = 0.0, 0.0, 0
    for batch, before in zip(_texts(vlm, "validation", VALIDATION), known, strict=True):
        after, before = _logits(vlm.model, batch).log_softmax(-1), before.float().log_softmax(-1)
        target = batch["input_ids"][0, 1:]
        nll -= float(after[:-1].gather(1, target[:, None]).sum())
        divergence += float((before.exp() * (before - after)).sum(-1)[:-1].sum())
        tokens += len(target)
    found = {"kind": kind, "scheme": asked, "perplexity": math.exp(nll / tokens), "kl": divergence / tokens}
    found |= {"error": error, "tokens": tokens, "seconds": round(seconds, 1)}
    _add(work, found)


def quantize(vlm: VLM, work: Path, kind: str, method: QuantMethod) -> dict[str, float]:
    """Put rounded weights into the model, and hooks that round inputs where the scheme does; mean error by kind of group."""
    errors: dict[str, list[float]] = {}
    for layer, groups in enumerate(models.decoder_blocks(vlm.model, vlm.spec)):
        modules = {n: vlm.model.get_submodule(n) for g in groups for n in (*g.linears, g.smooth) if n}
        weights = {name: modules[name].weight for group in groups for name in group.linears}
        result = solve_block(groups, weights, _stats(work, kind, layer), method, torch.bfloat16)
        apply(result, modules)
        for name in result.weights:
            if method.scheme is not None and method.scheme.activations is not None:
                rounded = functools.partial(round_activations, fmt=method.scheme.activations)
                modules[name].register_forward_pre_hook(lambda _, args, rounded=rounded: (rounded(args[0]),))
        for group in groups:
            own = [next(iter(result.errors[name].values())) for name in group.linears]
            errors.setdefault(group.name, []).extend(own)
    return {name: sum(own) / len(own) for name, own in errors.items()}


def _results(work: Path) -> list[dict]:
    path = work / "results.json"
    return json.loads(path.read_text()) if path.is_file() else []


def _known(work: Path, kind: str, scheme: str) -> bool:
    return any((one["kind"], one["scheme"]) == (kind, scheme) for one in _results(work))


def _add(work: Path, found: dict) -> None:
    """Keep a result, and print it."""
    print(json.dumps(found), flush=True)
    (work / "results.json").write_text(json.dumps([*_results(work), found], indent=1) + "\n")


if __name__ == "__main__":
    main()
