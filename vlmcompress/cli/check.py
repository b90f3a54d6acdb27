"""Check in seconds whether a model is supported, or whether a recipe works for it, a target and an engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vlmcompress.cli import _flags, _process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import BAD_INPUT, OK, Outcome, findings_text
from vlmcompress.export import readers
from vlmcompress.utils import hub
from vlmcompress.utils.text import table

if TYPE_CHECKING:
    from vlmcompress.recipe import Recipe
    from vlmcompress.utils.messages import Finding

GROUP = "look first"
PLACE = 11


def options(parser: Parser) -> None:
    _flags.recipe(parser)
    _flags.tensor_parallel(parser, "devices that share the model")
    parser.add_argument(
        "--engine",
        help=f"{', '.join(list(readers.ENGINES)[:-1])} or {list(readers.ENGINES)[-1]}; default: one that reads the format",
    )


def run(args: argparse.Namespace) -> Outcome:
    """Check the recipe against model, target and engine; MODEL alone: what it can have. Exit code 2 if a check fails."""
    from vlmcompress.recipe import resolve

    if not args.recipe and not args.set and [key for key in _flags.RECIPE_KEYS if hasattr(args, key)] == ["model"]:
        return _support(args.model)
    recipe = resolve(_flags.recipe_values(args), args.recipe, refuse=False, weights="headers").recipe
    _process.import_transformers()
    from vlmcompress.quantization.plan.findings import engine_of, findings

    engine = args.engine or engine_of(recipe)
    results = findings(recipe, engine)
    if args.tp != 1:
        results.append(_devices(recipe, _flags.devices(args)))
    fine = all(finding.ok for finding in results)
    title = f"{hub.display_path(recipe.model)} with {recipe.scheme} on {recipe.target or 'any target'} in {engine}"
    data = {"ok": fine, "engine": engine, "recipe": recipe.plain(), "findings": [vars(f) for f in results]}
    return OK if fine else BAD_INPUT, data, findings_text(title, results)


def _support(model: str) -> Outcome:
    """Say whether the model is supported, and where; exit code 2 if it can't be quantized."""
    _flags.check_model(model, family=False)
    from vlmcompress.quantization.plan.support import model_support

    results = model_support(hub.local(model, weights="none"))
    fine = results[0].ok
    rows = [("yes" if finding.ok else "no", finding.name, finding.detail) for finding in results]
    data = {"ok": fine, "model": model, "findings": [vars(finding) for finding in results]}
    return OK if fine else BAD_INPUT, data, f"{hub.display_path(model)}\n{table(rows)}"


def _devices(recipe: Recipe, tp: int) -> Finding:
    """Check whether vLLM can split the model in the recipe's format over `tp` devices."""
    from vlmcompress import models
    from vlmcompress.quantization.plan import devices
    from vlmcompress.quantization.plan.plan import make_plan
    from vlmcompress.utils.errors import UserError
    from vlmcompress.utils.messages import Finding
    from vlmcompress.utils.model_folder import has_weights

    try:
        outlined = not recipe.from_quantized and not has_weights(recipe.model)
        source = models.Source.outline(recipe.model) if outlined else None
        problem = devices.devices_problem(make_plan(recipe, source=source, refuse=False), tp)
    except UserError as error:
        return Finding("devices", False, str(error))
    return Finding("devices", problem is None, problem or f"the model can be split over {tp}")
