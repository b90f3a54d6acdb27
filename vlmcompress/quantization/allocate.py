"""Spend the budget that a recipe's `bits` gives: choose a method for each group of layers, from a plan and statistics.

Errors are predicted by `calibration.predict`; a rule of `recipe.allocation` chooses the width of each group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vlmcompress.models.devices import accelerator, full_float32
from vlmcompress.quantization.calibrate import calibrate
from vlmcompress.quantization.calibration import statistics_folder
from vlmcompress.quantization.calibration.predict import Predictor
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.calibration.statistics_folder import Statistics
from vlmcompress.quantization.plan import statistics_match
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.recipe.allocation import RULES, GroupOption, Key
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note
from vlmcompress.utils.progress import Progress
from vlmcompress.utils.work_folder import WorkFolder

STATISTICS = "statistics"
"""Name of the statistics that are collected for an allocation, in the run's work folder."""


def allocate_bits(plan: Plan, work: WorkFolder | None = None, *, progress: Progress) -> Plan:
    """Allocate the plan's budget by its statistics or, without any, by statistics that are first collected in `work`.

    Args:
        plan: a plan that has `budget`.
    """
    assert plan.budget is not None
    if (statistics := plan.statistics) is None:
        assert work is not None
        statistics = _collected(plan, work, progress)
    widths, facts = decide(plan, statistics, progress)
    return replace(plan, widths=widths, allocation=facts).require_no_problem()


def take_gradients(work: WorkFolder) -> None:
    """Copy the gradients of an allocation's statistics to a note of the run, which saves a second backward pass."""
    folder = work.folder / STATISTICS
    if not (folder / statistics_folder.NAME).is_file() or work.read_note("gradients"):
        return
    if gradients := statistics_folder.read_statistics(folder).facts.get("gradients"):
        work.write_note("gradients", gradients)


@full_float32()
def decide(plan: Plan, statistics: Statistics, progress: Progress) -> tuple[dict[Key, QuantMethod], dict[str, Any]]:
    """Choose a method for each group, and describe the choice for the manifest.

    Args:
        plan: a plan that has `budget`.
        statistics: statistics of the model, with Gram matrices.
        progress: called with (label, done, total).
    """
    budget, bits = plan.budget, plan.recipe.bits
    assert budget is not None and bits is not None
    rule = RULES[bits.by]
    if missing := sorted(rule.needs - statistics.facts.keys()):
        remedy = statistics_match.remedy(statistics, missing)
        raise UserError(f"bits.by {bits.by} needs {missing[0]}, which {statistics.folder} does not have; {remedy}")
    if bits.by == "error" and "gradients" not in statistics.facts:
        if statistics.facts["calibration"]["tokens"]["answer"]:
            why = f"statistics {statistics.folder} hold no gradients"
            do = f"{statistics_match.remedy(statistics, ['gradient'])}, or take one width for all"
        else:
            why, do = "no calibration sample has an answer", "give samples with answers"
        note(
            f"{why}, so bits are shared out by relative output errors, which on a real language model lost to one width for "
            f"all; {do}"
        )
    errors = predicted(plan, statistics, progress)
    order = {key: list(sizes) for key, sizes in budget.sizes.items()}
    candidates = {
        key: [GroupOption(budget.sizes[key][name], errors[key][name]) for name in names] for key, names in order.items()
    }
    try:
        chosen = rule.decide(candidates, budget.nbytes, statistics.facts)
    except ValueError as error:
        raise UserError(f"bits.by {bits.by}: {error}") from error
    picked = {key: order[key][index] for key, index in chosen.items()}
    nbytes = sum(budget.sizes[key][name] for key, name in picked.items())
    everywhere = [name for name in budget.widths if all(name in sizes for sizes in budget.sizes.values())]
    uniform = {
        name: {
            "bits": round(budget.bits(sum(sizes[name] for sizes in budget.sizes.values())), 4),
            "predicted": sum(group_errors[name] for group_errors in errors.values()),
        }
        for name in everywhere
    }
    facts = {
        **bits.model_dump(exclude_none=True, mode="json"),
        "among": list(budget.widths),
        "bits": round(budget.bits(nbytes), 4),
        "bytes": nbytes,
        "unit": "nats" if "gradients" in statistics.facts else "relative squared output error",
        "predicted": sum(errors[key][name] for key, name in picked.items()),
        "uniform": uniform,
        "groups": [
            {"block": key[0], "group": key[1], "width": picked[key], "predicted": dict(errors[key])}
            for key in sorted(picked)
        ],
    }
    return {(group.layer, group.name): budget.widths[picked[group.layer, group.unit]] for group in plan.groups}, facts


