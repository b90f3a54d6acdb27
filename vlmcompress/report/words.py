"""Numbers and verdicts in plain English. Everything here is text without markup; minus signs are hyphens."""

from __future__ import annotations

import math
import re

from vlmcompress.results import Bench, Comparison, Ratio, Results, Suite, Verdict

VERDICTS: dict[Verdict, str] = {"pass": "pass", "fail": "fail", "inconclusive": "can't tell"}
_WORST: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")
MODES = {"serve": "served", "offline": "offline"}
TIMES = (
    "TTFT: time to first token. ITL: time between tokens. TPOT: mean time per output token. E2E: time to last token."
)
_METRICS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "request_throughput": "requests per second",
    "output_throughput": "output tokens per second",
    "goodput": "requests per second within the SLO",
}


def points(share: float, digits: int = 1) -> str:
    """`-0.013` as `-1.3`; nothing as `0.0`, without a sign."""
    text = f"{100 * share:+.{digits}f}"
    return text if float(text) else text[1:]


def typeset(text: str) -> str:
    """With true minus and multiplication signs, for a page."""
    return re.sub(r"(?<=\d)x\b", "\N{MULTIPLICATION SIGN}", re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", text))


def percent(share: float) -> str:
    """`0.9633` as `96.3%`."""
    return f"{100 * share:.1f}%"


def size(count: float) -> str:
    """Bytes in decimal units, three figures: `4.10 MB`."""
    units = iter(("kB", "MB", "GB", "TB"))
    unit = "B"
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{figures(count) if unit != 'B' else int(count)} {unit}"


def figures(value: float) -> str:
    """Three significant figures, thousands with commas: `0.0123`, `12.0`, `1,234`; tiny ones as `1.2e-5`."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-12)
    if exponent < -3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.{max(0, 2 - exponent)}f}"


def brief(value: float) -> str:
    """As few figures as a round number needs: `0.5`, `1e-5`, `1,000`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}".replace("e-0", "e-")


def times(ratio: float) -> str:
    """A ratio: `1.42x`."""
    return f"{ratio:.2f}x"


def interval(c: Comparison) -> str:
    """`95% interval -0.9 to +0.3`."""
    return f"{c.level:.0%} interval {points(c.low)} to {points(c.high)}"


def verdict(c: Comparison) -> str:
    """One or two sentences: what the interval says about the margin, and what would decide if it says nothing."""
    change, margin = points(c.difference), f"{100 * c.margin:.1f}"
    if c.verdict == "fail":
        return f"Accuracy was lost: {change} points ({interval(c)}); the margin is {margin}."
    if c.verdict == "inconclusive":
        unclear = f"Can't tell: {change} points, and the {interval(c)} reaches past the margin of {margin}."
        if c.needed:
            return f"{unclear} About {c.needed:,} samples would decide it, {c.n:,} were asked."
        return f"{unclear} {c.n:,} samples show a drop of {100 * c.detectable:.1f} points four times in five."
    if c.high < 0:
        return f"Accuracy fell a little, within the margin of {margin}: {change} points ({interval(c)})."
    if c.low > 0:
        return f"Accuracy rose: {change} points ({interval(c)})."
    return f"No accuracy was lost: {change} points, {interval(c)}, margin {margin}."


def pace(r: Ratio) -> str:
    """`1.40x faster`, `1.25x slower`, or `no clear change` where the repeats disagree on which."""
    middle = gain(r, r.ratio)
    if unclear(r):
        return "no clear change"
    return f"{times(middle)} faster" if middle > 1 else f"{times(1 / middle)} slower"


def spread(r: Ratio) -> str:
    """The extremes of the repeats, in the direction that `pace` names: `1.31x to 1.46x`."""
    ends = [gain(r, r.low), gain(r, r.high)]
    if gain(r, r.ratio) < 1 and not unclear(r):
        ends = [1 / end for end in ends]
    return f"{times(min(ends))} to {times(max(ends))}"


def unclear(r: Ratio) -> bool:
    """Whether some repeat was faster and another slower, or the median changed by less than can be written."""
    return min(r.low, r.high) < 1 < max(r.low, r.high) or f"{r.ratio:.2f}" == "1.00"


def gain(r: Ratio, ratio: float) -> float:
    """A ratio turned so that more is better."""
    return ratio if r.higher_is_better else 1 / ratio if ratio else 1.0


def metric(name: str) -> str:
    """`ttft_p50_ms` as `TTFT median, ms`; `TIMES` says what the capitals mean."""
    first, _, rest = name.removesuffix("_ms").partition("_")
    if name in _METRICS or first not in _METRICS:
        return _METRICS.get(name) or name.replace("_", " ")
    return f"{_METRICS[first]} {'median' if rest == 'p50' else rest}, ms"


def load(bench: Bench) -> str:
    """`closed:8` as `8 clients at once`."""
    kind, _, number = bench.load.partition(":")
    known = {"closed": f"{number} clients at once", "rate": f"{number} requests per second, arriving at random"}
    return known.get(kind, bench.load)


