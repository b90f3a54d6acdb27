#!/usr/bin/env python
"""Check by simulated compressions, whose true drop is known, that verdicts are wrong no more often than they may be.

    scripts/measure/simulate_statistics.py            all settings, about ten minutes
    scripts/measure/simulate_statistics.py --quick    a few, for CI

For every setting (kind of score, samples, images, share of answers that change both ways) and true drop: how often the
verdict at a margin of one point is wrong, and how often the 95% interval holds the truth. A pass is wrong where the drop is
at the margin or beyond it, a fail where it's at the margin or below; both may happen in 2.5%. The bootstrap's false passes
stand beside ours. Then:

- few images, at margins that so many can just confirm, losing one answer here and there or all answers of an image;
- power at the `detectable` drop and with the `needed` samples (80% each), and false verdicts over ten families (2.5%);
- how many images a verdict takes: from the number on at which a candidate that changes nothing passes, and where one that
  loses and wins some answers passes in four of five evaluations.

The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from vlmcompress.evaluation import noninferiority
from vlmcompress.evaluation.compare import families
from vlmcompress.evaluation.paired import MeanDifference

MARGIN, LEVEL = 0.01, 0.95
QUANTILE = 1.959963985
DROPS = (0.0, 0.005, 0.01, 0.03)
NOMINAL = 0.025
FEW = ((12, 9, 0.15), (12, 9, 0.3), (36, 2, 0.1), (100, 4, 0.05), (300, 4, 0.0125))  # images, questions of each, margin
MARGINS = (0.01, 0.02, 0.05, 0.1, 0.15)
RESAMPLED = 100  # evaluations that the bootstrap judges too, of each setting
Data = tuple[np.ndarray, np.ndarray]  # differences and images of n samples


@dataclass(frozen=True)
class Setting:
    """A simulated setting. `churn`: share of answers that get better, and of those that get worse beyond the drop.
    `together`: share of the images with several questions whose answers all change alike."""

    kind: str
    n: int
    shared: bool
    together: float
    churn: float

    def __str__(self) -> str:
        images = f"1-5 a picture, {self.together:.0%} together" if self.shared else "one a picture"
        return f"{self.kind}, {self.n} samples, {images}, churn {self.churn:.0%}"


MAGNITUDES = {"right/wrong": [1.0], "thirds": [1 / 3, 2 / 3, 1.0], "anls": [1.0, 1.0, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15]}


def draw(rng: np.random.Generator, s: Setting, drop: float, n: int | None = None) -> Data:
    """Draw differences with a true mean of exactly -drop, and the samples' images."""
    n = n or s.n
    sizes = rng.integers(1, 6, n) if s.shared else np.ones(n, dtype=int)
    images = np.repeat(np.arange(n), sizes)[:n]
    uniform, group = rng.random((2, n)), rng.random((2, n))
    fate = np.where(rng.random(n)[images] < s.together, group[:, images], uniform)
    choices = np.asarray(MAGNITUDES[s.kind])
    size = choices[(fate[1] * len(choices)).astype(int)]
    lost = s.churn + drop / choices.mean()
    return np.where(fate[0] < lost, -size, np.where(fate[0] < lost + s.churn, size, 0.0)), images


def bootstrap_passes(rng: np.random.Generator, data: Data, draws: int = 300) -> bool:
    """Whether the usual paired bootstrap over images (BCa; Efron and Tibshirani, 1993, section 14.3) would pass."""
    sums = np.bincount(data[1], data[0])
    counts = np.bincount(data[1]).astype(float)
    keep = counts > 0
    sums, counts = sums[keep], counts[keep]
    weights = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=draws).astype(np.float32)
    means, mean = (weights @ sums) / (weights @ counts), sums.sum() / counts.sum()
    share = (means < mean).mean() + 0.5 * (means == mean).mean()
    bias = noninferiority.NORMAL.inv_cdf(min(max(share, 1 / draws), 1 - 1 / draws))
    left_out = (sums.sum() - sums) / (counts.sum() - counts)
    bend = left_out.mean() - left_out
    spread = (bend**2).sum() ** 1.5
    acceleration = (bend**3).sum() / (6 * spread) if spread > 1e-30 else 0.0
    shifted = bias - QUANTILE
    level = noninferiority.NORMAL.cdf(bias + shifted / (1 - acceleration * shifted))
    return bool(np.quantile(means, level) > -MARGIN)


