"""Findings of results in sentences and small tables, which the page, the summary and the badge share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vlmcompress.common.text import figures, points, size, smaller
from vlmcompress.report.words import (
    MEASURE,
    MODALITIES,
    MODES,
    OF_WEIGHTS,
    VERDICTS,
    comparable,
    interval,
    load,
    margin,
    metric,
    pace,
    percent,
    spread,
)
from vlmcompress.results import Bench, Comparison, Gate, Ratio, Results, Rule, Suite, Verdict

_WORK = {
    "text_tokens": "text tokens a request",
    "visual_tokens": "visual tokens a request",
    "output_tokens": "output tokens a request",
    "cached_tokens": "prompt tokens from the prefix cache",
    "media_hits": "images from a cache",
    "failed": "failed requests",
}
_WORST: tuple[Verdict, ...] = ("fail", "inconclusive", "pass")


class Row(NamedTuple):
    """A line of a table of accuracy. The margin and verdict in `found` count only if the line is `judged`."""

    name: str
    found: Comparison
    judged: bool


def rows(suite: Suite, gate: Gate | None) -> list[Row]:
    """List all samples together, then the families, each with one verdict at most.

    A line that a rule of the gate judges has that rule's margin and verdict. Families that no rule judges have no verdict;
    all samples together are then judged by the suite's own margin.
    """
    rules = {rule.family: rule for rule in (gate.rules if gate else []) if rule.suite == suite.name}
    families = [Row(name, _by(rules.get(name), c), name in rules) for name, c in suite.families.items()]
    return [Row("all", _by(rules.get(None), suite.overall), True), *families]


def _by(rule: Rule | None, c: Comparison) -> Comparison:
    if rule is None or rule.margin is None:
        return c
    needed = c.needed if rule.margin == c.margin else None
    return c.model_copy(update={"margin": rule.margin, "verdict": rule.verdict, "needed": needed})


def rules(gate: Gate) -> list[Rule]:
    """List a gate's rules, with those of a suite's families merged into one, as `rows` shows each of them."""
    found: list[Rule] = []
    for rule in gate.rules:
        if rule.family is None:
            found.append(rule)
        elif not any(other.suite == rule.suite and other.family is not None for other in found):
            found.append(_together([r for r in gate.rules if r.suite == rule.suite and r.family is not None]))
    return found


def _together(families: list[Rule]) -> Rule:
    if len(families) == 1:
        return families[0]
    verdicts = [rule.verdict for rule in families]
    limits = list(dict.fromkeys(rule.limit for rule in families))
    return families[0].model_copy(
        update={
            "name": f"{families[0].suite}: each of {len(families)} families",
            "verdict": worst(verdicts),
            "value": counted(verdicts),
            "limit": limits[0] if len(limits) == 1 else "a margin each",
            "reason": "each under Accuracy",
        }
    )


def verdict(c: Comparison) -> str:
    """Explain a verdict in a sentence or two: what the interval shows about the margin, and what would decide if nothing."""
    change, limit = f"{points(c.difference)} points ({interval(c)})", margin(c.margin)
    lost = f"; {answers}" if (answers := _answers(c)) else ""
    if c.verdict == "fail":
        return f"A loss of more than {limit} is shown: {change}{lost}."
    if c.verdict == "inconclusive":
        unclear = f"Can't tell if {limit} or more {'was' if limit == '1 point' else 'were'} lost: {change}{lost}."
        if c.missing:
            return f"{unclear} About {c.missing:,} more {c.unit} would decide it; {_asked(c)}."
        return f"{unclear} {c.n:,} samples show a drop of {100 * c.detectable:.1f} points four times in five."
    ruled = f"a loss of {limit} or more is ruled out"
    if c.high < 0:
        return f"Some accuracy was lost, but {ruled}: {change}{lost}."
    if c.low > 0:
        return f"Accuracy rose: {change}{lost}."
    return f"{ruled.capitalize()}: {change}{lost}."


def _asked(c: Comparison) -> str:
    """Write how much was asked, and why samples that share images count for less."""
    if c.clusters == c.n:
        return f"{c.n:,} were asked"
    return (
        f"{c.n:,} samples about {c.clusters:,} images were asked, and samples of an image may be lost together "
        f"(design effect {c.design_effect:.1f})"
    )


def _answers(c: Comparison) -> str:
    """Write `4 answers lost, none won`; empty for graded scores."""
    if c.baseline_only is None or c.candidate_only is None:
        return ""
    lost, won = (f"{n:,}" if n else "none" for n in (c.baseline_only, c.candidate_only))
    if not c.baseline_only:
        return f"no answer lost, {won} won"
    return f"{lost} answer{'s' * (c.baseline_only > 1)} lost, {won} won"


def fallen(suite: Suite, gate: Gate | None) -> list[str]:
    """List families that no rule judges and that lost more than the suite's margin, significant among all families."""
    names = [row.name for row in rows(suite, gate)[1:] if not row.judged and row.found.verdict == "fail"]
    if not names:
        return []
    limit = margin(next(c.margin for c in suite.families.values()))
    return [f"More than {limit} lost, shown after correction for {len(suite.families)} families: {', '.join(names)}."]


