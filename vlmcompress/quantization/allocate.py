"""Spend the budget that a recipe's `bits` gives: choose a method for each group of layers.

One pass over the unquantized model predicts each group's error in each width (`calibration.predict`) as soon as its block's
statistics are complete; a rule of `recipe.allocation` then chooses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from typing_extensions import TypedDict

from vlmcompress.models import Group
from vlmcompress.models.devices import full_float32
from vlmcompress.numerics.statistics.gradients import Gradients, sensitivities
from vlmcompress.numerics.statistics.inputs import STATISTICS, GroupStats
from vlmcompress.quantization.calibration import entropy
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.gradient_pass import kept_gradients
from vlmcompress.quantization.calibration.predict import Predictor
from vlmcompress.quantization.inputs import Inputs
from vlmcompress.quantization.plan import with_problems
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.recipe.allocation import RULES, GroupOption, Key
from vlmcompress.utils import distributed, tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import note
from vlmcompress.utils.progress import Progress, phase
from vlmcompress.utils.schema import Number
from vlmcompress.utils.work_folder import WorkFolder

_Predicted = TypedDict("_Predicted", {"block": int, "group": str, "errors": dict[str, Number]})


class Facts(TypedDict):
    """What one pass over the unquantized model shows: predicted errors of each group, or of all experts of a block, by width;
    and the entropy of each block's input in bits (None: a block without linear layers), empty if the rule reads none."""

    groups: list[_Predicted]
    entropy: list[Number | None]


def allocate_bits(plan: Plan, inputs: Inputs, work: WorkFolder, progress: Progress) -> Plan:
    """Choose the widths of a plan that has a `budget`, and describe the choice for the manifest.

    Args:
        inputs: the unquantized model and its calibration samples, which stay as they are.
        work: keeps what the pass showed; an interrupted run goes on after it.
    """
    recipe, budget, origin = plan.recipe, plan.budget, inputs.origin
    assert budget is not None and recipe.bits is not None and origin is not None
    gradients = None
    with torch.inference_mode(False), torch.no_grad(), full_float32():
        if answers := origin["tokens"]["answer"]:
            with phase("gradients"):
                gradients = kept_gradients(work, inputs.vlm, inputs.samples, progress)
        elif recipe.bits.by == "error":
            note(
                "no calibration sample has an answer, so bits are shared out by relative output errors, which on a real "
                "language model lost to one width for all; give samples with answers"
            )
        facts: Facts | None = work.read_note("predicted", Facts)
        if facts is None:
            facts = _predicted(plan, inputs, gradients, answers, progress)
            if distributed.is_main():
                work.write_note("predicted", facts)
    errors = {(group["block"], group["group"]): group["errors"] for group in facts["groups"]}
    order = {key: list(sizes) for key, sizes in budget.sizes.items()}
    candidates = {
        key: [GroupOption(budget.sizes[key][name], errors[key][name]) for name in names] for key, names in order.items()
    }
    try:
        chosen = RULES[recipe.bits.by].decide(candidates, budget.nbytes, facts["entropy"])
    except ValueError as error:
        raise UserError(f"bits.by {recipe.bits.by}: {error}") from error
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
    allocation = {
        **recipe.bits.model_dump(exclude_none=True, mode="json"),
        "among": list(budget.widths),
        "bits": round(budget.bits(nbytes), 4),
        "bytes": nbytes,
        "unit": "nats" if gradients else "relative squared output error",
        "predicted": sum(errors[key][name] for key, name in picked.items()),
        "uniform": uniform,
        "groups": [
            {"block": key[0], "group": key[1], "width": picked[key], "predicted": dict(errors[key])}
            for key in sorted(picked)
        ],
    }
    widths = {(group.layer, group.name): budget.widths[picked[group.layer, group.unit]] for group in plan.groups}
    return with_problems(replace(plan, widths=widths, allocation=allocation, budget=None))


