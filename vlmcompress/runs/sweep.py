"""Score many settings of quantization from statistics alone: `vlmcompress sweep`.

Each setting is a scheme with options, or a budget of bits shared out among groups; what is predicted for it is what `allocate`
predicts for a group, added up over the decoder. No forward pass, no finished weight: a few rows of each layer stand for all,
and AWQ's and MBQ's searches take larger steps than they will.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmcompress import targets
from vlmcompress.calibration import statistics_folder
from vlmcompress.calibration.solve import QuantMethod
from vlmcompress.common.messages import note
from vlmcompress.common.progress import Progress
from vlmcompress.common.registry import SCHEMES
from vlmcompress.errors import UserError
from vlmcompress.planning.plan import Plan, make_plan
from vlmcompress.recipe import Recipe
from vlmcompress.recipe.allocation import RULES, Candidate
from vlmcompress.runs import allocate

ROWS = 16  # rows of a group that errors are predicted on
BUDGETS = (2.5, 3.0, 3.25, 3.5, 4.0, 5.0)
WIDTHS = (2, 3, 4, 8)  # bits that budgets are shared out among
_GROUPS = (32, 128, -1)
_COARSE = {"grid": 8, "clip_grid": 5}  # steps of searches, fewer than the schemes' own, which take longest by far


@dataclass(frozen=True)
class Point:
    """One setting of the sweep with its size and predicted error.

    Attributes:
        name: name of the setting for people.
        recipe: the recipe keys that ask for it.
        bits: stored bits per weight of the decoder's quantized layers, scales and zero points included.
        nbytes: bytes of all weights that are written.
        error: predicted error, in the sweep's unit.
        best: whether no other setting has at most its size and less error.
    """

    name: str
    recipe: Mapping[str, Any]
    bits: float
    nbytes: int
    error: float
    best: bool = False


@dataclass(frozen=True)
class Sweep:
    """All settings by rising size, the `unit` of their errors, and `left_out`: those that a layer's shape or the target
    refuses."""

    points: list[Point]
    unit: str
    left_out: list[str]


def settings(balances: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Settings of single schemes: name -> scheme and options. The first balance weighs nothing, the last the most."""
    schemes: dict[str, tuple[str, dict[str, Any]]] = {}

    def add(scheme: str, **options: Any) -> None:
        group = {-1: "channel"}.get(options.get("group_size", 0), f"g{options.get('group_size')}")
        parts = [scheme, f"w{options['bits']} {group}" if "bits" in options else "", options.get("balance", "")]
        schemes[" ".join(part for part in parts if part)] = (scheme, options)

    for group in _GROUPS:
        for bits in WIDTHS:
            add("rtn", bits=bits, group_size=group)
            for balance in balances if bits < 8 or group == 128 else ():
                add("gptq", bits=bits, group_size=group, balance=balance)
    for bits in (2, 3, 4):
        for balance in balances:
            add("awq", bits=bits, group_size=128, balance=balance)
            add("gptq-plus", bits=bits, group_size=128, balance=balance)
    if "auto" in balances:
        for bits in (3, 4):
            add("mbq", bits=bits, group_size=128)
    for balance in balances:
        add("int8", balance=balance)
    add("w8a16")
    add("fp8")
    return schemes