def verdicts(rng: np.random.Generator, setting: Setting, drop: float, runs: int) -> dict:
    """Measure the rates of verdicts over simulated evaluations with one true drop."""
    passes = fails = covered = resampled = 0
    for run in range(runs):
        data = draw(rng, setting, drop)
        mean = MeanDifference(*data)
        judged = noninferiority.verdict(mean, MARGIN, LEVEL)
        passes += judged == "pass"
        fails += judged == "fail"
        if drop == MARGIN:
            covered += judged == "inconclusive"
        else:
            covered += (mean.p_at_most(-drop) if mean.mean > -drop else mean.p_at_least(-drop)) >= NOMINAL
        if drop == MARGIN and run < RESAMPLED:
            resampled += bootstrap_passes(rng, data)
    rates = {
        "setting": str(setting),
        "drop": drop,
        "pass": passes / runs,
        "fail": fails / runs,
        "coverage": covered / runs,
    }
    return rates | ({"bootstrap_pass": resampled / min(runs, RESAMPLED)} if drop == MARGIN else {})


def power_at_detectable(rng: np.random.Generator, setting: Setting, runs: int) -> float:
    """Share of evaluations that show a drop as large as an evaluation of a lossless candidate said was detectable."""
    shown = 0
    for _ in range(runs):
        drop = noninferiority.detectable(MeanDifference(*draw(rng, setting, 0.0)), LEVEL)
        shown += MeanDifference(*draw(rng, setting, drop)).p_at_least(0.0) < NOMINAL
    return shown / runs


def decided_with_needed(rng: np.random.Generator, setting: Setting, runs: int) -> float | None:
    """Share of evaluations with the `needed` samples that decide, if the world is exactly as an inconclusive one saw it.

    None where hardly any evaluation is inconclusive.
    """
    decided = done = 0
    for _ in range(20 * runs):
        if done == runs:
            break
        data = draw(rng, setting, rng.choice([0.0, 0.03]))
        mean = MeanDifference(*data)
        if noninferiority.verdict(mean, MARGIN, LEVEL) != "inconclusive":
            continue
        needed = noninferiority.needed(mean, MARGIN, LEVEL)
        if not needed or needed > 20_000:
            continue
        done += 1
        right = "pass" if mean.mean > -MARGIN else "fail"
        starts = np.flatnonzero(np.diff(data[1], prepend=-1))
        blocks = np.split(data[0], starts[1:])
        mean_size = len(data[0]) / len(blocks)
        picked = [blocks[i] for i in rng.integers(0, len(blocks), math.ceil(needed / mean_size))]
        again = np.concatenate(picked), np.repeat(np.arange(len(picked)), [len(b) for b in picked])
        decided += noninferiority.verdict(MeanDifference(*again), MARGIN, LEVEL) == right
    return decided / done if done >= runs / 4 else None


def few_images(rng: np.random.Generator, runs: int, images: int, questions: int, margin: float) -> dict:
    """Rates of wrong verdicts on few images if the drop is the margin, by what is lost: answers here and there, or all of an
    image, each without other changes and with as many wins and losses more in 2% of the answers."""
    names = np.repeat(np.arange(images), questions)
    worst = {"pass": 0.0, "fail": 0.0}
    for whole, churn in product((False, True), (0.0, 0.02)):
        rows = []
        for _ in range(runs):
            fate, change = rng.random((2, len(names)))
            lost = (rng.random(images)[names] if whole else fate) < margin
            d = np.where(lost, -1.0, np.where(change < churn, -1.0, np.where(change < 2 * churn, 1.0, 0.0)))
            rows.append(noninferiority.verdict(MeanDifference(d, names), margin, LEVEL))
        worst = {name: max(rate, rows.count(name) / runs) for name, rate in worst.items()}
    lossless = noninferiority.verdict(MeanDifference(np.zeros(len(names)), names), margin, LEVEL)
    low = MeanDifference(np.zeros(len(names)), names).limits(LEVEL)[0]
    return {
        "images": images,
        "questions": questions,
        "margin": margin,
        **worst,
        "lossless": lossless,
        "rules_out": -low,
    }


