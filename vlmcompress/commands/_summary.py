"""Results in words: what `vlmcompress` prints on stdout when it was not asked for JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmcompress.common.text import duration, size, table

if TYPE_CHECKING:
    from vlmcompress.planning.plan import Plan
    from vlmcompress.recipe import Resolved


class Looked(Protocol):
    """A finding of `check` or a check of `doctor`."""

    @property
    def name(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def detail(self) -> str: ...


def plan_text(plan: Plan, resolved: Resolved) -> str:
    """What `--dry-run` shows."""
    flat = {key: value for key, value in _flat(plan.recipe.plain()).items() if value is not None}
    settings = [
        (key, value if isinstance(value, str) else json.dumps(value), resolved.origin(key))
        for key, value in flat.items()
    ]
    rows = [("part", "group", "format", "blocks", "layers [out, in]")] + [
        (
            r.part,
            r.group,
            r.format,
            r.blocks,
            ", ".join(f"{n} {list(s)}" for n, s in zip(r.linears, r.shapes, strict=True)),
        )
        for r in plan.rows
    ]
    calibrate = plan.recipe.calibrate
    data = f"{calibrate.samples} samples" if plan.needs_data or calibrate.data else "no data needed"
    if plan.statistics:
        data = f"statistics of {plan.statistics.facts['calibration']['samples']} samples, no forward pass"
    prefix = {"float": "float: blocks are solved behind unquantized ones", None: "none: nothing is observed"}
    shared = allocation_text(plan.allocation) if plan.allocation else ""
    if plan.undecided:
        shared = "\nThe widths of groups are decided after the calibration; with --stats they are shown here."
    read = "Weights and statistics were read" if plan.allocation else "Nothing was read but headers"
    return "\n".join(
        [
            f"Recipe for {plan.recipe.model} ({plan.source.spec.family})",
            table(settings),
            f"\nWhat is quantized: {f'{plan.linear_layers} linear layers' if plan.rows else 'nothing'}",
            *([table(rows)] if plan.rows else []),
            "",
            table(
                [
                    ("weights", f"{size(plan.bytes_before)} -> {size(plan.bytes_after)} ({_ratio(plan)})"),
                    *([("images", plan.visual_tokens.text)] if plan.visual_tokens else []),
                    ("peak memory", f"about {size(plan.peak_bytes)}"),
                    ("calibration", data),
                    ("prefix", prefix.get(plan.prefix, "quantized: blocks are solved behind quantized ones")),
                ]
            ),
            *([shared] if shared else []),
            f"\n{read}, and nothing written.",
        ]
    )


def allocation_text(found: Mapping[str, Any]) -> str:
    """Which groups got which width, and what is predicted of that and of one width for all."""
    names = list(dict.fromkeys(one["group"] for one in found["groups"]))
    widths = {(one["block"], one["group"]): one["width"] for one in found["groups"]}
    blocks = sorted({block for block, _ in widths})
    rows = [("block", *names)] + [(block, *(widths.get((block, name), "") for name in names)) for block in blocks]
    errors = [("", "bits per weight", f"predicted, {found['unit']}")]
    errors += [(f"all {name}", one["bits"], f"{one['predicted']:.4g}") for name, one in found["uniform"].items()]
    errors.append((f"by {found['by']}", found["bits"], f"{found['predicted']:.4g}"))
    return f"\nWidths\n{table(rows)}\n\n{table(errors)}"


def quantize_result(out: Path, model: Path, manifest: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The outcome of `quantize` as data."""
    before, after = manifest["size"]["weights_before"], manifest["size"]["weights_after"]
    recipe = manifest["recipe"]
    compare = f"vlmcompress eval {shlex.quote(str(out))} --baseline {shlex.quote(str(model))}"
    serve = f"vlmcompress serve {shlex.quote(str(out))}"
    return {
        "ok": True,
        "out": str(out),
        "seconds": round(seconds, 3),
        "weights_before": before,
        "weights_after": after,
        "ratio": round(before / max(after, 1), 4),
        "bits": manifest["allocation"]["bits"] if "allocation" in manifest else None,
        "worst_layers": worst_layers(manifest["errors"]),
        "kv_cache": kv_cache(manifest["kv_cache"]),
        "reduce": recipe.get("reduce"),
        "visual_tokens": manifest.get("visual_tokens"),
        "warnings": manifest["warnings"],
        "next": [compare, serve] if recipe.get("engine", "vllm") == "vllm" else [f"{compare} --engine hf"],
    }