def predicted(plan: Plan, statistics: Statistics, progress: Progress) -> dict[Key, dict[str, float]]:
    """Predict errors, group or all experts of a block -> width -> error, for the widths that the shapes allow.

    Where gradients are known, errors are in nats per answer token. The gradients are of the mean loss of a sample's k answer
    tokens; the Fisher information of a mean is 1/k of theirs, k^2 of which the squares hold only once: hence the factor
    k = answers / samples. Another 1 / samples makes the sum over all samples a mean.
    """
    budget, source = plan.budget, plan.source
    assert budget is not None
    gradients = statistics.facts.get("gradients")
    # without gradients, `balance` weights the modalities
    balance, device = plan.recipe.options.balance or "off", str(accelerator() or "cpu")
    # by balance, as predictors cache the matrices of one
    widths = sorted(budget.widths.items(), key=lambda width: str(width[1].options.balance or ""))
    errors: dict[Key, dict[str, float]] = {}
    for layer, groups in enumerate(plan.blocks):
        stats = statistics.load(layer, device)[0] if groups else {}
        linears = {name for group in groups for name in group.linears}
        for group in groups:
            entries = [source.entries[source.names[f"{name}.weight"]] for name in group.linears]
            weights = [tensor_files.read_tensor(entry).to(device) for entry in entries]
            if gradients is None:
                weighed = "off" if balance == "mbq" else balance
                predictor, scale = Predictor(weights, stats.pop(group.name), balance=weighed), 1.0
            else:
                squares = [gradients["blocks"][layer][name]["square"] for name in group.linears]
                predictor = Predictor(weights, stats.pop(group.name), squares, scale_dtype=weights[0].dtype)
                scale = statistics.facts["calibration"]["tokens"]["answer"] / gradients["samples"] ** 2
            # whether the op before the group can take a smoothing scale; the same rule as in `calibration.solve`
            smooths = group.smooth is not None and (group.smooth_kind != "linear" or group.smooth in linears)
            sums = errors.setdefault((layer, group.unit), {})
            for name, method in widths:
                if name in budget.sizes[layer, group.unit]:
                    error = scale * predictor.error(method.module, method.options, smooths=smooths)
                    sums[name] = sums.get(name, 0.0) + error
        progress("predicting", layer + 1, len(plan.blocks))
    return errors


def _collected(plan: Plan, work: WorkFolder, progress: Progress) -> Statistics:
    """Collect the statistics that an allocation needs in the run's work folder, unless an interrupted run has done so."""
    recipe, folder = plan.recipe, work.folder / STATISTICS
    assert recipe.bits is not None and plan.budget is not None
    if (folder / statistics_folder.NAME).is_file():
        stored = statistics_folder.read_statistics(folder)
        if problems := statistics_match.statistics_problems(stored, recipe, plan.method, plan.blocks):
            raise UserError(f"{problems[0]} (begin anew with --restart)")
        statistics_match.verify_statistics(stored, recipe)
        return stored
    methods = [plan.method, *plan.budget.widths.values()]
    needs = RULES[recipe.bits.by].needs.union({"gram"}, *(method.needs.statistics for method in methods))
    collecting = recipe.model_copy(update={"out": folder, "bits": None, "kv_cache": None})
    with torch.inference_mode(False):
        read = plan.source.path if plan.source.path != recipe.model else None
        calibrate(collecting, needs=needs, likes={"gradient"}, read=read, overwrite=True, progress=progress)
    return statistics_folder.read_statistics(folder)