def images_needed(rng: np.random.Generator, margin: float, questions: int) -> int | None:
    """Images with which a candidate passes in four of five evaluations if it loses a quarter of the margin, and half a margin
    more of its answers get better and as many get worse, one by one: what `needed` says of 20,000 images."""
    names = np.repeat(np.arange(20_000), questions)
    fate = rng.permutation(len(names)) / len(names)
    d = np.where(fate < 0.75 * margin, -1.0, np.where(fate < 1.25 * margin, 1.0, 0.0))
    needed = noninferiority.needed(MeanDifference(d, names), margin, LEVEL)
    return needed and math.ceil(needed / questions)


def false_families(rng: np.random.Generator, runs: int, count: int = 10, margin: float = 0.05) -> dict[str, float]:
    """Rates of false verdicts over ten families of 150 samples: any failing with all at the margin, all passing with one."""
    any_fails = all_pass = 0
    setting = Setting("right/wrong", 150, True, 0.5, 0.01)
    for _ in range(runs):
        for drops in ([margin] * count, [margin] + [0.0] * (count - 1)):
            groups = {}
            for i, drop in enumerate(drops):
                d, images = draw(rng, setting, drop)
                groups[str(i)] = (
                    np.where(d > 0, 0.0, 1.0).tolist(),
                    np.where(d < 0, 0.0, 1.0).tolist(),
                    images.tolist(),
                )
            verdicts = [family.verdict for family in families(groups, margin=margin).values()]
            if drops[-1]:
                any_fails += "fail" in verdicts
            else:
                all_pass += set(verdicts) == {"pass"}
    return {"any_fails": any_fails / runs, "all_pass": all_pass / runs}


def settings(quick: bool) -> Iterator[Setting]:
    """List the settings that are simulated."""
    images = [(False, 0.0), (True, 0.0), (True, 0.7)]
    if quick:
        yield Setting("right/wrong", 300, True, 0.7, 0.02)
        yield Setting("thirds", 300, False, 0.0, 0.02)
        return
    for kind, n, (shared, together), churn in product(MAGNITUDES, (300, 1000, 3000), images, (0.0, 0.02)):
        yield Setting(kind, n, shared, together, churn)


def summarise(rows: list[dict]) -> dict[str, float]:
    """Compute the worst and the mean rates of false verdicts."""
    wrong_pass = [row["pass"] for row in rows if row["drop"] >= MARGIN]
    wrong_fail = [row["fail"] for row in rows if row["drop"] <= MARGIN]
    coverage = [row["coverage"] for row in rows]
    at = [row for row in rows if row["drop"] == MARGIN]
    return {
        "false_pass_worst": max(wrong_pass),
        "false_pass_at_margin": sum(row["pass"] for row in at) / len(at),
        "false_fail_worst": max(wrong_fail),
        "false_fail_at_margin": sum(row["fail"] for row in at) / len(at),
        "false_fail_no_drop_worst": max(row["fail"] for row in rows if row["drop"] == 0),
        "coverage_worst": min(coverage),
        "coverage_mean": sum(coverage) / len(coverage),
        "bootstrap_false_pass_worst": max(row["bootstrap_pass"] for row in at),
        "bootstrap_false_pass_at_margin": sum(row["bootstrap_pass"] for row in at) / len(at),
    }


