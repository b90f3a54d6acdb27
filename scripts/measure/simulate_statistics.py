#!/usr/bin/env python
"""Check by simulated compressions, whose true loss is known, that verdicts are wrong no more often than they may be.

    scripts/measure/simulate_statistics.py --save      54 settings and 15 mixes of sizes, 2,000 evaluations of each kind;
                                                       three hours of one core; writes eval/statistics.json
    scripts/measure/simulate_statistics.py --sizes --save    the mixes of sizes alone; the file keeps the rest
    scripts/measure/simulate_statistics.py --render    prints the docs' tables from that file
    scripts/measure/simulate_statistics.py --quick     a few settings, 200 evaluations each

For every setting (kind of score, samples, images, share of answers that change both ways) and true loss: how often the verdict
at a margin of one point is wrong, and how often the 95% interval holds the truth. A pass is wrong where the loss is the margin
or more, a fail where it's the margin or less; both may happen in 2.5%. The bootstrap's wrong passes stand next to ours. Then:

- images of two sizes, documents with many questions and photos with one, where losses go with size: documents lose all, or
  half, or answers one by one, or photos do, or both; sizes as they are or drawn;
- few images, at margins that so many can just confirm, losing one answer here and there or all answers of an image;
- power at the `detectable` loss and with the `needed` samples (80% each), and wrong verdicts over ten families (2.5%);
- how many images a verdict takes: from the number on at which a candidate that changes nothing passes, and where one that
  loses and wins some answers passes in four of five evaluations.

The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from vlmcompress.evaluation.accuracy import noninferiority
from vlmcompress.evaluation.accuracy.compare import families
from vlmcompress.evaluation.accuracy.paired import MeanDifference

RESULTS = Path(__file__).resolve().parents[2] / "eval" / "statistics.json"
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
IMAGES = ((False, 0.0), (True, 0.0), (True, 0.7))
SETTINGS = [
    Setting(kind, n, shared, together, churn)
    for kind, n, (shared, together), churn in product(MAGNITUDES, (300, 1000, 3000), IMAGES, (0.0, 0.02))
]
QUICK = [Setting("right/wrong", 300, True, 0.7, 0.02), Setting("thirds", 300, False, 0.0, 0.02)]


@dataclass(frozen=True)
class Sizes:
    """Documents of `questions` questions each next to photos of one. `drawn`: each image is a document with the probability
    documents / (documents + photos), so that their number differs from one evaluation to the next."""

    documents: int
    questions: int
    photos: int
    margin: float
    drawn: bool = False

    def __str__(self) -> str:
        images = self.documents + self.photos
        if self.drawn:
            return f"{images:,} images, {self.documents / images:.1%} of them with {self.questions}"
        return f"{self.documents} x {self.questions} + {self.photos:,}"


MIXES = (
    Sizes(10, 20, 800, 0.02),
    Sizes(10, 10, 900, 0.01),
    Sizes(40, 6, 760, 0.01),
    Sizes(20, 10, 800, 0.02),
    Sizes(50, 4, 800, 0.01),
    Sizes(100, 10, 4000, 0.02),
    Sizes(1, 100, 900, 0.05),
    Sizes(40, 5, 760, 0.01, drawn=True),
    Sizes(50, 4, 450, 0.02, drawn=True),
    Sizes(150, 5, 2850, 0.01, drawn=True),
    Sizes(30, 20, 2970, 0.05, drawn=True),
    # few documents, whose number is chance: the margin is what is lost if all of them fail
    Sizes(8, 5, 3992, 0.0099, drawn=True),
    Sizes(12, 4, 3988, 0.0118, drawn=True),
    Sizes(5, 10, 995, 0.0478, drawn=True),
    Sizes(4, 5, 296, 0.0632, drawn=True),
)
LOST = (
    "whole",
    "half",
    "each",
    "photos",
    "both",
)  # documents: all answers, half, one by one; photos; documents and photos


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


def draw_sizes(rng: np.random.Generator, mix: Sizes, lost: str, drop: float, churn: float) -> Data:
    """Differences with a true mean of -drop, of images whose losses go with their size; photos change both ways, too."""
    images = mix.documents + mix.photos
    documents = rng.binomial(images, mix.documents / images) if mix.drawn else mix.documents
    photos = images - documents
    # shares of what documents and photos hold that is lost, from the expected numbers of both
    all_documents, total = mix.documents * mix.questions, mix.documents * mix.questions + mix.photos
    share = drop * total / all_documents if lost not in ("photos", "both") else drop * total / all_documents / 2
    of_documents = 0.0 if lost == "photos" else min(share, 1.0)
    of_photos = {"photos": drop * total / mix.photos, "both": drop * total / mix.photos / 2}.get(lost, 0.0)
    if lost == "each":
        pages = -(rng.random((documents, mix.questions)) < of_documents).astype(float)
    else:
        part = mix.questions // 2 if lost == "half" else mix.questions
        pages = np.zeros((documents, mix.questions))
        pages[:, :part] = -(rng.random((documents, 1)) < min(of_documents * mix.questions / part, 1.0)).astype(float)
    fate = rng.random(photos)
    single = np.where(fate < of_photos + churn, -1.0, np.where(fate < of_photos + 2 * churn, 1.0, 0.0))
    names = np.concatenate([np.repeat(np.arange(documents), mix.questions), documents + np.arange(photos)])
    return np.concatenate([pages.ravel(), single]), names


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


def verdicts(rng: np.random.Generator, setting: Setting, drop: float, runs: int) -> dict[str, Any]:
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
    rates = {**asdict(setting), "drop": drop, "pass": passes / runs, "fail": fails / runs, "coverage": covered / runs}
    return rates | ({"bootstrap_pass": resampled / min(runs, RESAMPLED)} if drop == MARGIN else {})


def of_sizes(rng: np.random.Generator, mix: Sizes, runs: int) -> dict[str, Any]:
    """Wrong passes and wrong fails where the loss is the margin, the worst with and without other changes, by what is lost."""
    wrong: dict[str, dict[str, float]] = {}
    for lost, churn in product(LOST, (0.0, 0.02)):
        if lost == "half" and mix.margin * (1 + mix.photos / (mix.documents * mix.questions)) > 0.5:
            continue  # documents can't lose so much
        judged = [
            noninferiority.verdict(MeanDifference(*draw_sizes(rng, mix, lost, mix.margin, churn)), mix.margin, LEVEL)
            for _ in range(runs)
        ]
        worst = wrong.setdefault(lost, {"pass": 0.0, "fail": 0.0})
        wrong[lost] = {name: max(rate, judged.count(name) / runs) for name, rate in worst.items()}
    return {"images": str(mix), **asdict(mix), "wrong": wrong}


def power_at_detectable(rng: np.random.Generator, setting: Setting, runs: int) -> float:
    """Share of evaluations that show a drop as large as an evaluation of a lossless candidate said was detectable."""
    output = 0
    for _ in range(runs):
        drop = noninferiority.detectable(MeanDifference(*draw(rng, setting, 0.0)), LEVEL)
        output += MeanDifference(*draw(rng, setting, drop)).p_at_least(0.0) < NOMINAL
    return output / runs


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
        needed = noninferiority.samples_needed(mean, MARGIN, LEVEL)
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


def few_images(rng: np.random.Generator, runs: int, images: int, questions: int, margin: float) -> dict[str, Any]:
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
    unchanged = MeanDifference(np.zeros(len(names)), names)
    return {
        "images": images,
        "questions": questions,
        "margin": margin,
        **worst,
        "lossless": noninferiority.verdict(unchanged, margin, LEVEL),
        "rules_out": -unchanged.limits(LEVEL)[0],
    }


def images_needed(rng: np.random.Generator, margin: float, questions: int) -> int | None:
    """Images with which a candidate passes in four of five evaluations if it loses a quarter of the margin, and half a margin
    more of its answers get better and as many get worse, one by one: what `needed` says of 20,000 images."""
    names = np.repeat(np.arange(20_000), questions)
    fate = rng.permutation(len(names)) / len(names)
    d = np.where(fate < 0.75 * margin, -1.0, np.where(fate < 1.25 * margin, 1.0, 0.0))
    needed = noninferiority.samples_needed(MeanDifference(d, names), margin, LEVEL)
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
                before, after = np.where(d > 0, 0.0, 1.0).tolist(), np.where(d < 0, 0.0, 1.0).tolist()
                groups[str(i)] = (before, after, images.tolist())
            judged = [family.verdict for family in families(groups, margin=margin).values()]
            if drops[-1]:
                any_fails += "fail" in judged
            else:
                all_pass += set(judged) == {"pass"}
    return {"any_fails": any_fails / runs, "all_pass": all_pass / runs}


def simulate(settings: Sequence[Setting], mixes: Sequence[Sizes], runs: int, seed: int) -> dict[str, Any]:
    """Simulate everything, and print the rates of each setting as they come."""
    rng = np.random.default_rng(seed)
    rows = []
    print(f"{'setting':64} {'drop':>5} {'pass':>6} {'fail':>6} {'covers':>7} {'bootstrap pass':>15}")
    for setting, drop in product(settings, DROPS):
        row = verdicts(rng, setting, drop, runs)
        rows.append(row)
        resampled = f"{row['bootstrap_pass']:15.1%}" if "bootstrap_pass" in row else ""
        rates = f"{row['pass']:6.1%} {row['fail']:6.1%} {row['coverage']:7.1%} {resampled}"
        print(f"{setting!s:64} {100 * drop:5.1f} {rates}".rstrip(), flush=True)
    sizes = simulate_sizes(rng, mixes, runs)
    output, decided, few = [], [], max(100, runs // 10)
    for setting in [s for s in settings if s.n < 3000]:
        output.append(power_at_detectable(rng, setting, few))
        if (share := decided_with_needed(rng, setting, few // 2)) is not None:
            decided.append(share)
    needed = {
        f"{margin:g}": [
            noninferiority.min_images_to_pass(margin, LEVEL),
            *(images_needed(rng, margin, questions) for questions in (1, 4)),
        ]
        for margin in MARGINS
    }
    return {
        "runs": runs,
        "seed": seed,
        "nominal": NOMINAL,
        "settings": rows,
        "sizes": sizes,
        "few_images": [few_images(rng, runs, *case) for case in FEW],
        "images_needed": needed,
        "power_at_detectable": [min(output), float(np.mean(output)), max(output)],
        "decided_with_needed": [min(decided), float(np.mean(decided)), max(decided)],
        "families": false_families(rng, runs // 5),
    }


def simulate_sizes(rng: np.random.Generator, mixes: Sequence[Sizes], runs: int) -> list[dict[str, Any]]:
    """Simulate evaluations of images of two sizes, and print each mix's rates as they come."""
    rows = []
    for mix in mixes:
        rows.append(of_sizes(rng, mix, runs))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def render(results: Mapping[str, Any]) -> str:
    """The docs' table of verdicts by true loss over the settings, and in words losses that go with size and few images."""
    rows, sizes = results["settings"], results["sizes"]
    graded = len({tuple(row[key] for key in asdict(SETTINGS[0])) for row in rows if row["kind"] != "right/wrong"})
    count = len(rows) // len(DROPS)
    at_margin = [row for row in rows if row["drop"] == MARGIN]
    boot = {
        shared: [100 * row["bootstrap_pass"] for row in at_margin if row["shared"] == shared]
        for shared in (False, True)
    }
    coverage = [row["coverage"] for row in rows]
    lines = [
        f"{count} settings ({count - graded} of right/wrong scores, {graded} of graded ones; 300 to 3,000 samples, one or "
        f"several questions an image), margin one point, {results['runs']:,} simulated evaluations for each true loss; means "
        "over the settings, the worst setting in brackets:",
        "",
        "| true loss, points | one question an image: passes | fails | several questions an image: passes | fails |",
        "|---|---|---|---|---|",
    ]
    for drop in DROPS:
        cells = ["1, the margin: both are wrong" if drop == MARGIN else f"{100 * drop:g}"]
        for shared, (verdict, wrong) in product((False, True), (("pass", drop >= MARGIN), ("fail", drop <= MARGIN))):
            rates = [100 * row[verdict] for row in rows if row["drop"] == drop and row["shared"] == shared]
            cells.append(_mean(rates, wrong))
        lines.append(f"| {' | '.join(cells)} |")
    by_size = [rates for row in sizes for rates in row["wrong"].values()]
    few = results["few_images"]
    (least, middle, most), (fewest, mean, top) = results["power_at_detectable"], results["decided_with_needed"]
    lines += [
        "",
        f"A bootstrap passes the loss of one point in {_mean(boot[False], True)} and {_mean(boot[True], True)}. The 95% "
        f"intervals hold the truth in {min(coverage):.1%} to {max(coverage):.1%}. Where losses go with an image's size "
        f"({len(sizes)} mixes of photos and documents of up to {max(row['questions'] for row in sizes)} questions) at most "
        f"{max(rates['pass'] for rates in by_size):.1%} pass and {max(rates['fail'] for rates in by_size):.1%} fail wrongly; "
        f"with {few[0]['images']} to {few[-1]['images']} images at most {max(row['pass'] for row in few):.1%} and "
        f"{max(row['fail'] for row in few):.1%}. A loss that a report calls detectable is seen in {least:.0%} to {most:.0%} "
        f"({middle:.0%} on average; 80% promised), and the samples that it asks for decide in {fewest:.0%} to {top:.0%} "
        f"({mean:.0%}). Over ten families any fails wrongly in {results['families']['any_fails']:.1%}, all pass wrongly in "
        f"{results['families']['all_pass']:.1%}.",
    ]
    return "\n".join(lines)


