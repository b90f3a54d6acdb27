"""What results say, in sentences and small tables: the same findings go into the page, the summary and the badge."""

from __future__ import annotations

from vlmcompress.report.words import (
    MODES,
    VERDICTS,
    comparable,
    figures,
    interval,
    load,
    metric,
    pace,
    percent,
    points,
    size,
    smaller,
    spread,
)
from vlmcompress.results import Bench, Comparison, Ratio, Results, Suite, Verdict

_WORK = {
    "text_tokens": "text tokens a request",
    "visual_tokens": "visual tokens a request",
    "output_tokens": "output tokens a request",
    "cached_tokens": "prompt tokens from the prefix cache",
    "media_hits": "images from a cache",
    "failed": "failed requests",
}
_WORST: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")


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


def main_speed(bench: Bench) -> tuple[str, Ratio] | None:
    """The speed that stands for a benchmark: served and cold if it was measured, requests per second before latency."""
    for mode in ("serve", "offline"):
        for state in ("cold", "warm"):
            found = bench.summary.get(mode, {}).get(state, {})
            rate = [n for n, r in found.items() if r.higher_is_better and "goodput" not in n and "token" not in n]
            for name in (*rate, "e2e_p50_ms", *found):
                if name in found and comparable(found[name]):
                    return f"{metric(name).removesuffix(', ms')} {MODES[mode]} {state}", found[name]
    return None


def worst(verdicts: list[Verdict]) -> Verdict:
    """Fail before inconclusive before pass."""
    return min(verdicts, key=_WORST.index)


def tally(judged: Verdict, parts: list[Verdict]) -> str:
    """`fail (1 fail, 2 pass)`."""
    counts = [f"{n} {VERDICTS[v]}" for v in _WORST if (n := parts.count(v))]
    return f"{VERDICTS[judged]} ({', '.join(counts)})"


def overall(results: Results) -> Verdict | None:
    """The gate's verdict; without a gate the worst of the suites'; None if nothing was judged."""
    if results.gate:
        return results.gate.verdict
    return worst([suite.overall.verdict for suite in results.suites]) if results.suites else None


def headline(results: Results) -> list[str]:
    """What someone who reads one paragraph should know, a sentence each."""
    lines, several = [], len(results.suites) > 1
    if gate := results.gate:
        lines.append(f"Gate {gate.name}: {tally(gate.verdict, [rule.verdict for rule in gate.rules])}.")
    elif several and (judged := overall(results)):
        lines.append(f"Accuracy: {tally(judged, [suite.overall.verdict for suite in results.suites])}.")
    lines += [f"{suite.name}: " * several + verdict(suite.overall) for suite in results.suites]
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after and before != after:
        lines.append(f"Weights are {smaller(before, after)} ({size(before)} to {size(after)}).")
    lines += [f"{suite.name}: " * several + found for suite in results.suites for found in tokens(suite)]
    if results.bench and (found := main_speed(results.bench)):
        lines.append(f"Speed: {pace(found[1])} ({spread(found[1])}), {found[0]}.")
    return lines


def tokens(suite: Suite) -> list[str]:
    """What prompts cost before and after, where that differs."""
    before, after = suite.prompt_tokens
    if before == after or not before or not after:
        return []
    text = f"{figures(before / suite.samples)} tokens a request before, {figures(after / suite.samples)} after"
    if suite.visual_tokens is not None:
        old, new = suite.visual_tokens
        of = f"{figures(old / suite.samples)} and {figures(new / suite.samples)} of them visual"
        text += f"; {of}, {new / max(old, 1):.1%} of which are left"
    return [f"Prompts: {text}."]


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
    lines = [_accuracy_method(suite) for suite in results.suites]
    if bench := results.bench:
        order = " ".join(side[0].upper() for side in bench.order)
        lines.append(
            f"Speed: {bench.requests:,} requests a burst with {bench.out_tokens} output tokens each, {load(bench)}, "
            f"{bench.repeats} repeats, sides interleaved ({order}), load from {bench.tool}. Cold: caches off, every image "
            "new. Warm: caches on, images repeated. Ratios are medians of the paired repeats, followed by their extremes."
        )
    return lines


def _accuracy_method(suite: Suite) -> str:
    c = suite.overall
    asked = f"{suite.samples:,}" + f" of {suite.available:,}" * (suite.samples < suite.available)
    how = {"tango": "Tango's score interval", "likelihood": "an empirical-likelihood score interval"}[c.method]
    sentences = [
        f"{suite.name}: both sides answered the same {asked} samples about {c.clusters:,} images (seed {suite.seed}), "
        f"at most {suite.max_tokens} tokens each; metric {suite.metric}",
        suite.scoring.rstrip("."),
        "Samples without an id go by a hash of their content" * suite.derived_ids,
        f"Intervals of the paired difference are by {how}"
        + f", widened for samples that share an image (design effect {c.design_effect:.2f})" * (c.design_effect > 1.005)
        + f"; p = {c.p:.3g}",
        "A family fails only if it does after correction for the number of families (Holm)"
        * any(f.adjusted_p is not None for f in suite.families.values()),
        f"A true drop of {100 * c.detectable:.1f} points would be seen four times in five",
    ]
    return ". ".join(sentence for sentence in sentences if sentence) + "."


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


def work(bench: Bench) -> list[tuple[str, str, str]]:
    """Rows (what, baseline, candidate): did both sides do the same work, were caches off when cold, did anything fail."""

    def shown(name: str, side: str, state: str) -> str:
        runs = [run for run in bench.runs if (run.side, run.state) == (side, state)]
        total = sum(getattr(run, name) for run in runs)
        return (
            figures(total / max(1, sum(run.completed for run in runs))) if "a request" in _WORK[name] else f"{total:,}"
        )

    states = dict.fromkeys(run.state for run in bench.runs)
    return [
        (f"{what}, {state}", shown(name, "baseline", state), shown(name, "candidate", state))
        for name, what in _WORK.items()
        for state in states
    ]
