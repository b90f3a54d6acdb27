#!/usr/bin/env python
"""Compare Gram matrices whose rows have a factor: does it help to weigh tokens by router or gradient?

    scripts/measure/token_weights.py build/demo-photo --questions 50    measures what is left, and stores all in eval/
    scripts/measure/token_weights.py mixtures --methods nothing balance router "router squared" --samples 48 --questions 3
    scripts/measure/token_weights.py --render                           prints the docs' table

A token's factor is `w` in `G = sum_t w_t x_t x_t^T` and in `mean w|x|`, which AWQ's scales are made of; `METHODS` has those
that were tried. Samples and measures are those of `compare_weights.py`, on validation questions. `mixtures` are two of the
tests' tiny models with random weights, of which the divergence of all next-token predictions is measured on validation
questions with an image. Ratios are those of `weights_table.py`. The last line is one JSON object: the rows.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import paired
import teacher_forcing
import torch
import weights_table
from compare_weights import EVAL, keep
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from weight_methods import FORMATS, Row
from weights_bench import Bench, quantized

from vlmcompress import models
from vlmcompress.cli._process import quiet_libraries
from vlmcompress.export.convert import write_dequantized
from vlmcompress.models import VLM, Expert, Group
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization import run
from vlmcompress.quantization.calibration import capture, gradient_pass
from vlmcompress.quantization.calibration.input_recorder import InputRecorder

RESULTS = EVAL / "token_weights.json"
MIXTURES = ("qwen3_vl_moe", "gemma4_moe")
ROUTER = 15.0  # the router of Qwen's tiny mixture is multiplied by this: else all experts count nearly alike
WORLD = EVAL / "demo" / "data" / "llava"


@dataclass(frozen=True)
class Method:
    """What weighs tokens: `by` "gradient" or "router", to the power `power`; or a `balance`, or neither."""

    by: str = ""
    power: int = 1
    options: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "nothing": Method(),
    "balance": Method(options={"balance": "ratio"}),
    "gradient": Method("gradient"),  # as QIG weighs rows: without outliers, mean 1
    "gradient squared": Method("gradient", 2),  # as VLMQ does: G = X^T diag(g)^2 X
    "router": Method("router"),  # VEQ
    "router squared": Method("router", 2),  # the error of an expert's output counts by its probability
}


class Weighed(Collector):
    """Collector of `sum_t w_t x_t x_t^T` and `mean w|x|`.

    Attributes:
        factors: `w` of the next batch's rows; None: the mean of those before.
    """

    def __init__(self, width: int, needs: frozenset[str]):
        super().__init__(width, needs & {"gram"})
        self.means = Collector(width, needs - {"gram"})
        self.factors: Tensor | None = None
        self.sum, self.rows = 0.0, 0

    def add(self, x: Tensor, split: Any = None) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        factors = self.factors
        if factors is None:
            factors = x.new_full((len(x),), self.sum / self.rows if self.sum else 1.0)
        self.sum, self.rows = self.sum + float(factors.sum()), self.rows + len(x)
        super().add(x * factors.sqrt()[:, None], split)
        self.means.add(x * factors[:, None], split)

    def settle(self) -> None:
        super().settle()
        self.means.settle()

    def pooled(self, *args: Any) -> GroupStats:
        stats, means = super().pooled(*args), self.means.pooled(*args)
        stats._abssum, stats._absmax, stats._rows = means._abssum, means._absmax, means._rows
        stats.needs |= means.needs
        return stats


class Recorder(InputRecorder):
    """Recorder whose rows have factors. `factors`: of a group, of each sample's tokens; None: of the router, to `power`."""

    def __init__(self, power: int, factors: Callable[[Group], list[Tensor]] | None, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.power, self.of_group, self.filling = power, factors, False
        self.collectors = [Weighed(linear.in_features, self.spec.statistics) for linear in self.linears]
        self.routing: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def __enter__(self) -> Recorder:
        super().__enter__()
        if self.routed:
            hook = self.routed.mixture.register_forward_pre_hook(self._route, with_kwargs=True)
            self.hooks.callback(hook.remove)
        return self

    def fill(self) -> None:
        self.filling = True
        super().fill()
        self.filling = False

    def _route(self, _module: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> None:
        self.routing = (*args, *kwargs.values())[-2:]

    def _hook(self, index: int) -> Callable:
        record = super()._hook(index)

        def weighed(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if self.held is None:
                self.collectors[index].factors = None if self.filling else self._factors(index, args[0])
            record(module, args)

        return weighed

    def _factors(self, index: int, x: Tensor) -> Tensor | None:
        owner = self.routed.owners.get(index) if self.routed else None
        if self.of_group is None:
            if owner is None:
                return x.new_ones(x.numel() // x.shape[-1], dtype=torch.float32)
            experts, weights = self.routing
            number = list(self.routed.mixture).index(owner)
            return (weights * (experts == number)).sum(1)[owner.rows].float() ** self.power
        factors, length = self.of_group(self.groups[index]), self.batch.modality.shape[1]
        rows = [nn.functional.pad(factors[sample], (length - len(factors[sample]), 0)) for sample in self.batch.samples]
        flat = torch.cat(rows)
        return flat if owner is None else flat[owner.rows]


class Tokens(gradient_pass._Totals):
    """Also keeps the mean magnitude of the gradient at a layer's output of each token. `tokens`: layer -> sample -> values,
    the last ones those of the sample; before them may be padding."""

    def __init__(self, names: Sequence[str]):
        super().__init__(names)
        self.tokens: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        self._batch: dict[str, Tensor] = {}

    def end(self, scale: float, indices: Sequence[int]) -> None:
        super().end(scale, indices)
        for name, values in self._batch.items():
            self.tokens[name] |= dict(zip(indices, (values / scale).view(len(indices), -1), strict=True))
        self._batch.clear()

    def _watch(self, name: str, expert: Expert | None) -> Callable:
        watch = super()._watch(name, expert)

        def keep_rows(grad: Tensor, rows: Tensor | None) -> None:
            values = grad.detach().reshape(-1, grad.shape[-1]).float().abs().mean(1)
            size = self._kinds.shape[0] * self._kinds.shape[1]
            self._batch[name] = values if rows is None else values.new_zeros(size).index_copy_(0, rows, values)

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            watch(module, args, output)
            if output.requires_grad:
                rows = expert.rows if expert else None
                output.register_hook(lambda grad: keep_rows(grad, rows))

        return hook


def gradient_factors(
    vlm: VLM, samples: Sequence[dict[str, Tensor]], power: int, passes: dict[Any, Tokens]
) -> Callable[[Group], list[Tensor]]:
    """The factors of each sample's tokens for a group of layers, from the gradients of the answers' loss.

    They have a mean of 1 over tokens whose gradient is not zero. With `power` 1 they are clipped to the third quartile of these
    and 1.5 times the distance of the quartiles.
    """
    key = vlm.path, hash(tuple(token for sample in samples for token in sample["input_ids"][0].tolist()))
    if key not in passes:

        def make(names: Sequence[str]) -> Tokens:
            passes[key] = Tokens(names)
            return passes[key]

        with patch.object(gradient_pass, "_Totals", make):
            gradient_pass.gradients(vlm, samples)
    tokens = passes[key].tokens
    masks = [sample["modality"][0] > 0 for sample in samples]

    def factors(group: Group) -> list[Tensor]:
        sizes = [vlm.model.get_submodule(name).out_features for name in group.linears]
        rows = []
        for number, mask in enumerate(masks):
            row = torch.zeros(len(mask))
            for name, size in zip(group.linears, sizes, strict=True):
                if number in tokens[name]:
                    row += size / sum(sizes) * tokens[name][number][-len(mask) :]
            rows.append(row * mask)
        every = torch.cat(rows)
        if not every.any():  # the loss does not depend on this group
            return [mask.float() for mask in masks]
        if power == 1:
            low, high = every[every > 0].quantile(torch.tensor([0.25, 0.75])).tolist()
            rows = [row.clamp(max=high + 1.5 * (high - low)) for row in rows]
        rows = [row**power for row in rows]
        every = torch.cat(rows)
        mean = every[every > 0].mean()
        return [row / mean for row in rows]

    return functools.cache(factors)


@contextmanager
def weighing(method: Method, towers: dict[Any, Callable], passes: dict[Any, Tokens]) -> Iterator[None]:
    """Within the context `quantize` collects statistics with a method's factors.

    `towers` and `passes` remember what vision towers and backward passes gave, from one quantization to the next.
    """
    solve = run.quantize_blocks

    def blocks(this: Any, inputs: Any) -> None:
        vlm = inputs.vlm
        for name in () if vlm.spec.experts else vlm.spec.vision:  # the same weights and images each time
            tower = vlm.model.get_submodule(name)
            tower.forward = towers.setdefault((vlm.path, name), teacher_forcing.remembering(tower.forward, 1000))
        with ExitStack() as stack:
            if method.by:
                by = gradient_factors(vlm, inputs.samples, method.power, passes) if method.by == "gradient" else None
                recorder = functools.partial(Recorder, method.power, by)
                stack.enter_context(patch.object(capture, "InputRecorder", recorder))
            solve(this, inputs)

    with patch.object(run, "quantize_blocks", blocks):
        yield


def load_mixture(folder: Path, like: VLM) -> VLM:
    """Load a quantized mixture with its weights dequantized; transformers dequantizes no experts of their own."""
    return models.load(write_dequantized(folder, folder.with_name(f"{folder.name}-16")).path)


class MixtureBench(Bench):
    """A tiny mixture, calibrated on the demos' world, and what it says at every token of validation questions."""

    def __init__(self, family: str, args: argparse.Namespace):
        sys.path.insert(0, str(EVAL.parent))
        from tests.kit import tiny

        folder = args.work / family
        if not folder.exists():
            tiny.build(family, folder)
            weights = load_file(folder / "model.safetensors")
            for name in weights:
                if family.startswith("qwen") and name.endswith("mlp.gate.weight"):
                    weights[name] *= ROUTER
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        super().__init__(folder, "validation", args)

    @property
    def data(self) -> Path:
        return WORLD / "calibration.parquet"

    @functools.cached_property
    def reference(self) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        """Questions with their answers, and the log-probabilities of each token's successor."""
        questions = chosen_of(WORLD / "validation.parquet", self.args.questions)
        inputs = [{k: v for k, v in sample.items() if k != "modality"} for sample in encode(questions, self.plain)]
        return inputs, self._predictions(self.plain, inputs)

    def measure(self, vlm: VLM) -> dict[str, Tensor]:
        inputs, before = self.reference
        after = self._predictions(vlm, inputs)
        kl = [float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True)]
        nll = [
            float(-q[:-1].gather(1, each["input_ids"][0, 1:, None]).sum())
            for q, each in zip(after, inputs, strict=True)
        ]
        columns = torch.tensor([kl, nll, [len(p) for p in before]], dtype=torch.float64)
        return dict(zip(("text/kl", "text/nll", "text/tokens"), columns, strict=True))

    @staticmethod
    @torch.no_grad()
    def _predictions(vlm: VLM, inputs: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        model = vlm.model.float()
        return [model(**each).logits[0].float().log_softmax(-1) for each in inputs]


def chosen_of(data: Path, per_family: int) -> list[Any]:
    """The first questions of each family with one image."""
    counts: dict[str, int] = {}
    kept = []
    for sample in load_samples(data, samples=None, seed=0):
        counts[sample.family] = 1 + counts.get(sample.family, 0)
        if len(sample.images) == 1 and counts[sample.family] <= per_family:
            kept.append(sample)
    return kept


def measure(args: argparse.Namespace) -> None:
    """Measure what WORK/rows.jsonl has no row of."""
    args.work.mkdir(parents=True, exist_ok=True)
    done = {row["key"] for row in paired.rows(args.work / "rows.jsonl")}
    for name in MIXTURES if args.model == "mixtures" else [args.model]:
        bench: Bench | None = None
        towers, passes = dict[Any, Callable](), dict[Any, Tokens]()
        load = load_mixture if name in MIXTURES else teacher_forcing.load_quantized
        for form, seed, method in itertools.product(args.formats, range(args.seeds), args.methods):
            row = {"model": Path(name).name, "format": form, "scheme": args.scheme, "method": method, "seed": seed}
            key = "-".join(map(str, row.values())).replace(" ", "-")
            if key in done:
                continue
            bench = bench or (MixtureBench(name, args) if name in MIXTURES else Bench(Path(name), "validation", args))
            how = Row(args.scheme, METHODS[method].options)
            with weighing(METHODS[method], towers, passes), patch.object(teacher_forcing, "load_quantized", load):
                vlm, facts = quantized(bench, FORMATS[form], how, seed)
            measures = bench.measure(vlm)
            if bench.questions:
                measures["image"] = paired.numbered([paired.about(sample) for sample in bench.questions])
            keep(args.work, {"key": key, **row, "seconds": facts["seconds"]}, measures)


def summarise(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model, format and method, with ratios of divergences to those of the first two methods."""
    found: dict[tuple[str, str, str], dict[str, dict[int, dict[str, Tensor]]]] = {}
    for row in paired.rows(args.work / "rows.jsonl"):
        measures = torch.load(args.work / "measures" / f"{row['key']}.pt", weights_only=True)
        found.setdefault((row["model"], row["format"], row["scheme"]), {}).setdefault(row["method"], {})[
            row["seed"]
        ] = measures
    rows = []
    for (model, form, scheme), methods in found.items():
        for method, by_seed in methods.items():
            row = {"model": model, "format": form, "scheme": scheme, "method": method, "seeds": len(by_seed)}
            for against in [name for name in ("nothing", "balance") if name in methods and name != method]:
                seeds = sorted(by_seed.keys() & methods[against].keys())
                for what, name in (("text", "text/kl"), ("answers", "answers/path"), ("points", "answers/exact")):
                    if name not in by_seed[seeds[0]]:
                        continue
                    mine, others = (
                        torch.stack([of[k][name] for k in seeds]).double() for of in (by_seed, methods[against])
                    )
                    clusters = by_seed[seeds[0]]["image"] if what != "text" else torch.arange(mine.shape[1])
                    compare = paired.points if what == "points" else weights_table.ratio
                    row[f"{what} to {against}"] = compare(
                        *((mine - others,) if what == "points" else (mine, others)), clusters
                    )
            kl = {name: torch.cat([of[name] for of in by_seed.values()]) for name in next(iter(by_seed.values()))}
            rows.append(row | weights_table.means(kl))
    return rows


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The docs' table: a line for each model, format and measure, with every method's figure next to `nothing` or `balance`."""
    weighed = [name for name in METHODS if name != "nothing"]
    lines = [
        f"| model | format | seeds | compared | {' | '.join(weighed)} |",
        "|---|---|---:|---|" + "---:|" * len(weighed),
    ]
    shown = {"text": "KL texts", "answers": "KL answers", "points": "right, points"}
    for model, form in dict.fromkeys((row["model"], row["format"]) for row in rows):
        of = {row["method"]: row for row in rows if (row["model"], row["format"]) == (model, form)}
        for what, against in itertools.product(shown, ("nothing", "balance")):
            cells = [_cell(of.get(name, {}).get(f"{what} to {against}")) for name in weighed]
            if any(cells):
                seeds = str(of[against]["seeds"])
                lines.append(f"| {model} | {form} | {seeds} | {shown[what]}, to {against} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: Any) -> str:
    if figure is None:
        return ""
    if isinstance(figure, list):
        return "{:+.1f} ±{:.1f}".format(*figure)
    return "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**figure)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model's folder, or mixtures")
    parser.add_argument("--work", type=Path, default=Path("out/token_weights"), help="where everything is kept")
    parser.add_argument("--scheme", default="gptq-plus")
    parser.add_argument(
        "--methods", nargs="+", default=["nothing", "balance", "gradient", "gradient squared"], choices=METHODS
    )
    parser.add_argument("--formats", nargs="+", default=["W3 g64 sym", "W2 g64"], choices=FORMATS)
    parser.add_argument("--paragraphs", type=int, default=16, help="texts that are measured on")
    parser.add_argument("--questions", type=int, default=30, help="questions of each family of the world")
    parser.add_argument("--samples", type=int, default=32, help="calibration samples")
    parser.add_argument("--seeds", type=int, default=2, help="calibrations, each with samples of its own")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    quiet_libraries()
    if args.model:
        measure(args)
    if not args.render:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, summarise(args))) + "\n]\n")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