def main_speed(bench: Bench) -> tuple[str, Ratio] | None:
    """The speed that stands for a benchmark: served and cold if it was measured, requests per second before latency."""
    for mode in ("serve", "offline"):
        for state in ("cold", "warm"):
            found = bench.summary.get(mode, {}).get(state, {})
            rate = [n for n, r in found.items() if r.higher_is_better and "goodput" not in n and "token" not in n]
            for name in (*rate, "e2e_p50_ms", *found):
                if name in found:
                    return f"{metric(name).removesuffix(', ms')}, {MODES[mode]}, {state}", found[name]
    return None


def worst(verdicts: list[Verdict]) -> Verdict:
    """Fail before inconclusive before pass."""
    return min(verdicts, key=_WORST.index)


def overall(results: Results) -> Verdict | None:
    """The gate's verdict; without a gate the worst of the suites'; None if nothing was judged."""
    if results.gate:
        return results.gate.verdict
    return worst([suite.overall.verdict for suite in results.suites]) if results.suites else None


def headline(results: Results) -> list[str]:
    """What someone who reads one paragraph should know, a sentence each."""
    lines = []
    if gate := results.gate:
        counts = [f"{n} {VERDICTS[v]}" for v in _WORST if (n := sum(rule.verdict == v for rule in gate.rules))]
        lines.append(f"Gate {gate.name}: {VERDICTS[gate.verdict]} ({', '.join(counts)}).")
    for suite in results.suites:
        lines.append(f"{suite.name}: {verdict(suite.overall)}" if len(results.suites) > 1 else verdict(suite.overall))
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after:
        lines.append(f"Weights are {smaller(before, after)} ({size(before)} to {size(after)}).")
    if results.bench and (found := main_speed(results.bench)):
        lines.append(f"{found[0].capitalize()}: {pace(found[1])} ({spread(found[1])}).")
    return lines


def smaller(before: int, after: int) -> str:
    """`1.96x smaller`."""
    return f"{times(before / after)} smaller" if after <= before else f"{times(after / before)} larger"


def changes(suite: Suite) -> list[str]:
    """How far the answers agree, and the first tokens' distributions."""
    lines = [f"Both gave the same answer to {percent(suite.agreement)} of the samples."]
    if d := suite.divergence:
        lines.append(
            f"Both favoured the same first token in {percent(d.same_first)} of {d.n:,} samples; its distribution moved by "
            f"{figures(d.mean)} nats on average, {figures(d.median)} in the median, {figures(d.p95)} at the 95th "
            "percentile (Kullback-Leibler)."
        )
    return lines


def trouble(suite: Suite) -> list[tuple[str, tuple[int, int]]]:
    """Counts (baseline, candidate) of answers that are suspect in themselves."""
    return [
        ("no answer found in the text", suite.unparsed),
        ("empty answers", suite.empty),
        (f"cut off at {suite.max_tokens} tokens", suite.cut_off),
    ]


def method(results: Results) -> list[str]:
    """How the figures were made, for the foot of a report."""
    lines = []
    for suite in results.suites:
        c = suite.overall
        asked = (
            f"{suite.samples:,}" if suite.samples == suite.available else f"{suite.samples:,} of {suite.available:,}"
        )
        how = {"tango": "Tango's score interval", "bootstrap": "a bootstrap over images"}[c.method]
        wide = f", widened for samples that share an image (design effect {c.design_effect:.2f})"
        corrected = any(f.adjusted_p is not None for f in suite.families.values())
        lines.append(
            f"{suite.name}: both sides answered the same {asked} samples about {c.clusters:,} images (seed {suite.seed}), "
            f"at most {suite.max_tokens} tokens each; metric {suite.metric}."
            + (f" {suite.scoring.rstrip('.')}." if suite.scoring else "")
            + f" Intervals of the paired difference are by {how}{wide if c.design_effect > 1.005 else ''}; p = {c.p:.3g}."
            + (" Families are corrected for their number (Holm)." if corrected else "")
            + f" A true drop of {100 * c.detectable:.1f} points would be seen four times in five."
        )
    if bench := results.bench:
        lines.append(
            f"Speed: {bench.requests:,} requests a burst with {bench.out_tokens} output tokens each, {load(bench)}, "
            f"{bench.repeats} repeats, sides interleaved ({' '.join(side[0].upper() for side in bench.order)}), load from "
            f"{bench.tool}. Cold: caches off, every image new. Warm: caches on, images repeated. Ratios are medians of the "
            "paired repeats, followed by their extremes."
        )
    return lines


def memory(results: Results) -> list[tuple[str, str, str]]:
    """Rows (what, baseline, candidate) on memory: weights, and what the benchmark learned of the KV cache."""
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    rows = [("weights", size(before), size(after))] if before and after else []
    found = results.bench.memory if results.bench else {}
    if {"baseline", "candidate"} <= found.keys():
        b, c = found["baseline"], found["candidate"]
        rows += [
            ("KV cache, a token", size(b.kv_bytes_per_token), size(c.kv_bytes_per_token)),
            ("KV cache, a mean request", size(b.kv_bytes_per_request), size(c.kv_bytes_per_request)),
            ("KV cache, all of it", size(b.kv_cache_bytes), size(c.kv_cache_bytes)),
            ("mean requests that fit at once", figures(b.max_concurrency), figures(c.max_concurrency)),
        ]
    return rows
