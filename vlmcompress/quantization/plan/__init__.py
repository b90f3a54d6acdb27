"""Plans from headers alone: what a recipe will do to a model (`Plan`), and every reason why it cannot.

`make_plan` runs once in a run. `with_problems` looks again where a derived model replaced the first one, or widths were chosen.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models import Source
from vlmcompress.quantization.plan.budget import budget_of
from vlmcompress.quantization.plan.plan import Plan, as_written, read_source
from vlmcompress.quantization.plan.problems import plan_problems
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import scorer_file
from vlmcompress.utils.errors import UserError


def make_plan(recipe: Recipe, *, source: Source | None = None, strict: bool = True) -> Plan:
    """Plan a recipe: read its model's config and headers, and look for problems.

    Args:
        source: the recipe's model, if its headers are read already.
        strict: raise `UserError` for the first problem; False: the plan lists them.

    Raises:
        UserError: the model is quantized already, not whole, or of an unknown family; or the recipe cannot be carried out.
    """
    source = source or read_source(recipe)
    before, source = sum(spec.nbytes for spec in source.stored.values()), as_written(recipe, source)
    if recipe.reduce:
        recipe = recipe.model_copy(update={"reduce": scorer_file.with_scorer_hash(recipe.reduce)})
    return with_problems(Plan(recipe=recipe, source=source, bytes_before=before), strict=strict)


def with_problems(plan: Plan, *, strict: bool = True) -> Plan:
    """The plan with its problems, and the budget of the recipe's `bits` if it is still to be spent.

    Args:
        strict: as in `make_plan`.
    """
    problems, budget = plan_problems(plan), None
    if plan.recipe.bits and plan.allocation is None:
        try:
            budget = budget_of(plan.recipe, plan.source, plan.groups, plan.specs_written)
        except UserError as error:
            problems.append(str(error))
    if problems and strict:
        raise UserError(problems[0])
    # the plan itself keeps what the checks have computed
    return replace(plan, problems=tuple(problems), budget=budget) if problems or budget else plan
