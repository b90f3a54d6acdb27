"""Check in seconds what a model supports, whether a recipe works for it, and how many tokens its images take."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress import models
from vlmcompress.cli import _flags, _process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import BAD_INPUT, OK, Outcome, checks_text, plan_data, plan_text
from vlmcompress.export import readers
from vlmcompress.reduction import support as reducer_support
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.messages import Check
from vlmcompress.utils.registry import LLAMACPP, OPENVINO, REDUCERS
from vlmcompress.utils.text import parse_pixels, table
from vlmcompress.utils.text import size as size_text

if TYPE_CHECKING:
    from vlmcompress.quantization.plan.plan import Plan
    from vlmcompress.recipe import Recipe

GROUP = "look first"
PLACE = 11
CACHE_BYTES = {"fp8": 1, "bf16": 2}


def options(parser: Parser) -> None:
    _flags.recipe(parser)
    _flags.tensor_parallel(parser, "devices that share the model")
    parser.add_argument(
        "--engine",
        help=f"{', '.join(list(readers.ENGINES)[:-1])} or {list(readers.ENGINES)[-1]}; default: one that reads the format",
    )
    parser.add_argument(
        "--image-size",
        metavar="WxH",
        action="append",
        default=[],
        help="count the tokens of a prompt with such an image, with each --reduce; may be repeated: images of one prompt",
    )
    parser.add_argument("--question", metavar="Q", default="", help="text after the images of --image-size")
    parser.epilog = (
        "With --image-size alone, or with --reduce and --kv-cache, only tokens are counted; several --reduce are compared.\n"
        "Prefill and KV cache are those of the language model. The encoder processes whole images, whatever a reducer drops;\n"
        "only resize makes them smaller. It is shown alone and before each reducer."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Check the recipe against model, target and engine; MODEL alone: what it can have. Exit code 2 if a check fails."""
    from vlmcompress.recipe import resolve

    keys = {key for key in _flags.RECIPE_KEYS if hasattr(args, key)}
    sizes = [parse_pixels(text, "--image-size", most=999_999_999) for text in args.image_size]
    if args.question and not sizes:
        raise UserError("--question is a part of a prompt with images; give their --image-size")
    # MODEL with flags about its prompts is a question about tokens, MODEL alone one about its family; all else is a recipe.
    if not args.recipe and not args.set and "model" in keys:
        if sizes and keys <= {"model", "reduce", "kv_cache"}:
            data, text = _tokens(args, sizes, args.model, getattr(args, "kv_cache", None))
            return OK, {"ok": True, "model": str(args.model), **data}, text
        if keys == {"model"}:
            return _support(args.model)
    resolved = resolve(_flags.recipe_values(args), args.recipe, strict=False, weights="headers")
    recipe = resolved.recipe
    _process.import_transformers()
    from vlmcompress.quantization.plan.examine import engine_of, examine

    # `examine` raises for no problem of the recipe: each becomes a line, and if there is none, the plan follows.
    engine = args.engine or engine_of(recipe)
    examined = examine(recipe, engine)
    results = examined.findings
    if args.tp != 1:
        results.append(_devices(recipe, examined.plan, _flags.devices(args)))
    title = f"{hub.display_path(recipe.model)} with {recipe.scheme} on {recipe.target or 'any target'} in {engine}"
    data = {"ok": examined.ok, "engine": engine, "recipe": recipe.plain(), "findings": [vars(f) for f in results]}
    text = checks_text(title, results)
    if examined.plan and not examined.plan.problems:
        data |= plan_data(examined.plan, resolved, examined.preview)
        text += f"\n\n{plan_text(examined.plan, resolved, examined.preview)}"
    if sizes:
        data["tokens"], counted = _tokens(args, sizes, str(recipe.model), recipe.kv_cache)
        text += f"\n\n{counted}"
    return OK if examined.ok else BAD_INPUT, data, text


def _support(model: str) -> Outcome:
    """Say whether the model is supported, and where; exit code 2 if it can't be quantized."""
    _flags.read_model_config(model, family=False)
    results = model_support(hub.local(model, weights="none"))
    fine = results[0].ok
    rows = [("yes" if finding.ok else "no", finding.name, finding.detail) for finding in results]
    data = {"ok": fine, "model": model, "findings": [vars(finding) for finding in results]}
    return OK if fine else BAD_INPUT, data, f"{hub.display_path(model)}\n{table(rows)}"


def model_support(path: str | Path) -> list[Check]:
    """What can be quantized, which reducers work, and which engines load the model; `ok` is False where nothing does."""
    config = models.read_config(path, weights=False)
    spec, reason = None, ""
    try:
        spec = models.spec_for(config)
        models.require_unquantized(path, config)
    except UserError as error:
        reason = str(error)
    quantize = Check("quantize", not reason, reason or _model_parts(spec))
    return [quantize, _model_reducers(spec), _model_engines(spec, config)]


def _model_parts(spec: models.ModelSpec | None) -> str:
    assert spec is not None
    lacking = {
        "vision tower": not spec.vision_groups,
        "output head": spec.engine.head_shares,
        "token embedding": spec.engine.head_shares or spec.engine.embedding_whole,
    }
    parts = ", ".join(["decoder", *(part for part, missing in lacking.items() if not missing)])
    kept = " and ".join(part for part, missing in lacking.items() if missing)
    return f"family {spec.family}: {parts}{f'; in 16 bits: {kept}' if kept else ''}"