def render_images(results: Mapping[str, Any]) -> str:
    """The docs' table of how many images a verdict takes."""
    lines = [
        "| margin, points | nothing changed | some changed, 1 question an image | some changed, 4 questions an image |",
        "|---|---|---|---|",
    ]
    for margin, (least, alone, shared) in results["images_needed"].items():
        lines.append(f"| {100 * float(margin):g} | {least:,} | about {alone:,} | about {shared:,} |")
    return "\n".join(lines)


def _mean(percentages: Sequence[float], worst: bool) -> str:
    """The mean of some percentages, and the largest in brackets."""
    mean = sum(percentages) / len(percentages) if percentages else math.nan
    return f"{mean:.1f}%" + f" ({max(percentages, default=math.nan):.1f}%)" * worst


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="few settings, few runs")
    parser.add_argument("--runs", type=int, help="simulated evaluations per setting and loss; default 2000, quick 200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", action="store_true", help="simulate the mixes of sizes alone; the rest is RESULTS'")
    parser.add_argument("--save", action="store_true", help="write RESULTS")
    parser.add_argument(
        "--render", nargs="?", const="verdicts", choices=("verdicts", "images"), help="print a docs' table"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="default eval/statistics.json")
    args = parser.parse_args()
    if args.render:
        results = json.loads(args.results.read_text())
        print((render_images if args.render == "images" else render)(results))
    else:
        runs = args.runs or (200 if args.quick else 2000)
        chosen = (QUICK, MIXES[:1]) if args.quick else (SETTINGS, MIXES)
        if args.sizes:
            rows = simulate_sizes(np.random.default_rng(args.seed), chosen[1], runs)
            simulated = json.loads(args.results.read_text()) | {"sizes": rows}
        else:
            simulated = simulate(*chosen, runs, args.seed)
        results = json.loads(json.dumps(simulated), parse_float=lambda text: round(float(text), 4))
        print(f"\n{render(results)}\n\n{render_images(results)}")
        if args.save:
            args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