def _predicted(plan: Plan, inputs: Inputs, gradients: Gradients | None, answers: int, progress: Progress) -> Facts:
    """Run the samples through the unquantized model and predict errors block by block. `answers`: number of answer tokens."""
    recipe, budget = plan.recipe, plan.budget
    assert budget is not None and recipe.bits is not None
    measured = RULES[recipe.bits.by].reads_entropy
    needs = {"gram"}.union(*(method.needs.statistics for method in (plan.method, *budget.widths.values())))
    spec = CaptureSpec(
        frozenset(needs & STATISTICS),
        sampled_rows=entropy.TOKENS if measured else 0,
        seed=recipe.seed,
        all_experts=recipe.calibrate.all_experts,
    )
    names = [{group.name: list(group.linears) for group in groups} for groups in plan.blocks]
    rho = sensitivities(gradients, names) if gradients else {}
    errors: dict[Key, dict[str, float]] = {}
    entropies: list[Number | None] = [None] * len(plan.blocks)
    for layer, captured in capture_blocks(inputs.vlm, plan.blocks, inputs.samples, spec, progress=progress):
        assert captured is not None
        for name, stats in captured.stats.items():
            stats.sensitivity = rho.get((layer, name))
        for key, group_errors in _block_errors(plan, layer, captured.stats, gradients, answers).items():
            errors[key] = group_errors
        if captured.rows is not None:
            with phase("entropy"):
                entropies[layer] = entropy.cluster_entropy(captured.rows)
        progress("predicting", layer + 1, len(plan.blocks))
    groups = [_Predicted(block=layer, group=unit, errors=errors[layer, unit]) for layer, unit in errors]
    return Facts(groups=groups, entropy=entropies if measured else [])


def _block_errors(
    plan: Plan, layer: int, stats: dict[str, GroupStats], gradients: Gradients | None, answers: int
) -> Mapping[Key, dict[str, float]]:
    """Predict errors of one block: group, or all experts together -> width -> error, for the widths that the shapes allow.

    Where gradients are known, errors are in nats per answer token. The gradients are of the mean loss of a sample's k answer
    tokens; the Fisher information of a mean is 1/k of theirs, k^2 of which the squares hold only once: hence the factor
    k = answers / samples. Another 1 / samples makes the sum over all samples a mean.
    """
    budget, groups = plan.budget, plan.blocks[layer]
    assert budget is not None
    balance = plan.recipe.options.balance or "off"  # without gradients it weights the modalities
    # by balance, as predictors cache the matrices of one
    widths = sorted(budget.widths.items(), key=lambda width: str(width[1].options.balance or ""))
    linears = {name for group in groups for name in group.linears}
    errors: dict[Key, dict[str, float]] = {}
    for group in groups:
        weights = _weights(plan, group, stats)
        if gradients is None:
            weighed = "off" if balance == "mbq" else balance
            predictor, scale = Predictor(weights, stats.pop(group.name), balance=weighed), 1.0
        else:
            squares = [gradients.blocks[layer][name].square for name in group.linears]
            predictor = Predictor(weights, stats.pop(group.name), squares, scale_dtype=weights[0].dtype)
            scale = answers / gradients.samples**2
        # whether the op before the group can take a smoothing scale; the same rule as in `calibration.solve`
        smooths = group.smooth is not None and (group.smooth_kind != "linear" or group.smooth in linears)
        sums = errors.setdefault((layer, group.unit), {})
        for name, method in widths:
            if name in budget.sizes[layer, group.unit]:
                error = scale * predictor.error(method.quantizer, method.options, smooths=smooths)
                sums[name] = sums.get(name, 0.0) + error
    return errors


def _weights(plan: Plan, group: Group, stats: Mapping[str, GroupStats]) -> Sequence[torch.Tensor]:
    """The unquantized weights of a group, on the device of its statistics."""
    source, device = plan.source, stats[group.name].device
    entries = [source.entries[source.names[f"{name}.weight"]] for name in group.linears]
    return [tensor_files.read_tensor(entry).to(device) for entry in entries]
