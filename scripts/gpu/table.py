"""What a file of results says, as the docs' Markdown and as a list of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu.steps import SHAPES, STEPS, Step
from vlmcompress.utils.registry import REDUCERS

Parts = Mapping[str, Mapping[str, Any]]
EMPTY = "Not run yet."
SIGNS = {"passed": "passed", "failed": "**failed**", "skipped": "skipped"}


def render(parts: Parts) -> str:
    """The docs' tables."""
    ran = {name: part for name, part in parts.items() if part["status"] != "skipped"}
    if not ran:
        return EMPTY
    sections = [_machine(ran), _steps(parts), _quantized(ran), _layers(ran), _triton(ran), _reducers(ran), _prefill(ran),
                _trained(ran), _kernels(ran), _served(ran), _number_problems(ran)]  # fmt: skip
    return "\n\n".join(text for text in sections if text)


def listing(steps: Sequence[Step], parts: Parts) -> str:
    """Steps with what each proves, about how long it takes on an H200, and which of its parts are done."""
    lines = []
    for step in steps:
        lines.append(f"{step.name:<24}{step.minutes:>5.1f} min  {step.proves}")
        for part in step.parts:
            state = parts.get(f"{step.name}/{part.name}", {})
            reason = f": {state['reason']}" if state.get("status") == "skipped" else ""
            lines.append(f"    {part.name:<20}{part.minutes:>5.1f} min  {state.get('status', 'to do')}{reason}")
    for tier in ("bare", "engine"):
        total = sum(part.minutes for step in steps if not step.fetches for part in step.parts if part.tier == tier)
        lines.append(f"{f'all of the tier {tier}':<24}{total:>5.1f} min, estimated")
    return "\n".join(lines)


def _machine(ran: Parts) -> str:
    about = _result(ran, "environment/here")
    if not about:
        return ""
    packages = ", ".join(f"{name} {about['packages'][name]}" for name in ("vllm", "torch", "transformers")
                         if name in about["packages"])  # fmt: skip
    return f"{about['gpu'] or 'No GPU'}, driver {about['driver']}, {about['cpus']} CPUs, {about['memory_gb']:g} GB; {packages}."


def _steps(parts: Parts) -> str:
    lines = ["| step | proves | minutes | result |", "|---|---|---:|---|"]
    never = []
    for step in STEPS:
        kept = [parts[f"{step.name}/{part.name}"] for part in step.parts if f"{step.name}/{part.name}" in parts]
        if not kept:
            never.append(f"{step.name} ({step.proves})")
            continue
        states = [part["status"] for part in kept]
        counts = ", ".join(f"{states.count(state)} {SIGNS[state]}" for state in SIGNS if state in states)
        missing = len(step.parts) - len(kept)
        minutes = sum(part["seconds"] for part in kept if part["status"] != "skipped") / 60
        lines.append(
            f"| {step.name} | {step.proves} | {minutes:.1f} | {counts}{f', {missing} not run' if missing else ''} |"
        )
    return "\n".join(lines) + (f"\n\n**Not run**: {'; '.join(never)}." if never else "")


def _quantized(ran: Parts) -> str:
    rows = []
    for name, figures in _results(ran, "quantize"):
        phases = ", ".join(f"{label} {value:.0f}" for label, value in figures["phases"].items() if value >= 0.5)
        rows.append(
            f"| {name} | {figures['layers']} | {figures['samples']} | {figures['seconds']:.0f} | {phases} | "
            f"{_gb(figures['gpu_gb'])} | {_gb(figures['host_gb'])} | "
            f"{_gb(figures['gb_before'])} -> {_gb(figures['gb_after'])} |"
        )
    return _table(
        "model, scheme | blocks | samples | seconds | by phase | GPU peak | host peak | weights", "rrrlrrr", rows
    )


def _layers(ran: Parts) -> str:
    shapes = _results(ran, "layers")
    rows = []
    for scheme in dict.fromkeys(scheme for _, result in shapes for scheme in result["schemes"]):
        cells = []
        for _, result in shapes:
            figures = result["schemes"].get(scheme, {})
            if "seconds" in figures:
                cells += [f"{figures['model_seconds']:.0f}", _gb(figures["gpu_gb"])]
            else:
                cells += ["–"] * 2
        rows.append(f"| {scheme} | {' | '.join(cells)} |")
    heads = "".join(f" | {shape}: solving all blocks, s | GPU peak" for shape, _ in shapes)
    return _table(f"scheme{heads}", "rr" * len(shapes), rows)