def _model_reducers(spec: models.ModelSpec | None) -> Check:
    """Methods that vLLM serves, and those that transformers runs alone."""
    attached = [name for name in REDUCERS.names() if spec and reducer_support.family_problem(spec, name) is None]
    served = [name for name in attached if spec and spec.family in reducer_support.served(name)]
    alone = [name for name in attached if name not in served]
    lines = {"vLLM and transformers": served, "transformers": alone}
    text = "; ".join(f"in {where}: {', '.join(names)}" for where, names in lines.items() if names)
    return Check("reduce", bool(text), text or "by no method")


def _model_engines(spec: models.ModelSpec | None, config: Mapping[str, Any]) -> Check:
    """Engines that have the model's class, with the formats that they read."""
    has = {
        "vllm": spec is not None or models.has_engine_class(config),
        "transformers": models.has_transformers_class(config),
        "llamacpp": spec is not None and spec.family in LLAMACPP.names(),
        "openvino": spec is not None and spec.family in OPENVINO.names(),
    }
    names = config.get("architectures")
    architectures = frozenset(names if isinstance(names, list) else ())
    titles = []
    for name, row in readers.ENGINES.items():
        if has.get(name, bool(row.architectures and row.architectures & architectures)):
            formats = [key for key, cell in row.formats.items() if isinstance(cell, readers.Cell)]
            titles.append(f"{row.title} ({', '.join(formats)})")
    return Check("engines", bool(titles), ", ".join(titles) or "none")


def _devices(recipe: Recipe, plan: Plan | None, tp: int) -> Check:
    """Check whether vLLM can split the model in the recipe's format over `tp` devices. `plan`: None: no weights to read."""
    from vlmcompress.quantization.plan import make_plan
    from vlmcompress.utils.model_folder import has_weights

    try:
        if plan is None:
            outlined = not recipe.from_quantized and not has_weights(recipe.model)
            source = models.Source.outline(recipe.model) if outlined else None
            plan = make_plan(recipe, source=source, strict=False)
        problem = plan.devices_problem(tp)
    except UserError as error:
        return Check("devices", False, str(error))
    return Check("devices", problem is None, problem or f"the model can be split over {tp}")


def _tokens(
    args: argparse.Namespace, sizes: Sequence[tuple[int, int]], model: str, kv_cache: str | None
) -> tuple[dict[str, Any], str]:
    """The tokens, compute and cache of a prompt with images of these sizes, before and after each `--reduce`."""
    if kv_cache is not None and kv_cache not in CACHE_BYTES:
        raise UserError(f"--kv-cache {kv_cache}: no such type{did_you_mean(kv_cache, CACHE_BYTES)}")
    _flags.read_model_config(model)
    from vlmcompress.reduction.choice import compared

    resize, reducers = compared(getattr(args, "reduce", []))
    _process.import_transformers()
    from vlmcompress.quantization.plan import prompt_cost

    folder = hub.local(model, weights="none")
    costs = prompt_cost.prompt_costs(folder, sizes, args.question, reducers, CACHE_BYTES.get(kv_cache or ""), resize)
    for note in costs.notes:
        print(f"warning: {note}", file=sys.stderr)
    data = costs.to_dict()
    for image, size in zip(data["images"], args.image_size, strict=True):
        image["size"] = size
    images = [("image", "visual tokens", "rows x columns")]
    for size, layout in zip(args.image_size, costs.layouts, strict=True):
        grids = [f"{piece.rows}x{piece.columns}" for piece in layout.pieces]
        same = [f"{grids.count(grid)} of {grid}" if grids.count(grid) > 1 else grid for grid in dict.fromkeys(grids)]
        images.append((size, f"{layout.tokens:,}", ", ".join(same)))
    full, none = costs.full, costs.text_only
    rows = [("", "visual", "kept", "prompt", "prefill", "KV cache", "of images")]
    for name, cost in {"all": full, **costs.reduced}.items():
        if cost is None:
            rows.append((name, "depends on what the image shows", "", "", "", "", ""))
            continue
        kept, work = cost.visual / max(full.visual, 1), cost.multiply_adds / full.multiply_adds
        cache = size_text(cost.kv_bytes_prompt), size_text(cost.kv_bytes)
        rows.append((name, f"{cost.visual:,}", f"{kept:.1%}", f"{cost.prompt:,}", f"{work:.1%}", *cache))
    steps = [f"{name}: {_steps(cost.blocks)}" for name, cost in costs.reduced.items() if cost and cost.differs]
    share, work = full.visual / full.prompt, 1 - none.multiply_adds / full.multiply_adds
    count = len(args.image_size)
    head = f"{costs.family}: a prompt with {count} image{'s' * (count > 1)} and {costs.text:,} other tokens"
    lines = [head, table(images), "", table(rows), *(["", *steps] if steps else []), ""]
    lines.append(f"Visual tokens are {share:.1%} of the prompt and {work:.1%} of the language model's work on it.")
    return data, "\n".join(lines)


def _steps(blocks: Sequence[int]) -> str:
    """Visual tokens by decoder block as text: each count, and the block from which it applies."""
    starts = [block for block, count in enumerate(blocks) if not block or count != blocks[block - 1]]
    first, *others = [f"{blocks[block]:,} {{}}from block {block} on" for block in starts]
    return ", ".join([first.format("visual tokens "), *(step.format("") for step in others)])
