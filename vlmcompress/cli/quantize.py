"""Write a compressed checkpoint."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.cli import _flags, _process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome, devices_text, evaluation_command, plan_data, plan_text, written_text
from vlmcompress.export import readers
from vlmcompress.utils import distributed, folders, hub, json_files, model_folder
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.text import percentage, size, smaller

if TYPE_CHECKING:
    from vlmcompress.recipe import Resolved

GROUP = "compress"
PLACE = 21


def options(parser: Parser) -> None:
    _flags.recipe(parser)
    _flags.tensor_parallel(parser, "devices that share the model; refuse what vLLM cannot split")
    parser.add_argument("--dry-run", action="store_true", help="show the plan; read no weights, write nothing")
    _flags.resumable(parser, "OUT")


def run(args: argparse.Namespace) -> Outcome:
    """Write the checkpoint; with `--dry-run`, show the plan."""
    from vlmcompress.export.manifest import MANIFEST
    from vlmcompress.recipe import resolve

    # What can be refused by names and headers is refused before transformers is imported, which takes seconds.
    values = _flags.recipe_values(args)
    resolved = resolve(values, args.recipe, weights="headers" if args.dry_run else "values")
    recipe, count = resolved.recipe, _flags.devices(args)
    out = recipe.out if args.dry_run else recipe.output
    model_folder.require_model(recipe.model)
    if out is not None:
        folders.require_out(recipe.model, out, overwrite=args.overwrite, mark=MANIFEST, look=True)
    _process.import_transformers()
    if count != 1:
        from vlmcompress.quantization.plan import make_plan

        if problem := make_plan(recipe).devices_problem(count):
            raise UserError(problem)
    if args.dry_run:
        return _planned(resolved)
    from vlmcompress.quantization.run import quantize

    with closing(ProgressBar()) as progress:
        done = quantize(recipe, restart=args.restart, overwrite=args.overwrite, progress=progress)
    if not distributed.is_main():
        return OK, None, ""
    for line in done.manifest["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    data = result(done.out, hub.display_path(recipe.model), done.manifest, time.monotonic() - args.began)
    return OK, data, text(data, args.verbose)


def _planned(resolved: Resolved) -> Outcome:
    """The outcome of `--dry-run`. `resolved`: the recipe; of its model only headers may have been fetched."""
    from vlmcompress.quantization.plan import make_plan
    from vlmcompress.quantization.plan.calibration_data import preview_data

    recipe = resolved.recipe
    plan = make_plan(recipe)
    preview = preview_data(plan)
    return OK, {"ok": True, **plan_data(plan, resolved, preview)}, plan_text(plan, resolved, preview)


def result(out: Path, model: str, manifest: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The result as data for `--json`."""
    from vlmcompress.export.manifest import measured_text

    before, after = manifest["size"]["weights_before"], manifest["size"]["weights_after"]
    recipe, allocation = manifest["recipe"], manifest.get("allocation")
    other = FORMATS.constant(recipe["format"], "ENGINE") if "format" in recipe else None
    facts = readers.gather_facts(json_files.read(out / "config.json"), out.name)
    in_vllm = (
        not other and recipe.get("engine", "vllm") == "vllm" and readers.engine_support("vllm", facts).reason is None
    )
    # The original runs in transformers where the checkpoint's engine has no class for it, or does not read its format.
    engine = f" --engine {other} --baseline-engine hf" if other else "" if in_vllm else " --engine hf"
    compare = evaluation_command(out, model, engine)
    serve = f"vlmcompress serve {shlex.quote(str(out))}"
    return {
        "ok": True,
        "out": str(out),
        "seconds": round(seconds, 3),
        "weights_before": before,
        "weights_after": after,
        "ratio": round(before / max(after, 1), 4),
        "devices": [] if other else manifest["devices"],
        "bits": allocation["bits"] if allocation else None,
        "widths": Counter(group["width"] for group in allocation["groups"]) if allocation else None,
        "worst_layers": worst_layers(manifest["errors"]),
        "measured_on": measured_text(manifest["calibration"]) if manifest["calibration"] else None,
        "kv_cache": kv_cache(manifest["kv_cache"]),
        "resize": recipe.get("resize"),
        "reduce": recipe.get("reduce"),
        "visual_tokens": manifest.get("visual_tokens"),
        "warnings": manifest["warnings"],
        "timing": manifest.get("timing", {}),
        "next": [compare, serve] if in_vllm or other in ("llamacpp", "mlx") else [compare],
    }


def worst_layers(errors: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """The three layers with the largest relative output error in any modality."""
    ranked = sorted(errors.items(), key=lambda item: (-max(item[1].values(), default=0.0), item[0]))
    return [{"layer": name, "error": dict(by_modality)} for name, by_modality in ranked[:3]]


def kv_cache(ranges: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """For an FP8 cache: the largest share of visual (text) values clipped by scales calibrated only on the other kind."""
    if not ranges:
        return None
    clipped = {
        kind: max(
            (part["clipped"][kind] or 0.0, f"{name} {part_name}")
            for name, parts in ranges.items()
            for part_name, part in parts.items()
        )
        for kind in ("vision", "text")
    }
    return {"attentions": len(ranges), "clipped": {kind: {"share": s, "where": w} for kind, (s, w) in clipped.items()}}


def text(done: Mapping[str, Any], verbose: bool = False) -> str:
    """The result as text. `done`: from `result`; `verbose`: add the seconds of each phase."""
    from vlmcompress.export.manifest import error_kind, errors_text

    before, after = done["weights_before"], done["weights_after"]
    changed = f"{size(before)} -> {size(after)} ({smaller(before, after)})"
    lines = [f"  weights   {f'{size(after)}, as they were' if before == after else changed}"]
    if done["reduce"] or done["resize"]:
        from vlmcompress.quantization.plan.visual_tokens import VisualTokens
        from vlmcompress.reduction.choice import reducer_of_setting
        from vlmcompress.reduction.resize import Resize

        reducer = reducer_of_setting(done["reduce"]) if done["reduce"] else None
        resize = Resize(**done["resize"]) if done["resize"] else None
        lines.append(f"  images    {VisualTokens(reducer, False, done['visual_tokens'], resize).text}")
    if done["devices"]:
        lines.append(f"  devices   {devices_text(done['devices'])}")
    if done["bits"]:
        lines.append(f"  bits      {done['bits']:g} per weight of the quantized layers, scales included")
        widths = (f"{n} in {name}{' bits' * name.isdecimal()}" for name, n in sorted(done["widths"].items()))
        lines.append(f"  widths    groups of layers: {', '.join(widths)}")
    for number, layer in enumerate(done["worst_layers"]):
        error = ", ".join(f"{error_kind(modality)} {percentage(value)}" for modality, value in layer["error"].items())
        lines.append(f"  {'' if number else 'worst':<9} {layer['layer']}: {error}")
    if done["worst_layers"]:
        of_layers = errors_text({layer["layer"]: layer["error"] for layer in done["worst_layers"]})
        measured = f"; measured on {done['measured_on']}" if done["measured_on"] else ""
        lines.append(f"  {'':<9} ({of_layers[:1].lower()}{of_layers[1:].rstrip('.')}{measured})")
    if done["kv_cache"]:
        worst = done["kv_cache"]["clipped"]["vision"]
        scales = (
            f"scales for {done['kv_cache']['attentions']} layers; calibrated on text tokens alone they would clip up to"
        )
        lines.append(f"  KV cache  {scales} {worst['share']:.2%} of visual values ({worst['where']})")
    return written_text(done, lines, verbose)