def _triton(ran: Parts) -> str:
    rows = [
        f"| {scheme} | {figures['seconds']['torch']:.3f} | {figures['seconds']['triton']:.3f} | {figures['rows_alike']:.1%} |"
        for _, result in _results(ran, "triton")
        for scheme, figures in result.items()
        if "seconds" in figures
    ]
    return _table("two layers of 3,584 inputs | torch, s | Triton, s | rows alike", "rrr", rows)


def _reducers(ran: Parts) -> str:
    rows: list[str] = []
    heads = ""
    for shape, result in _results(ran, "reducers"):
        counts = result["encoder_ms"]
        heads = "".join(f" | {count} images, ms" for count in counts)
        heads += f" | the same without Triton: {', '.join(counts)} images"
        rows.append(f"| encoder of {shape} | {' | '.join(f'{value:.1f}' for value in counts.values())} | |")
        for name, figures in result["reducers"].items():
            if "ms" in figures and name in REDUCERS:  # others are gone
                taken = " | ".join(f"{value:.1f}" for value in figures["ms"].values())
                torch = ", ".join(f"{value:.1f}" for value in figures.get("torch_ms", {}).values())
                rows.append(f"| {name} | {taken} | {torch} |")
    return _table(f"reducer{heads}", "r" * heads.count("|"), rows)


def _prefill(ran: Parts) -> str:
    rows = []
    for shape, result in _results(ran, "prefill"):
        for name, figures in result.items():
            if isinstance(figures, dict) and "decoder_ms" in figures:
                decoder = ", ".join(f"{share}: {value:.1f}" for share, value in figures["decoder_ms"].items())
                whole = ", ".join(f"{label}: {value:.1f}" for label, value in figures["model_ms"].items())
                rows.append(f"| {shape}, {name} | {decoder} | {whole} |")
    return _table("prefill | decoder alone by share of tokens, ms | model after a reducer, ms", "ll", rows)


def _trained(ran: Parts) -> str:
    rows = []
    for name, figures in _results(ran, "training"):
        rows.append(f"| {name} | {figures['seconds']:.1f} | {_gb(figures['gpu_gb'])} |")
    return _table("three blocks of full width | seconds | GPU peak", "rr", rows)


def _kernels(ran: Parts) -> str:
    results = {shape: _result(ran, f"kernels/{shape}") for shape in SHAPES}
    schemes = list(dict.fromkeys(name for result in results.values() if result for name in result["schemes"]))
    if not schemes:
        return ""
    lines = [f"| kernel of | recipe.targets says | {' | '.join(results)} |", f"|---|---|{'---|' * len(results)}"]
    for name in schemes:
        rows = {shape: result["schemes"].get(name, {}) if result else {} for shape, result in results.items()}
        says = next((result["expected"] for result in rows.values() if "expected" in result), "refused")
        cells = (
            ", ".join(result.get("kernels", {})) or ("refused" if "refused" in result else "–")
            for result in rows.values()
        )
        lines.append(f"| {name} | {says} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _served(ran: Parts) -> str:
    rows = [part["result"] for name, part in ran.items() if name.startswith("serve/") and part.get("result")]
    rows = [row for row in rows if "kept" in row]
    if not rows:
        return ""
    head = "visual tokens | TTFT, one client | requests/s | TTFT p50 | p99 | requests that fit"
    lines = [f"| {rows[0]['shape']}, served | {head} |", "|---|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        for kept, figures in row["kept"].items():
            lines.append(
                f"| {row['scheme']}, {kept} | {figures['visual_tokens']} | {figures['ttft_ms']:.0f} ms | "
                f"{figures['requests_per_second']:.2f} | {figures['load_ttft_p50_ms']:.0f} ms | "
                f"{figures['load_ttft_p99_ms']:.0f} ms | {figures['fits']:.1f} |"
            )
    return "\n".join(lines)


def _number_problems(ran: Parts) -> str:
    lines = [
        f"* **{name}** failed: {' / '.join(part['error'])}" for name, part in ran.items() if part["status"] == "failed"
    ]
    return "\n".join(lines)


def _table(heads: str, align: str, rows: Sequence[str]) -> str:
    """A table; empty without rows. `align`: `l` or `r` for each column after the first."""
    marks = "".join("---:|" if side == "r" else "---|" for side in align)
    return "\n".join([f"| {heads} |", f"|---|{marks}", *rows]) if rows else ""


def _results(ran: Parts, step: str) -> list[tuple[str, Any]]:
    """The parts of a step that have results, by their names."""
    named = [(name.partition("/"), part.get("result")) for name, part in ran.items()]
    return [(part, result) for (of, _, part), result in named if of == step and result]


def _result(parts: Parts, name: str) -> Any:
    return parts.get(name, {}).get("result")


def _gb(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} GB"
