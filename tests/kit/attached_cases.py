"""Every reducer in every family that has it, with options that suit tiny models; and what tests of attaching ask of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
import torch

from vlmcompress.models import all_specs
from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import REGISTRY
from vlmcompress.reduction.support import family_problem

# A mixture of experts is reduced as its dense model: a few of `CASES` are enough.
DENSE = [spec for spec in all_specs() if spec.images.grid and not spec.experts]
FAMILIES = [spec.family for spec in DENSE]
INSIDE = [spec.family for spec in DENSE if family_problem(spec, "fastv") is None]  # methods within the language model
APART = ("learned", "evs")  # has to be trained; looks at videos
SHARES = [name for name in REGISTRY.names() if REGISTRY.get(name).keep is not None and name not in APART]
FEW = ("random", "fastv")
CASES = [
    (spec.family, method)
    for spec in all_specs()
    for method in (FEW if spec.experts else SHARES)
    if family_problem(spec, method) is None
]
WAYS = ("random", "coverage", "vscan", "fastv", "dart-llm")  # a method of each way of applying


def crossed(few: Collection[str], cases: Iterable[tuple] = tuple(CASES)) -> list:
    """For what does not depend on both: every method with one family, every family with `few` methods; the rest is slow."""
    return [
        pytest.param(*case, marks=[] if case[0] == "llava" or case[1] in few else [pytest.mark.slow]) for case in cases
    ]


EACH = crossed(FEW)
SMALL = {
    "coverage": {"merge": "nearest"},
    "vscan": {"window": 2, "shallow": 0},
    "fastv": {"layer": 1},
    "dart-llm": {"layer": 1},
    "dymu": {"thresholds": (-0.2, 0.0)},
}
STEPS = 4
GREEDY = {"max_new_tokens": STEPS, "do_sample": False, "suppress_tokens": list(range(256, 300))}


def given(method: str, keep: float = 0.4) -> dict:
    """Options of a method for a tiny model."""
    return {"keep": keep, **SMALL.get(method, {})}


def extended(inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inputs with `tokens [b, t]` after the prompts."""
    longer = dict(inputs)
    longer["input_ids"] = torch.cat([inputs["input_ids"], tokens], 1)
    longer["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(tokens)], 1)
    for name in {"mm_token_type_ids", "token_type_ids"} & {*inputs}:
        longer[name] = torch.cat([inputs[name], torch.zeros_like(tokens).to(inputs[name])], 1)
    return longer


def traces(model: torch.nn.Module) -> list:
    """All that attaching might leave after: hooks, and attributes by identity; of a model that has run, as transformers adds
    hooks of its own at the first call."""
    traced: list = []
    for name, module in model.named_modules():
        traced.append((name, len(module._forward_hooks), len(module._forward_pre_hooks)))
        # rope_deltas: the latest call's, in Qwen
        attributes = {key: id(value) for key, value in vars(module).items() if key != "rope_deltas"}
        traced.append(sorted(attributes.items()))
    return traced


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[methods.Signals]:
    """All signals that a reducer is given from now on."""
    calls: list[methods.Signals] = []
    real = methods.reduce_all

    def spy(reducer, images, check=True):
        calls.extend(images)
        return real(reducer, images, check)

    monkeypatch.setattr(methods, "reduce_all", spy)
    return calls
