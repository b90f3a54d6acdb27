#!/usr/bin/env python
"""Whether visual tokens should be chosen differently when the language model is quantized.

    scripts/measure/joint_choice.py --split validation --per-family 40     all candidates, few questions
    scripts/measure/joint_choice.py --candidates "no outliers" learned     some; goes on from ROWS
    scripts/measure/joint_choice.py --summarise                            figures of what there is so far
    scripts/measure/joint_choice.py --render                               the docs' tables, from eval/joint.json

QUOTA (arXiv 2604.17320) and QAPruner (arXiv 2604.02816) report that stacking quantization and selection is brittle at W4A4, and
that choosing tokens with rounding in mind pays. Here each question is asked of the model in 16 bits and quantized, with all
tokens and with a share chosen by `coverage`, on the same images. Where stacking is brittle, both together cost more than the
sum of what each costs alone; the difference is the *interaction*. A choice for the quantized model should be better there than
in 16 bits, so candidates are also asked in 16 bits, with the choice made for the quantized model.

A candidate is a function of an image's projected tokens and the first decoder blocks of both models (`CANDIDATES`), or the
reducer `learned`, its scorer trained here under the decoder in 16 bits or a quantized one (`SCORERS`). Questions
are those of `bench_reducers.py`; teacher forcing tells whether greedy answers are right, with inputs rounded as an engine does
it (`teacher_forcing.py`). Both splits' figures go to eval/joint.json. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import bench_reducers
import paired
import teacher_forcing
import torch
from teacher_forcing import Rows
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample, bundled_data, encode
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.reduction.choice import ReducerChoice, make_choice
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import Reduction, Signals, coverage
from vlmcompress.reduction.methods import _selecting as selecting
from vlmcompress.training.learn_reducer import ScorerTraining, learn_reducer

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "joint.json"
MODELS = bench_reducers.MODELS
PLAIN = "16 bits"
SCHEMES: dict[str, dict[str, Any]] = {  # number format -> keys of a recipe
    "MXFP4": {"scheme": "mxfp4"},
    "NVFP4": {"scheme": "nvfp4", "options": {"mixed": False}},
    "W3": {"scheme": "gptq-plus", "options": {"bits": 3}},
    "W4A8": {"scheme": "w4a8-fp8"},
    "NVFP4, tower INT8": {"scheme": "nvfp4", "options": {"mixed": False}, "vision": "int8"},
}
W4A4 = ("MXFP4", "NVFP4")  # candidates choose for these; their choice for the first is tried in 16 bits, too
SCORERS = {"learned": PLAIN, "learned under NVFP4": "NVFP4"}  # choice of a scorer -> decoder it was trained with
TRAINING, TEACHING = {"steps": 100, "batch": 8, "every": 50}, 300  # of a scorer: settings, samples
SHARES = (0.3, 0.125, 0.5)
CALIBRATION = 128  # samples
STRENGTH = 0.3  # of scores; no other was asked of quantized models


@dataclass(frozen=True)
class Blocks:
    """The first decoder block of the quantized model and of the original."""

    quantized: nn.Module
    original: nn.Module


def read(block: Any, rows: Tensor) -> Tensor:
    """What a block's attention reads of rows `[n, d]` that enter it, rounded as an engine does it."""
    return teacher_forcing.round_input(block.self_attn.q_proj, block.input_layernorm(rows))


