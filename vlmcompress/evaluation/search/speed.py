"""A candidate's gain over the original: requests per second, time to the first token, or memory.

`Modelled` computes it from shapes, with the plan of `vlmcompress plan`: exact bytes of weights and cache, and time bounds
from a target's rates (roofline). `Measured` serves finalists in vLLM on this machine, alternating with the original. Gains are
ratios, above 1 if the candidate is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from vlmcompress.engines.vllm.served_model import ServedModel, read_served_model
from vlmcompress.evaluation.capacity import weight_bytes
from vlmcompress.evaluation.capacity.capacity import CapacityRequest, plan_capacity
from vlmcompress.evaluation.capacity.weight_bytes import Weights
from vlmcompress.evaluation.search.candidate import Candidate
from vlmcompress.evaluation.search.trial import Setup, ensure_checkpoint
from vlmcompress.evaluation.speed import runs
from vlmcompress.numerics import label
from vlmcompress.quantization.plan import make_plan, roofline
from vlmcompress.recipe import resolve, targets
from vlmcompress.reduction.visual_count import Pictures, per_block
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress

Goal = Literal["throughput", "ttft", "memory"]
GOALS: dict[str, str] = {
    "throughput": "requests a second",
    "ttft": "time to the first token",
    "memory": "bytes of weights and cache",
}
METRICS = {"throughput": "request_throughput", "ttft": "ttft_p50_ms"}
STAND_IN = "h100"
"""The target whose rates order candidates before they are measured on a machine with unknown rates."""
USERS = 8
"""Requests at once whose cache counts as memory, and clients of the load that is measured."""


@dataclass(frozen=True)
class TypicalRequest:
    """A typical request: image size, and tokens of text and answer; a measured burst has `requests` of them."""

    image: tuple[int, int] = (448, 448)
    text: int = 64
    out: int = 32
    requests: int = 64


@dataclass(frozen=True)
class Figures:
    """The modelled figures of a candidate: bytes, and seconds if the target's rates are known."""

    weights: int
    cache: int
    ttft: float | None
    request: float | None

    def of(self, goal: str) -> float | None:
        """The figure for a goal; less is better. None: unknown."""
        return {"memory": float(self.weights + self.cache), "ttft": self.ttft}.get(goal, self.request)


@dataclass
class Modelled:
    """Gains from shapes, for a target that need not be available.

    `rates`: the target whose rates are used; None: the recipe's.
    """

    setup: Setup
    goal: Goal
    load: TypicalRequest
    rates: str | None = None
    source = "modelled"
    _cache: dict[str, Figures | None] = field(default_factory=dict)
    _model: ServedModel | None = None

    def gain(self, candidate: Candidate) -> float | None:
        """The gain; None if the target's rates are unknown, or the number of tokens depends on the image."""
        before, after = self.figures(Candidate()), self.figures(candidate)
        if before is None or after is None:
            return None
        first, second = before.of(self.goal), after.of(self.goal)
        return first / second if first and second else None

    def figures(self, candidate: Candidate) -> Figures | None:
        """The modelled figures of a candidate; None if they are unknown."""
        if candidate.name not in self._cache:
            self._cache[candidate.name] = self._figures(candidate)
        return self._cache[candidate.name]

    def _figures(self, candidate: Candidate) -> Figures | None:
        self._model = self._model or read_served_model(self.setup.model)
        recipe = resolve({**self.setup.base, **candidate.keys}, strict=bool(candidate.choices)).recipe
        plan = make_plan(recipe, strict=False)
        scheme = recipe.number_formats
        row = Weights(recipe.scheme, label(scheme), targets.format_key(scheme), plan.bytes_after, scheme)
        try:
            # `keep` is a share of the pixels, so each side shrinks by its root.
            share = math.sqrt(recipe.resize.keep) if recipe.resize and recipe.resize.keep else 1.0
            width, height = (max(28, round(side * share)) for side in self.load.image)
            name = self.rates or recipe.target
            capacity = plan_capacity(
                self._model,
                CapacityRequest(
                    pictures=Pictures(((width, height),)),
                    text=self.load.text,
                    out=self.load.out,
                    target=targets.get_target(name) if name else None,
                    target_name=name,
                    kv_cache=recipe.kv_cache or "auto",
                    reduce=recipe.reduce,
                ),
                formats=[row],
            )
        except UserError:
            return None
        if recipe.reduce and len(capacity.loads) == 1:  # how many tokens are left depends on what an image shows
            return None
        model, counted = self._model, capacity.counted
        loaded = weight_bytes.loaded_bytes(row, model.stored) - weight_bytes.mtp_bytes(model)
        load, fitting = capacity.loads[capacity.served], capacity.rows[0].requests.get(capacity.served, 0)
        first = request = None
        if (target := capacity.request.target) and fitting >= 1:
            kind, many = roofline.arithmetic_type(scheme), max(1, min(math.floor(fitting), capacity.defaults.sequences))
            visual = per_block(counted, load.visual, recipe.reduce, len(model.decoder.blocks))
            work = roofline.work(model, visual, load.text, counted.patches, counted.tokens)
            first = roofline.prefill_seconds(work, target.rates, kind)
            read = roofline.step_bytes(model, loaded, many, load.filled)
            per_token = work.linear / max(load.visual + load.text, 1)
            step = roofline.decode_seconds(read, many * per_token, target.bandwidth, target.rates.get(kind))
            if first is not None and step is not None:  # a request's prefill, and its share of common steps
                request = first + self.load.out * step / many
        return Figures(loaded, USERS * load.filled, first, request)


@dataclass
class Measured:
    """Gains that are measured in vLLM on this machine, against the original, in the order ABBA; modelled ones until then."""

    modelled: Modelled
    data: str | None
    repeats: int = 2
    source = "measured"

    @property
    def goal(self) -> Goal:
        """The objective."""
        return self.modelled.goal

    def gain(self, candidate: Candidate) -> float | None:
        """The modelled gain. The time of answering a few questions is less informative, as start-up dominates it."""
        return self.modelled.gain(candidate)

    def measure(self, candidate: Candidate, progress: Progress) -> float:
        """The gain of a candidate that is served alternately with the original. Raises `UserError` if a server fails."""
        setup, load = self.modelled.setup, self.modelled.load
        bench = runs.run(
            ensure_checkpoint(setup, candidate, progress),
            setup.model,
            load=f"closed:{USERS}",
            requests=load.requests,
            data=self.data,
            out_tokens=load.out,
            repeats=self.repeats,
            seed=setup.seed,
            progress=progress,
        ).bench
        assert bench is not None
        return bench.summary["serve"]["cold"][METRICS[self.goal]].gain
