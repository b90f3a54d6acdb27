"""Numbers, names and sentences of a report, as text without markup; `typeset` gives it true minus signs for a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from vlmcompress.evaluation.results import Bench, Comparison, Ratio, Results, Scored, Suite, Verdict
from vlmcompress.utils.text import figures, points, times

VERDICTS: dict[Verdict, str] = {"pass": "pass", "fail": "fail", "inconclusive": "can't tell"}
MODES = {"serve": "served"}
TIMES = (
    "TTFT: time to first token. ITL: time between tokens. TPOT: mean time per output token. E2E: time to last token."
)
_METRICS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "goodput": "requests/s within the SLO",
}
WEAK, MISSING = 0.3, 0.1
"""A baseline with a lower score, or a larger share of missing answers, is in doubt itself."""
_WORST: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    """The text without control characters, which model answers may contain but XML and HTML cannot."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def typeset(text: str) -> str:
    """The text with true minus and multiplication signs, for a page."""
    return re.sub(r"(?<=\d)x\b", "\N{MULTIPLICATION SIGN}", re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", text))


def percent(share: float) -> str:
    """A share as a percentage: `0.9633` as `96.3%`."""
    return f"{100 * share:.1f}%"


def recovery(c: Comparison) -> str:
    """The candidate's score as a share of the baseline's: `99.2%`; empty if the baseline's is zero."""
    return percent(c.candidate / c.baseline) if c.baseline else ""


def margin(share: float) -> str:
    """An allowed loss: `1 point`, `0.5 points`."""
    return "1 point" if (text := f"{100 * share:.4g}") == "1" else f"{text} points"


def interval(c: Comparison) -> str:
    """A confidence interval: `95% interval -0.9 to +0.3`."""
    return f"{c.level:.0%} interval {points(c.low)} to {points(c.high)}"


def difference_text(c: Comparison) -> str:
    """A difference in points and its interval: `-0.2 (-0.9 to +0.3)`."""
    return f"{points(c.difference)} ({points(c.low)} to {points(c.high)})"


def pace(r: Ratio) -> str:
    """A change of speed: `1.40x faster`, `1.25x slower`, or `can't tell (1.10x)` if it may be chance."""
    middle = r.gain
    if not comparable(r):
        return "not comparable"
    if unclear(r):
        return f"can't tell ({times(middle)})"
    return f"{times(middle)} faster" if middle > 1 else f"{times(1 / middle)} slower"


def spread(r: Ratio) -> str:
    """The extremes of the repeats, in the direction that `pace` names: `1.31x to 1.46x`; empty for one repeat."""
    if not comparable(r) or r.low == r.high:
        return ""
    ends = [r.low, r.high]
    if r.gain < 1 and not unclear(r):
        ends = [1 / end for end in ends]
    return f"{times(min(ends))} to {times(max(ends))}"


def comparable(r: Ratio) -> bool:
    """Whether both sides had a good request; otherwise the ratio is zero or undefined."""
    return all(0 < gain < math.inf for gain in (r.low, r.gain, r.high))


def unclear(r: Ratio) -> bool:
    """Whether a change may be chance: its 95% interval contains 1, there is no interval, or the ratio rounds to 1."""
    # "1.00x faster" would say nothing, however narrow the interval.
    if r.interval is None or f"{r.gain:.2f}" == "1.00":
        return True
    low, high = r.interval
    return not (low > 1 and r.gain > 1 or high < 1 and r.gain < 1)


def metric_name(name: str) -> str:
    """A metric's name: `ttft_p50_ms` as `TTFT median, ms`; `TIMES` explains the capitals."""
    first, _, rest = name.removesuffix("_ms").partition("_")
    if name in _METRICS or first not in _METRICS:
        return _METRICS.get(name) or name.replace("_", " ")
    return f"{_METRICS[first]} {'median' if rest == 'p50' else rest}, ms"


def load_text(bench: Bench) -> str:
    """A benchmark's load: `closed:8` as `8 clients at once`."""
    kind, _, number = bench.load.partition(":")
    clients = "one client" if number == "1" else f"{number} clients at once"
    return {"closed": clients, "rate": f"{number} requests per second, arriving at random"}.get(kind, bench.load)


def verdict_text(c: Comparison) -> str:
    """A verdict in a sentence or two: what the interval shows about the margin, and what would decide otherwise."""
    change, limit = f"{points(c.difference)} points ({interval(c)})", margin(c.margin)
    lost = ""  # graded scores have no counts of answers
    if c.baseline_only is not None and c.candidate_only is not None:
        won = f"{c.candidate_only:,}" if c.candidate_only else "none"
        lost = f"; {c.baseline_only:,} answer{'s' * (c.baseline_only > 1)} lost, {won} won"
        lost = lost if c.baseline_only else f"; no answer lost, {won} won"
    if c.verdict == "fail":
        return f"A loss of more than {limit} is shown: {change}{lost}."
    if c.verdict == "inconclusive":
        unclear = f"Can't tell if {limit} or more {'was' if limit == '1 point' else 'were'} lost: {change}{lost}."
        if not c.sensitive:
            return (
                f"{unclear} The baseline scores {percent(c.baseline)} of {c.n:,} samples, too little for a loss of {limit} to "
                "show; look at its answers, and score them by what they say (--score)."
            )
        if not c.missing:
            return f"{unclear} {c.n:,} samples show a drop of {100 * c.detectable:.1f} points four times in five."
        count = f"{c.n:,} were asked"
        if c.clusters < c.n:
            count = (
                f"{c.n:,} samples about {c.clusters:,} images were asked, and samples of an image may be lost together "
                f"(design effect {c.design_effect:.1f})"
            )
        large = (
            f" One image has {percent(c.largest / c.n)} of the samples and may lose them all: {(c.needed or 0) / c.n:,.1f} "
            "times as many images of every size, or fewer samples about each, would rule that out."
        )
        return f"{unclear} About {c.missing:,} more {c.unit} would decide it; {count}.{large * c.heavy}"
    # It passed: whether accuracy fell a little, rose, or neither is shown decides the words, not the verdict.
    ruled = f"a loss of {limit} or more is ruled out"
    if c.high < 0:
        return f"Some accuracy was lost, but {ruled}: {change}{lost}."
    if c.low > 0:
        return f"Accuracy rose: {change}{lost}."
    return f"{ruled.capitalize()}: {change}{lost}."


def doubt(suite: Suite) -> list[str]:
    """A sentence on a baseline whose own answers are mostly wrong or often missing, so that the verdict means little."""
    baseline, missing = suite.overall.baseline, suite.empty[0] + suite.unfinished[0] + suite.refused[0]
    reasons = [f"scores {percent(baseline)}"] * (baseline < WEAK)
    reasons += [f"gives no answer to {percent(missing / suite.samples)}"] * (missing > MISSING * suite.samples)
    if not reasons:
        return []
    remedy = "check the prompt or --score" + ", or raise --max-tokens" * bool(suite.cut_off[0] or suite.unfinished[0])
    return [f"The verdict means little, as the baseline itself {' and '.join(reasons)} of the samples: {remedy}."]


def gained(c: Comparison) -> list[str]:
    """A sentence on a gain of more than the margin, as a sign of a broken baseline, if one is shown. The verdict stays."""
    if c.low <= c.margin:
        return []
    return [
        f"Suspiciously better: a gain of more than {margin(c.margin)} is shown, which compression does not explain; look for "
        "a fault of the baseline in its answers, prompt, engine or token limit."
    ]


def calibrated(suite: Suite) -> list[str]:
    """A sentence on samples with images that the candidate was calibrated on, if there are any."""
    # None is unknown (another tool's checkpoint), 0 is none; neither needs a sentence.
    if not suite.calibrated:
        return []
    return [
        f"The candidate was calibrated on images of {suite.calibrated:,} of the {suite.samples:,} samples, so that it may lose "
        "more on others: calibrate on other images, or ask about others."
    ]


def worst(verdicts: list[Verdict]) -> Verdict:
    """The worst of some verdicts: fail, then inconclusive, then pass."""
    return min(verdicts, key=_WORST.index)


def tally(verdict: Verdict, parts: list[Verdict]) -> str:
    """A verdict with the counts of its parts: `fail (1 fail, 2 pass)`."""
    return f"{VERDICTS[verdict]} ({', '.join(f'{n} {VERDICTS[v]}' for v in _WORST if (n := parts.count(v)))})"


def glossary(results: Results) -> str:
    """A line that explains the terms of a report."""
    lines = [f"Candidate: {results.candidate.name}. Baseline: {results.baseline.name}, which it is compared with"]
    if results.suites:
        lines.append("A point is one answer in a hundred")
        if any(suite.families for suite in results.suites):
            lines.append("A family is a group of questions of one kind")
        level = 100 * results.suites[0].overall.level
        lines.append(f"The {level:.0f}% interval holds the true difference in {level:.0f} of 100 such comparisons")
    return ". ".join(lines) + "."


def tokens(suite: Suite) -> list[str]:
    """The prompt tokens before and after if they differ, as a list of at most one sentence."""
    before, after = suite.prompt_tokens
    if before == after or not before or not after:
        return []
    text = f"{figures(before / suite.samples)} tokens a request before, {figures(after / suite.samples)} after"
    if suite.visual_tokens is not None:
        old, new = suite.visual_tokens
        visual = f"{figures(old / suite.samples)} and {figures(new / suite.samples)} of them visual"
        text += f"; {visual}, {new / max(old, 1):.1%} of which are left"
    return [f"Prompts: {text}."]


def agreement(suite: Suite) -> list[str]:
    """Sentences on how far the answers and the first tokens' distributions of both sides agree."""
    lines = [f"Both gave the same answer to {percent(suite.agreement)} of the samples."]
    if d := suite.divergence:
        lines.append(
            f"Both favoured the same first token in {percent(d.same_first)} of {d.n:,} samples; its distribution moved by "
            f"{figures(d.mean)} nats on average, {figures(d.median)} in the median, {figures(d.p95)} at the 95th "
            "percentile (Kullback-Leibler)."
        )
    return lines


def refused(suite: Suite, samples: Sequence[Scored]) -> list[str]:
    """A sentence on the samples that a side could not answer, with reasons; at most the first 20."""
    if not any(suite.refused):
        return []
    named = [
        (s.id, s.baseline_refused or s.candidate_refused) for s in samples if s.baseline_refused or s.candidate_refused
    ]
    parts = [f"{identity} ({why})" for identity, why in named[:20]]
    parts += [f"and {len(named) - 20} others"] if len(named) > 20 else []
    return [f"Counted as wrong, as they were not answered: {'; '.join(parts)}."]


def accuracy_method(suite: Suite) -> str:
    """How a suite's figures were made, for the foot of a report."""
    c = suite.overall
    count = f"{suite.samples:,}" + f" of {suite.available:,}" * (suite.samples < suite.available)
    effect = f"(design effect {c.design_effect:.2f})"
    clusters = f", with images as observations, as samples of an image may be lost together {effect}"
    sentences = [
        f"{suite.name}: both sides answered the same {count} samples about {c.clusters:,} images (seed {suite.seed}), "
        f"at most {suite.max_tokens} tokens each; metric {suite.metric}",
        suite.scoring.rstrip("."),
        "Samples without an id go by a hash of their content" * suite.derived_ids,
        f"Intervals of the paired difference are by Gaffke's bounds{clusters * (c.clusters < c.n)}; p = {c.p:.3g}",
        "A family counts as failed only after correction for the number of families (Holm)"
        * any(family.adjusted_p is not None for family in suite.families.values()),
        f"A true drop of {100 * c.detectable:.1f} points would be seen four times in five",
    ]
    return ". ".join(sentence for sentence in sentences if sentence) + "."


def speed_method(bench: Bench) -> str:
    """How a benchmark's figures were made, for the foot of a report."""
    order = " ".join(side[0].upper() for side in bench.order)
    return (
        f"Speed: {bench.requests:,} requests a burst with {bench.out_tokens} output tokens each, {load_text(bench)}, "
        f"{bench.repeats} repeat{'s' * (bench.repeats > 1)}, sides interleaved ({order}), load from {bench.tool}. Cold: "
        "caches off, every image new. Warm: caches on, images repeated. Ratios are medians of the paired repeats, followed "
        "by their extremes. Faster or slower is said where the 95% interval of the ratio (Student's t on the logarithms of "
        "the repeats') leaves out 1; else the repeats can't tell, nor can a single one."
    )