def projected(block: Any, rows: Tensor) -> Tensor:
    """Queries, keys and values of rows `[n, d]` side by side."""
    x = read(block, rows)
    layers = (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
    return torch.cat([nn.functional.linear(x, layer.weight, layer.bias) for layer in layers], -1)


def error(rows: Tensor, blocks: Blocks) -> Tensor:
    """Each token's error of queries, keys and values by quantizing, relative to their length, `[n]`."""
    exact = projected(blocks.original, rows)
    return (projected(blocks.quantized, rows) - exact).norm(dim=-1) / exact.norm(dim=-1)


def outliers(rows: Tensor, blocks: Blocks) -> Tensor:
    """Each token's largest channel, relative to the root of the mean square, `[n]`."""
    x = blocks.quantized.input_layernorm(rows)  # type: ignore[operator]
    return x.abs().amax(-1) / x.square().mean(-1).sqrt()


def covering(rows: Tensor, count: int, score: Tensor | None = None) -> Tensor:
    """The choice of `coverage`, `[count]`; gains count `exp(STRENGTH score)` times, `score [n]` standardized."""
    weight = None
    if score is not None:
        weight = (STRENGTH * (score - score.mean()) / score.std().clamp(min=1e-9)).exp()
    return selecting.cover(coverage.represented(rows, coverage.Options().temperature), count, weight)


Choose = Callable[[Tensor, int, Blocks], Tensor]
CANDIDATES: dict[str, Choose] = {
    # tokens of small error in the first block are preferred, or those of large error, as QAPruner keeps what is sensitive
    "small error": lambda rows, count, blocks: covering(rows, count, -error(rows, blocks)),
    "large error": lambda rows, count, blocks: covering(rows, count, error(rows, blocks)),
    "outliers": lambda rows, count, blocks: covering(rows, count, outliers(rows, blocks)),
    "no outliers": lambda rows, count, blocks: covering(rows, count, -outliers(rows, blocks)),
    # similarity of what the quantized model computes with, instead of the projector's rows
    "rounded": lambda rows, count, blocks: covering(read(blocks.quantized, rows), count),
    "projected": lambda rows, count, blocks: covering(projected(blocks.quantized, rows), count),
}


@dataclass(frozen=True)
class Candidate(ReducerChoice):
    """`coverage` with another choice: `choose` gets an image's rows `[n, d]` and a count, and returns indices."""

    choose: Callable[[Tensor, int], Tensor] = field(kw_only=True)

    @property
    def module(self) -> ModuleType:
        def reduce(signals: Signals, options: coverage.Options) -> Reduction:
            assert signals.features is not None
            return Reduction.keep(self.choose(signals.features, options.budget(signals.grid)), signals.n)

        module = ModuleType("candidate")
        vars(module).update(vars(coverage) | {"reduce": reduce})
        return module


@dataclass(frozen=True)
class Cell:
    """A setting: number format, way to choose tokens, their share, and whether calibration ran behind `coverage`, too."""

    scheme: str
    choice: str
    keep: float = 1.0
    reduced_calibration: bool = False

    @property
    def key(self) -> str:
        return f"{self.scheme} | {self.choice} | {self.keep:g}" + " | behind" * self.reduced_calibration


def cells(candidates: list[str]) -> Iterator[Cell]:
    """List the settings, a quantized model after the other, and models calibrated with fewer tokens last."""
    yield Cell(PLAIN, "all")
    for scheme in SCHEMES:
        yield Cell(scheme, "all")
        for share in shares(scheme):
            if scheme == W4A4[0]:
                yield Cell(PLAIN, "coverage", share)
            yield Cell(scheme, "coverage", share)
            for name in candidates if share != 0.5 else ():
                if scheme in (W4A4 if name in CANDIDATES else SCORERS.values()):
                    yield Cell(scheme, name, share)
                    if scheme == W4A4[0] or name in SCORERS:
                        yield Cell(PLAIN, control(name, scheme), share)
        if scheme == W4A4[0]:
            yield from (Cell(scheme, "random", SHARES[0]), Cell(PLAIN, "random", SHARES[0]))
    for scheme in SCHEMES:
        yield from (Cell(scheme, "coverage", share, reduced_calibration=True) for share in shares(scheme))


def shares(scheme: str) -> tuple[float, ...]:
    """The shares asked of a format."""
    return SHARES if scheme == W4A4[0] else SHARES[:1]


def control(choice: str, scheme: str) -> str:
    """The name of a choice made for a format where the model in 16 bits is asked; a scorer has one choice for all."""
    return f"{choice}, {scheme}" if choice in CANDIDATES else choice


def measure(args: argparse.Namespace) -> None:
    """Append a row for every setting that ROWS lacks."""
    args.rows.parent.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        done = {row["cell"] for row in bench_reducers.kept_rows(args) if row["model"] == name}
        left = [cell for cell in cells(args.candidates) if cell.key not in done]
        left = [cell for cell in left if not args.schemes or cell.scheme in (PLAIN, *args.schemes)]
        if not left:
            continue
        bench = Bench(name, args)
        for cell in left:
            start = time.process_time()
            logits, label, question = teacher_forcing.predictions(bench.model(cell), bench.inputs(cell))
            measures = teacher_forcing.measure(logits, logits, label, question)
            row = {"model": name, "split": args.split, "per_family": args.per_family, "cell": cell.key}
            row["exact"] = "".join(str(int(right)) for right in measures["exact"])
            row["nll"] = [round(value, 4) for value in measures["nll"].tolist()]
            row["seconds"] = round(time.process_time() - start, 1)
            with args.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
            figures = f"{100 * float(measures['exact'].mean()):.2f}%, {float(measures['nll'].mean()):.4f} nats"
            print(
                f"{time.strftime('%H:%M:%S')} {name} {cell.key}: {figures}, {row['seconds']} s",
                file=sys.stderr,
                flush=True,
            )


class Bench:
    """A model, its questions, and the last quantized model and last inputs of each choice."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name, self.work, self.original = name, args.work, models.load(MODELS[name])
        self.original.model.float()
        self.batches = encode(bench_reducers.samples(name, args.split, args.per_family), self.original)
        base: Any = self.original.model.get_submodule(self.original.spec.layers.split(".")[0])
        base.get_image_features = teacher_forcing.remembering(base.get_image_features, len(self.batches))
        self._quantized: tuple[tuple[str, float], VLM] | None = None
        self._inputs: dict[Any, list[Rows]] = {}

    def model(self, cell: Cell) -> VLM:
        """The model that answers."""
        return (
            self.original
            if cell.scheme == PLAIN
            else self.quantized(cell.scheme, cell.keep if cell.reduced_calibration else 0)
        )

    def quantized(self, scheme: str, share: float) -> VLM:
        """The quantized model, calibrated behind `coverage` if `share` is not 0."""
        if self._quantized is None or self._quantized[0] != (scheme, share):
            out, source = self.work / "checkpoint", MODELS[self.name]
            keys = {"model": str(source), "out": str(out), "seed": 0} | SCHEMES[scheme]
            keys["calibrate"] = {"data": str(bundled_data(source, "calibration")), "samples": CALIBRATION}
            keys |= {"reduce": f"coverage:{share}"} if share else {}
            quantize(resolve(keys).recipe, overwrite=True, restart=True)
            self._quantized = (scheme, share), teacher_forcing.load_quantized(out, self.original)
            self._quantized[1].model.float()
            shutil.rmtree(out)
        return self._quantized[1]

    def inputs(self, cell: Cell) -> list[Rows]:
        """What enters the language model. It depends on the format where that includes the tower, and for candidates, whose
        names have the format where the model in 16 bits is asked."""
        name, _, scheme = cell.choice.partition(", ") if cell.scheme == PLAIN else (cell.choice, "", cell.scheme)
        vlm = self.model(cell) if "vision" in SCHEMES.get(scheme, {}) else self.original
        key = name, cell.keep, scheme if name in CANDIDATES or vlm is not self.original else ""
        if key not in self._inputs:
            chosen = None if name == "all" else self.choice(name, cell.keep, scheme)
            with attach(vlm, chosen) if chosen else contextlib.nullcontext():
                questions = teacher_forcing.enter_language_model(vlm, self.batches)
            self._inputs[key] = teacher_forcing.pack(questions)
        return self._inputs[key]

    def choice(self, name: str, keep: float, scheme: str) -> ReducerChoice:
        """The reducer of a setting; candidates look at the model quantized without it."""
        if name in SCORERS:
            return make_choice("learned", {"keep": keep, "scorer": str(self.scorer(SCORERS[name]))}, "choice")
        if name not in CANDIDATES:
            return make_choice(name, {"keep": keep}, "choice")
        blocks = Blocks(*(first_block(vlm) for vlm in (self.quantized(scheme, 0), self.original)))
        return Candidate("coverage", coverage.Options(keep), choose=lambda rows, n: CANDIDATES[name](rows, n, blocks))

    def scorer(self, scheme: str) -> Path:
        """The file of a scorer, trained first where there is none: with it a decoder of this format, inputs rounded, should
        answer as it does with all tokens."""
        path = self.work / f"{self.name} {scheme}.safetensors"
        if not path.exists():
            vlm = models.load(MODELS[self.name]) if scheme == PLAIN else self.quantized(scheme, 0)
            vlm.model.float()
            training = ScorerTraining(SHARES[0], **TRAINING)
            data = {"data": str(bundled_data(MODELS[self.name], "calibration")), "samples": TEACHING}
            keys = {"model": str(MODELS[self.name]), "out": str(path), "scheme": "none", "seed": 0, "calibrate": data}
            hooks = teacher_forcing.round_activations(vlm.model)
            with mock.patch.object(models, "load", lambda *_args, **_flags: vlm):  # a path can't name it
                print(learn_reducer(resolve(keys).recipe, training, restart=True)["held_out_kl"], file=sys.stderr)
            for hook in hooks:
                hook.remove()
        return path


def first_block(vlm: VLM) -> nn.Module:
    return vlm.model.get_submodule(models.decoder_layers(vlm.model, vlm.spec)[0])


Answers = dict[str, tuple[Tensor, Tensor]]
"""Setting -> whether answers are right, 0 or 1, and -log p, each `[questions]`."""


EMPTY: dict[str, Any] = {"questions": {}, "images": {}, "exact": {}, "rows": [], "candidates": [], "scorers": []}


def summarise(rows: list[dict[str, Any]], samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Figures of the rows: points of exact match and nats of the answer's -log p, each with half its interval of 95%.

    Args:
        samples: model -> its questions, in the order of the rows' answers.
    """
    results: dict[str, Any] = copy.deepcopy(EMPTY)
    for name, questions in samples.items():
        clusters = paired.numbered([paired.about(sample) for sample in questions])
        answers: Answers = {
            row["cell"]: (torch.tensor([float(letter) for letter in row["exact"]]), torch.tensor(row["nll"]))
            for row in rows
            if row["model"] == name
        }
        full, change = Cell(PLAIN, "all"), functools.partial(_change, answers, clusters)
        if full.key not in answers:
            continue
        results["questions"][name], results["images"][name] = len(questions), int(clusters.max()) + 1
        results["exact"][name] = round(float(answers[full.key][0].mean()), 4)
        for scheme in SCHEMES:
            whole = Cell(scheme, "all")
            for share in sorted(SHARES, reverse=True):
                both, reduced = Cell(scheme, "coverage", share), Cell(PLAIN, "coverage", share)
                calibrated = Cell(scheme, "coverage", share, reduced_calibration=True)
                if not {cell.key for cell in (both, reduced, whole)} <= answers.keys():
                    continue
                row: dict[str, Any] = {"model": name, "scheme": scheme, "keep": share}
                row["quantized"], row["reduced"] = change((1, whole), (-1, full)), change((1, reduced), (-1, full))
                row["both"] = change((1, both), (-1, full))
                row["interaction"] = change((1, both), (-1, whole), (-1, reduced), (1, full))
                if calibrated.key in answers:
                    row["reduced_calibration"] = change((1, calibrated), (-1, both))
                results["rows"].append(row)
                for choice in ("random", *CANDIDATES, *SCORERS):
                    pairs = {"quantized": (Cell(scheme, choice, share), both)}
                    pairs[PLAIN] = Cell(PLAIN, control(choice, scheme), share), reduced
                    figures = {part: change((1, a), (-1, b)) for part, (a, b) in pairs.items() if a.key in answers}
                    if "quantized" in figures:
                        start = {"model": name, "scheme": scheme, "keep": share, "choice": choice}
                        results["candidates"].append(start | figures)
                pairs = {"quantized": [Cell(scheme, choice, share) for choice in SCORERS]}
                pairs[PLAIN] = [Cell(PLAIN, choice, share) for choice in SCORERS]
                if all(cell.key in answers for cell in itertools.chain(*pairs.values())):
                    figures = {part: change((1, joint), (-1, plain)) for part, (plain, joint) in pairs.items()}
                    results["scorers"].append({"model": name, "scheme": scheme, "keep": share} | figures)
    return results


def _change(answers: Answers, clusters: Tensor, *signed: tuple[int, Cell]) -> dict[str, list[float]]:
    """The sum of settings, each with its sign: points and nats, each with half its interval."""
    exact, nll = (sum((sign * answers[cell.key][part] for sign, cell in signed), torch.zeros(())) for part in (0, 1))
    nats = [round(value / 100, 4) for value in paired.points(nll[None], clusters, 2)]
    return {"points": paired.points(exact[None], clusters, 2), "nats": nats}


def render(results: dict[str, Any]) -> str:
    """The docs' tables: what quantizing and reducing cost alone and together, and other choices next to `coverage`."""
    lines = ["| model | format | kept | quantized | reduced | both | interaction | in nats | calibrated with fewer |"]
    lines.append("|---|---|---:|" + "---:|" * 6)
    for row in results["test"]["rows"]:
        parts = [_points(row[name]["points"]) for name in ("quantized", "reduced", "both", "interaction")]
        nats, calibrated = row["interaction"]["nats"], row.get("reduced_calibration")
        parts += [f"{nats[0]:+.3f} ±{nats[1]:.3f}", _points(calibrated["points"]) if calibrated else ""]
        lines.append(_line(row, row["scheme"], parts))
    rows: dict[str, dict[str, str]] = {}
    for split in ("test", "validation"):
        for figure in results[split]["candidates"]:
            for part, scheme in (("quantized", figure["scheme"]), (PLAIN, PLAIN)):
                if part in figure:
                    row = rows.setdefault(_line(figure, scheme, [split]), {})
                    row[figure["choice"]] = _points(figure[part]["points"])
    names = [name for name in ("random", *CANDIDATES, *SCORERS) if any(name in row for row in rows.values())]
    lines += [
        "",
        "| model | format | kept | split | " + " | ".join(names) + " |",
        "|---|---|---:|---|" + "---:|" * len(names),
    ]
    lines += [start + "".join(f" {row.get(name, '')} |" for name in names) for start, row in rows.items()]
    for figure in results["test"]["scorers"]:
        lines += ["", f"| model | format | kept | {' less '.join(reversed(SCORERS))} |", "|---|---|---:|---:|"]
        for part, scheme in (("quantized", figure["scheme"]), (PLAIN, PLAIN)):
            lines.append(_line(figure, scheme, [_points(figure[part]["points"])]))
    return "\n".join(lines)


def _line(figure: dict[str, Any], scheme: str, parts: list[str]) -> str:
    start = [figure["model"].removeprefix("demo-"), scheme, f"{100 * figure['keep']:g}%"]
    return "| " + " | ".join(start + parts) + " |"


def _points(points: list[float]) -> str:
    """A change in points with half its interval; `*` where the interval leaves zero out."""
    change, half = points
    return f"{change:+.1f} ±{half:.1f}" + " *" * (abs(change) > half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench_reducers.flags(parser, RESULTS, 112)
    parser.add_argument("--work", type=Path, default=Path("out/joint"), help="folder for one checkpoint at a time")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, help="default: all")
    parser.add_argument("--candidates", nargs="*", choices=[*CANDIDATES, *SCORERS], default=list(CANDIDATES))
    args = parser.parse_args()
    args.models = args.models or bench_reducers.askable(args.split)
    quiet_libraries()
    torch.set_num_threads(1)
    results = json.loads(args.results.read_text()) if args.results.exists() else {"test": EMPTY, "validation": EMPTY}
    if not args.render:
        if not args.summarise:
            measure(args)
        samples = {name: bench_reducers.samples(name, args.split, args.per_family) for name in args.models}
        results[args.split] = summarise(bench_reducers.kept_rows(args), samples)
        args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))
    print(json.dumps(results["test"]["exact"]))


if __name__ == "__main__":
    main()