def calibrate_result(out: Path, model: Path, facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The outcome of `calibrate` as data."""
    reduce = facts["calibration"].get("reduce")
    same = f" --reduce {shlex.quote(_asked_for(reduce))}" if reduce else ""
    return {
        "ok": True,
        "out": str(out),
        "seconds": round(seconds, 3),
        "bytes": sum(file["size"] for file in facts["files"].values()),
        "blocks": sum(bool(groups) for groups in facts["blocks"]),
        "groups": sum(map(len, facts["blocks"])),
        "needs": facts["needs"],
        "kv_cache": facts["kv_cache"],
        "calibration": facts["calibration"],
        "next": [
            f"vlmcompress quantize {shlex.quote(str(model))} --stats {shlex.quote(str(out))}{same} -o OUT --scheme SCHEME"
        ],
    }


def calibrate_text(result: Mapping[str, Any]) -> str:
    """The same for people."""
    data = result["calibration"]
    tokens = ", ".join(f"{name} {count:,}" for name, count in data["tokens"].items())
    text = data.get("text")
    mixed = f" and '{text['source']}' ({text['samples']} of text alone)" if text else ""
    kinds = ", ".join(result["needs"]) + (", ranges of keys and values" if result["kv_cache"] else "")
    rows = [
        ("statistics", f"{kinds}: {result['groups']} groups in {result['blocks']} blocks, {size(result['bytes'])}"),
        ("data", f"{data['samples']} samples of '{data['source']}'{mixed}, {data['images']} images"),
        ("tokens", tokens),
        ("prefix", "float: the model ran unquantized"),
    ]
    if data.get("reduce"):
        rows.append(("behind", f"{_asked_for(data['reduce'])}, whose dropped tokens are not counted"))
    lines = [f"Wrote {result['out']} in {duration(result['seconds'])}.", table(rows), "Next:"]
    return "\n".join([*lines, *(f"  {command}" for command in result["next"])])


def _asked_for(reduce: Mapping[str, Any]) -> str:
    from vlmcompress.recipe.reducer import read

    return str(read(reduce).asked_for)


def worst_layers(errors: Mapping[str, Mapping[str, float]], count: int = 3) -> list[dict[str, Any]]:
    """The layers with the largest relative output error in any modality."""
    ranked = sorted(errors.items(), key=lambda item: (-max(item[1].values(), default=0.0), item[0]))
    return [{"layer": name, "error": dict(by_modality)} for name, by_modality in ranked[:count]]


def kv_cache(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Of an FP8 cache: the largest share of values that scales calibrated on one kind of token would clip of the other."""
    if not found:
        return None
    clipped = {
        kind: max(
            (part["clipped"][kind] or 0.0, f"{name} {part_name}")
            for name, parts in found.items()
            for part_name, part in parts.items()
        )
        for kind in ("vision", "text")
    }
    return {"attentions": len(found), "clipped": {kind: {"share": s, "where": w} for kind, (s, w) in clipped.items()}}


def quantize_text(result: Mapping[str, Any]) -> str:
    """The same for people."""
    lines = [f"Wrote {result['out']} in {duration(result['seconds'])}."]
    before, after = result["weights_before"], result["weights_after"]
    smaller = f"{size(before)} -> {size(after)} ({result['ratio']:.2f}x smaller)"
    lines.append(f"  weights   {f'{size(after)}, as they were' if before == after else smaller}")
    if result["reduce"]:
        from vlmcompress.planning.reducer import tokens_text
        from vlmcompress.recipe.reducer import read

        lines.append(f"  images    {tokens_text(read(result['reduce']), result['visual_tokens'])}")
    if result["bits"]:
        lines.append(f"  bits      {result['bits']:g} per weight of the quantized layers, scales included")
    for number, layer in enumerate(result["worst_layers"]):
        error = ", ".join(f"{modality} {value:.2%}" for modality, value in layer["error"].items())
        lines.append(f"  {'' if number else 'worst':<9} {layer['layer']}: {error}")
    if result["worst_layers"]:
        lines.append(f"  {'':<9} (squared error of a layer's output, relative to the output)")
    if result["kv_cache"]:
        worst = result["kv_cache"]["clipped"]["vision"]
        text = f"scales for {result['kv_cache']['attentions']} layers; calibrated on text tokens alone they would clip up to"
        lines.append(f"  KV cache  {text} {worst['share']:.2%} of visual values ({worst['where']})")
    lines += ["Next:", *(f"  {command}" for command in result["next"])]
    return "\n".join(lines)


def looked_text(title: str, findings: Sequence[Looked]) -> str:
    """Findings or checks, one a line."""
    bad = sum(not finding.ok for finding in findings)
    rows = [("ok" if finding.ok else "PROBLEM", finding.name, finding.detail) for finding in findings]
    verdict = "nothing stands in the way" if not bad else f"{bad} problem{'s' if bad > 1 else ''}"
    return f"{title}\n{table(rows)}\n{len(findings)} things looked at, {verdict}."


def list_text(entries: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    """Everything that has a name."""
    return "\n\n".join(f"{what}\n{table([_listed(entry) for entry in found])}" for what, found in entries.items())


def _listed(entry: Mapping[str, Any]) -> tuple[str, ...]:
    if "stage" not in entry:
        return entry["name"], entry["about"]
    families = entry["vllm"]
    where = ", ".join(families) if len(families) <= 3 else f"{len(families)} families"
    where = f"vLLM: {where}" if families else "transformers only"
    return entry["name"], entry["stage"], f"{entry['count']} count", where, entry["about"]


def _ratio(plan: Plan) -> str:
    if plan.bytes_after == plan.bytes_before:
        return "as they are"
    return f"{plan.bytes_before / max(plan.bytes_after, 1):.2f}x smaller"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        elif value not in ({}, []):
            found[f"{prefix}{key}"] = value
    return found
