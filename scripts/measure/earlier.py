#!/usr/bin/env python
"""What was measured once, by scripts that are no longer kept: prints the docs' tables of it from `eval/earlier.json`.

    scripts/measure/earlier.py --render NAME    drafts, engines, searches, weighting or smaller

Each entry has the commit whose `scripts/measure` has its script, the day, the machine where speed was measured, and what was
asked. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "earlier.json"
BEYOND = 1.96  # standard errors of a 95% interval


def drafts(results: dict[str, Any]) -> list[str]:
    """Tokens a step and times the tokens a second of drafts, and what an EAGLE-3 draft wins from an image."""
    entry, images = results["drafts"], results["draft_images"]
    rows = dict(entry["rows"])
    plain = rows.pop("none")
    lines = ["| draft | " + " | ".join(entry["targets"]) + " |", "|---|" + "---:|" * len(plain)]
    for name, cells in rows.items():
        times = [
            cell and cell["tokens_per_second"] / baseline["tokens_per_second"]
            for cell, baseline in zip(cells, plain, strict=True)
        ]
        texts = [f"{cell['length']:.2f}, {won:.2f}" if cell else "" for cell, won in zip(cells, times, strict=True)]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    wins = [
        f"`{name}` {row['accepted'] - images['none']:.2f} ({row['difference'][0]:.2f} to {row['difference'][1]:.2f})"
        for name, row in images["rows"].items()
    ]
    return [*lines, "", f"Against `--images none` EAGLE-3 gets more tokens accepted: {', '.join(wins)}."]


def engines(results: dict[str, Any]) -> list[str]:
    """Tokens a second of three engines."""
    columns = [(part, bits) for part in ("prompt", "answer") for bits in ("16", "8", "4")]
    lines = ["| | " + " | ".join(f"{part}, {bits} bits" for part, bits in columns) + " |", "|---|" + "---:|" * 6]
    for name, row in results["engines"]["rows"].items():
        cells = [row[part][bits] for part, bits in columns]
        lines.append(f"| {name} | " + " | ".join(f"{middle} ({low} to {high})" for middle, low, high in cells) + " |")
    return lines


def searches(results: dict[str, Any]) -> list[str]:
    """How a search keeps its floor in simulated worlds, and whether winners on real models passed."""
    entry = results["searches"]
    floors = entry["floors"].values()
    ours = [way for ways in floors for way in (ways["search"], ways["search, at odds"])]
    won, missed, grid = (
        ", ".join(f"{ways[way][figure]:.0%}" for ways in floors)
        for way, figure in (("search", "confirmed"), ("search", "regret_median"), ("grid", "regret_median"))
    )
    winners, broken = entry["winners"], max(way["broken"] for way in ours)
    above = max(way["broken_interval"][1] for way in ours)
    return [
        f"Of {entry['worlds']:,} simulated searches with a floor of 1, 2 and 3 points {won} end with a confirmed "
        f"winner; it breaks the floor in {broken:.1%} (at most {above:.1%}) and misses "
        f"{missed} of the best gain in the median. Asking every candidate everything misses {grid}; the "
        f"search asks {max(way['asked'] for way in ours):.0%} of that. On demo-llava and demo-qwen {winners['pass']} of "
        f"{sum(winners.values())} winners passed on test questions, {winners.get('fail', 0)} failed."
    ]


def weighting(results: dict[str, Any]) -> list[str]:
    """What weighting modalities and ranking blocks did for GPTQ."""
    ratio, error = results["balance"]["ratio"], results["luq"]["error"]
    typical, exact = ([row[name]["z"] for row in ratio] for name in ("typical", "exact"))
    better = sum(row["path"]["z"] < -BEYOND for row in error)
    less = math.exp(sum(row["typical"]["difference"] for row in ratio) / len(ratio))
    return [
        f"* **`balance: ratio`** takes GPTQ's typical divergence to {less:.2f} times; it is lower in "
        f"{sum(z < -BEYOND for z in typical)} of {len(ratio)} settings, higher in {sum(z > BEYOND for z in typical)}. More "
        f"answers are right in {sum(z > BEYOND for z in exact)}, fewer in {sum(z < -BEYOND for z in exact)}.",
        f"* **`bits.by: luq`** diverges more than widths by predicted error in {better} of {len(error)} models, at 3.25 bits.",
    ]


def smaller(results: dict[str, Any]) -> list[str]:
    """Smaller images next to selecting tokens, and training after a reducer."""
    lost: dict[float, dict[str, float]] = {}
    for row in results["resizing"]["rows"]:
        lost.setdefault(row["kept"], {})[row["reduce"].partition(":")[0]] = -100 * row["less_full"][0]
    points = ", ".join(f"{by['resize']:.1f} and {by['coverage']:.1f} with {kept:.0%}" for kept, by in lost.items())
    before, after = (100 * share for share in results["recover"]["exact"])
    return [
        f"* **Smaller images** cost a demo-qwen that was trained at six scales more points than `coverage`: {points} of the "
        "tokens. VTC-Bench (arXiv 2510.07143) found the opposite on Qwen2-VL-7B.",
        f"* **`recover`** took demo-llava with a ninth of its tokens from {before:.1f}% to {after:.1f}%.",
    ]


TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    function.__name__: function for function in (drafts, engines, searches, weighting, smaller)
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", required=True, choices=TABLES)
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    print("\n".join(TABLES[args.render](results)))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