def run(
    recipe: Recipe, progress: Progress, *, rows: int = ROWS, budgets: Sequence[float] = BUDGETS
) -> tuple[Sweep, Plan]:
    """Predict the error of each of `settings` and of allocations with each of `budgets`.

    Args:
        recipe: names the model, the statistics, what is skipped, and a target if any; its own scheme is not looked at, and
            the reducer is that of the statistics.
        rows: number of rows of each group that errors are predicted on.
        budgets: bits per weight; those below what is reachable are left out.
    """
    assert recipe.calibrate.stats is not None
    statistics = statistics_folder.read(Path(recipe.calibrate.stats))
    if statistics.rotation:
        raise UserError(
            f"statistics {statistics.folder} are of a rotated model, and a sweep looks at the model as it is"
        )
    if "gradients" not in statistics.facts:
        note(allocate.blind(statistics))
    facts, recipe = statistics.facts, recipe.model_copy(update={"reduce": statistics.reducer})
    whole = all(facts["calibration"]["tokens"].values())
    balances = ["off", "auto"] if "gradients" in facts else ["off", "ratio"] if whole else ["off"]
    schemes, left_out = settings(balances), []
    table: dict[str, QuantMethod] = {}
    for name, (scheme, options) in schemes.items():
        module = SCHEMES.get(scheme)
        option_names = {field.name for field in dataclasses.fields(module.Options)}
        coarse = {key: value for key, value in _COARSE.items() if key in option_names}
        method = QuantMethod(module, module.Options(**options, **coarse))
        refused = recipe.target and targets.get(recipe.target).refusal(targets.format_key(method.scheme))
        if refused or not method.needs.statistics <= {*facts["needs"], "gradient"}:
            left_out.append(name)
        else:
            table[name] = method
    plan = make_plan(recipe, widths=table)
    assert plan.budget is not None and plan.statistics is not None
    read = allocate.reader(plan.source)
    errors = allocate.predicted(plan, plan.statistics, read, progress, rows, balance=balances[-1])
    sizes, points = plan.budget.sizes, []
    for name in table:
        if any(name not in by_width for by_width in sizes.values()):
            left_out.append(name)
            continue
        nbytes = sum(by_width[name] for by_width in sizes.values())
        scheme, options = schemes[name]
        keys = {"scheme": scheme, "options": options}
        points.append(_point(plan, name, keys, nbytes, sum(by_width[name] for by_width in errors.values())))
    points += [p for budget in budgets if (p := _shared(plan, errors, balances[-1], budget))]
    unit = "nats per answer token" if "gradients" in facts else "relative squared output error"
    return Sweep(_marked(points), unit, left_out), plan


def _point(plan: Plan, name: str, keys: dict[str, Any], nbytes: int, predicted: float) -> Point:
    assert plan.budget is not None
    if plan.recipe.reduce:
        keys = keys | {"reduce": plan.recipe.reduce.plain()}
    return Point(name, keys, plan.budget.bits(nbytes), nbytes + plan.budget.fixed, predicted)


def _shared(plan: Plan, errors: Mapping, balance: str, budget: float) -> Point | None:
    """Share a budget out among gptq's widths; None if no allocation meets it."""
    assert plan.budget is not None
    everywhere = set.intersection(*(set(sizes) for sizes in plan.budget.sizes.values()))
    for group in sorted(_GROUPS, key=lambda group: (group != 128, -group)):
        size = "channel" if group == -1 else f"g{group}"
        names = {width: f"gptq w{width} {size} {balance}" for width in WIDTHS}
        names = {width: name for width, name in names.items() if name in everywhere}
        if len(names) > 1:
            break
    else:
        return None
    candidates = {
        key: [Candidate(sizes[name], errors[key][name]) for name in names.values()]
        for key, sizes in plan.budget.sizes.items()
    }
    try:
        choice = RULES["error"].decide(candidates, int(budget * plan.budget.weights / 8), {})
    except ValueError:
        return None
    picked = [candidates[key][index] for key, index in choice.items()]
    keys = {
        "scheme": "gptq",
        "options": {"group_size": group, "balance": balance},
        "bits": {"budget": budget, "among": list(names)},
    }
    nbytes = sum(candidate.nbytes for candidate in picked)
    return _point(
        plan, f"gptq {budget:g} bits {size} {balance}", keys, nbytes, sum(candidate.error for candidate in picked)
    )


def _marked(points: Sequence[Point]) -> list[Point]:
    """Sort points by rising size, and mark those that no point of at most their size beats."""
    marked, least = [], float("inf")
    for point in sorted(points, key=lambda p: (p.nbytes, p.error)):
        marked.append(dataclasses.replace(point, best=point.error < least))
        least = min(least, point.error)
    return marked


def choose(points: Sequence[Point], *, budget: float | None = None, nbytes: int | None = None) -> Point:
    """Choose the point of least error within a limit. Raises `UserError`, naming the smallest, if none is within it."""
    fits = [p for p in points if (budget is None or p.bits <= budget) and (nbytes is None or p.nbytes <= nbytes)]
    if not fits:
        least = min(points, key=lambda p: p.nbytes)
        raise UserError(
            f"no setting is that small; the smallest is '{least.name}': {least.bits:.4g} bits, {least.nbytes:,} bytes"
        )
    return min(fits, key=lambda p: (p.error, p.nbytes))


def recipe_text(point: Point, unit: str) -> str:
    """Write a recipe file that asks for a point; its values are JSON, which is YAML."""
    head = f"# {point.name}: {point.bits:.4g} bits per weight, predicted {point.error:.3g} {unit}\n"
    return head + "".join(f"{key}: {json.dumps(value)}\n" for key, value in point.recipe.items())