def main_speed(bench: Bench) -> tuple[str, Ratio] | None:
    """Choose the speed that stands for a benchmark: served and cold if measured, requests per second before latency."""
    for mode in ("serve", "offline"):
        for state in ("cold", "warm"):
            found = bench.summary.get(mode, {}).get(state, {})
            rate = [n for n, r in found.items() if r.higher_is_better and "goodput" not in n and "token" not in n]
            for name in (*rate, "e2e_p50_ms", *found):
                if name in found and comparable(found[name]):
                    return f"{metric(name).removesuffix(', ms')} {MODES[mode]} {state}", found[name]
    return None


def worst(verdicts: list[Verdict]) -> Verdict:
    """The worst of some verdicts: fail, then inconclusive, then pass."""
    return min(verdicts, key=_WORST.index)


def counted(parts: list[Verdict]) -> str:
    """Count verdicts: `1 fail, 2 pass`."""
    return ", ".join(f"{n} {VERDICTS[v]}" for v in _WORST if (n := parts.count(v)))


def tally(judged: Verdict, parts: list[Verdict]) -> str:
    """Write a verdict with the counts of its parts: `fail (1 fail, 2 pass)`."""
    return f"{VERDICTS[judged]} ({counted(parts)})"


def overall(results: Results) -> Verdict | None:
    """The gate's verdict; without a gate the worst of the suites'; None if nothing was judged."""
    if results.gate:
        return results.gate.verdict
    return worst([suite.overall.verdict for suite in results.suites]) if results.suites else None


def headline(results: Results) -> list[str]:
    """Sum up results for someone who reads one paragraph, as a list of sentences."""
    lines, several = [], len(results.suites) > 1
    if gate := results.gate:
        lines.append(f"Gate {gate.name}: {tally(gate.verdict, [rule.verdict for rule in gate.rules])}.")
    elif several and (judged := overall(results)):
        lines.append(f"Accuracy: {tally(judged, [suite.overall.verdict for suite in results.suites])}.")
    lines += [f"{suite.name}: " * several + verdict(rows(suite, results.gate)[0].found) for suite in results.suites]
    lines += [f"{suite.name}: " * several + line for suite in results.suites for line in fallen(suite, results.gate)]
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after and before != after:
        lines.append(f"Weights are {smaller(before, after)} ({size(before)} to {size(after)}).")
    lines += [f"{suite.name}: " * several + found for suite in results.suites for found in tokens(suite)]
    if results.bench and (found := main_speed(results.bench)):
        repeats = f"{results.bench.repeats} repeats" if results.bench.repeats > 1 else "one repeat"
        ends = f"{extremes} in {repeats}" if (extremes := spread(found[1])) else repeats
        lines.append(f"Speed: {pace(found[1])}, {found[0]} ({ends}).")
    return lines