def markdown(rows: list[dict]) -> str:
    """Render the docs' table: verdicts by true drop, the mean over settings and the worst of those that should be rare."""
    lines = [
        "| true loss, points | one question an image: passes | fails | several questions an image: passes | fails |",
        "|---|---|---|---|---|",
    ]
    for drop in DROPS:
        cells = ["1, the margin: both are wrong" if drop == MARGIN else f"{100 * drop:g}"]
        for shared in (False, True):
            chosen = [row for row in rows if row["drop"] == drop and ("one a picture" not in row["setting"]) == shared]
            for verdict, wrong in (("pass", drop >= MARGIN), ("fail", drop <= MARGIN)):
                rates = [100 * row[verdict] for row in chosen] or [math.nan]
                worst = f" ({max(rates):.1f}%)" if wrong else ""
                cells.append(f"{sum(rates) / len(rates):.1f}%{worst}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(rng: np.random.Generator, runs: int) -> tuple[list[dict], dict[str, list[int | None]]]:
    """Simulate few images and the images that a verdict takes, and print both as the docs' tables."""
    few = [few_images(rng, runs, *case) for case in FEW]
    print(
        "| images, questions of each | margin, points | wrong passes | wrong fails | no answer changed |\n|---|---|---|---|---|"
    )
    for row in few:
        verdict = "pass" if row["lossless"] == "pass" else "can't tell"
        print(
            f"| {row['images']}, {row['questions']} | {100 * row['margin']:g} | {row['pass']:.1%} | {row['fail']:.1%} "
            f"| {verdict}: a loss of {100 * row['rules_out']:.1f} points is ruled out |"
        )
    needed = {
        f"{100 * margin:g}": [
            noninferiority.min_images_to_pass(margin, LEVEL),
            *(images_needed(rng, margin, each) for each in (1, 4)),
        ]
        for margin in MARGINS
    }
    print(
        "\n| margin, points | nothing changed | some changed, 1 question an image | some changed, 4 questions an image |"
    )
    print("|---|---|---|---|")
    for margin, (least, alone, shared) in needed.items():
        print(f"| {margin} | {least:,} | about {alone:,} | about {shared:,} |")
    print(flush=True)
    return few, needed


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few settings, few runs")
    parser.add_argument("--runs", type=int, help="simulated evaluations per setting and drop; default 1000, quick 200")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    runs, rng = args.runs or (200 if args.quick else 1000), np.random.default_rng(args.seed)
    rows, power = [], {}
    print(f"{'setting':64} {'drop':>5} {'pass':>6} {'fail':>6} {'covers':>7} {'bootstrap pass':>15}")
    for setting in settings(args.quick):
        for drop in DROPS:
            row = verdicts(rng, setting, drop, runs)
            rows.append(row)
            resampled = f"{row['bootstrap_pass']:15.1%}" if "bootstrap_pass" in row else ""
            rates = f"{row['pass']:6.1%} {row['fail']:6.1%} {row['coverage']:7.1%} {resampled}"
            print(f"{row['setting']:64} {100 * drop:5.1f} {rates}".rstrip(), flush=True)
    print(f"\n{markdown(rows)}\n", flush=True)
    few, images = tables(rng, runs)
    for setting in [s for s in settings(args.quick) if s.n < 3000]:
        both = power_at_detectable(rng, setting, runs // 2), decided_with_needed(rng, setting, runs // 5)
        power[str(setting)] = both
        decided = "hardly any is undecided" if both[1] is None else f"decided with the needed {both[1]:.0%}"
        print(f"{setting!s:64} shown at the detectable drop {both[0]:.0%}, {decided}", flush=True)
    by_family = false_families(rng, runs // 5)
    print(f"ten families: any fails falsely {by_family['any_fails']:.1%}, all pass falsely {by_family['all_pass']:.1%}")
    detectable = [shown for shown, _ in power.values()]
    needed = [decided for _, decided in power.values() if decided is not None]
    summary: dict = {"runs": runs, "evaluations": runs * len(rows), "nominal": NOMINAL, **summarise(rows)}
    summary |= {"few_images": few, "images_needed": images}
    summary |= {"power_at_detectable": [min(detectable), float(np.mean(detectable)), max(detectable)]}
    summary |= {"decided_with_needed": [min(needed), float(np.mean(needed)), max(needed)], "families": by_family}
    print(json.dumps(json.loads(json.dumps(summary), parse_float=lambda text: round(float(text), 4))))


if __name__ == "__main__":
    main()