def glossary(results: Results) -> str:
    """Explain in a line the words that a report uses before its tables do."""
    before, after = results.baseline.name, results.candidate.name
    words = [f"Candidate: {after}. Baseline: {before}, which it is compared with"]
    if results.suites:
        words.append("A point is one answer in a hundred")
        words.append("A family is a group of questions of one kind" * any(suite.families for suite in results.suites))
        level = 100 * results.suites[0].overall.level
        words.append(f"The {level:.0f}% interval holds the true difference in {level:.0f} of 100 such comparisons")
    return ". ".join(word for word in words if word) + "."


def tokens(suite: Suite) -> list[str]:
    """Write the tokens of prompts before and after, where they differ."""
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
    """Write how far the answers and the first tokens' distributions of both sides agree."""
    lines = [f"Both gave the same answer to {percent(suite.agreement)} of the samples."]
    if d := suite.divergence:
        lines.append(
            f"Both favoured the same first token in {percent(d.same_first)} of {d.n:,} samples; its distribution moved by "
            f"{figures(d.mean)} nats on average, {figures(d.median)} in the median, {figures(d.p95)} at the 95th "
            "percentile (Kullback-Leibler)."
        )
    return lines


def trouble(suite: Suite) -> list[tuple[str, tuple[int, int]]]:
    """Count answers that are suspect in themselves (cut off, empty, unparsed), for baseline and candidate."""
    return [
        ("no answer found in the text", suite.unparsed),
        ("empty answers", suite.empty),
        (f"cut off at {suite.max_tokens} tokens", suite.cut_off),
    ]


def method(results: Results) -> list[str]:
    """Explain how the figures were made, for the foot of a report."""
    lines = [_accuracy_method(suite) for suite in results.suites]
    if bench := results.bench:
        order = " ".join(side[0].upper() for side in bench.order)
        repeats = f"{bench.repeats} repeat{'s' * (bench.repeats > 1)}"
        lines.append(
            f"Speed: {bench.requests:,} requests a burst with {bench.out_tokens} output tokens each, {load(bench)}, "
            f"{repeats}, sides interleaved ({order}), load from {bench.tool}. Cold: caches off, every image "
            "new. Warm: caches on, images repeated. Ratios are medians of the paired repeats, followed by their extremes. "
            "Faster or slower is said where the 95% interval of the ratio (Student's t on the logarithms of the repeats') "
            "leaves out 1; else the repeats can't tell, nor can a single one."
        )
    return lines


def _accuracy_method(suite: Suite) -> str:
    c = suite.overall
    asked = f"{suite.samples:,}" + f" of {suite.available:,}" * (suite.samples < suite.available)
    how = {
        "gaffke": "Gaffke's bounds",
        "tango": "Tango's score interval",
        "likelihood": "an empirical-likelihood score interval",
    }[c.method]
    sentences = [
        f"{suite.name}: both sides answered the same {asked} samples about {c.clusters:,} images (seed {suite.seed}), "
        f"at most {suite.max_tokens} tokens each; metric {suite.metric}",
        suite.scoring.rstrip("."),
        "Samples without an id go by a hash of their content" * suite.derived_ids,
        f"Intervals of the paired difference are by {how}"
        + f", with images as observations, as samples of an image may be lost together (design effect {c.design_effect:.2f})"
        * (c.clusters < c.n)
        + f"; p = {c.p:.3g}",
        "A family counts as failed only after correction for the number of families (Holm)"
        * any(f.adjusted_p is not None for f in suite.families.values()),
        f"A true drop of {100 * c.detectable:.1f} points would be seen four times in five",
    ]
    return ". ".join(sentence for sentence in sentences if sentence) + "."


def layers(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Explain what the errors of layers are; "" where there are none."""
    if not errors:
        return ""
    if all(set(error) <= {"weight"} for error in errors.values()):
        return f"{_sentence(OF_WEIGHTS)}, as no calibration data were seen."
    return f"{_sentence(MEASURE)}. {MODALITIES}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def memory(results: Results) -> list[tuple[str, str, str]]:
    """Make rows (what, baseline, candidate) on memory: weights, and the KV cache if the benchmark measured it."""
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
    """Make rows (what, baseline, candidate) on the work done by both sides: tokens, answers from caches, failures."""

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
