"""How each kind of gate rule is judged; `gate` has the rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vlmcompress.errors import did_you_mean
from vlmcompress.evaluation.compare import by_family, compare, families, pairs
from vlmcompress.results import Comparison, Results, Rule, Scored, Suite, Verdict

if TYPE_CHECKING:
    from vlmcompress.evaluation.gate import SpeedRule, SuiteRules


def missing(name: str, reason: str, limit: str = "") -> Rule:
    """A rule that nothing was measured for."""
    return Rule(name=name, verdict="inconclusive", value="not measured", limit=limit, reason=reason)


def accuracy(results: Results, suite: Suite, asked: SuiteRules) -> list[Rule]:
    """The rules of one suite: accuracy, its families, and what else the gate asks for."""
    samples = [sample for sample in results.samples if sample.suite == suite.name]
    if not samples:
        return [missing(f"{suite.name}: accuracy", "the results hold no samples of the suite")]
    found = [_drop(f"{suite.name}: accuracy", compare(*pairs(samples), margin=asked.margin))]
    found += _families(suite.name, samples, _margins(samples, asked))
    if suite.samples < asked.minimum:
        reason = f"ask {asked.minimum - suite.samples:,} more"
        found.append(
            _rule(f"{suite.name}: samples", "inconclusive", f"{suite.samples:,}", f"{asked.minimum:,}", reason)
        )
    if asked.unparsed is not None:
        share = suite.unparsed[1] / suite.samples
        limit = f"at most {100 * asked.unparsed:.1f}%"
        found.append(_bound(f"{suite.name}: unparsed answers", share <= asked.unparsed, f"{100 * share:.1f}%", limit))
    if asked.divergence is not None:
        name, limit = f"{suite.name}: divergence", f"at most {asked.divergence:g} nats"
        if suite.divergence is None:
            found.append(missing(name, "the engine reported no probabilities", limit))
        else:
            mean = suite.divergence.mean
            found.append(_bound(name, mean <= asked.divergence, f"{mean:.4f} nats", limit))
    return found


def speed(results: Results, asked: SpeedRule) -> Rule:
    """The rule of one benchmark metric."""
    name, limit = f"speed: {asked.metric}, {asked.mode} {asked.state}", f"at least {asked.at_least:.2f}x"
    metrics = results.bench.summary.get(asked.mode, {}).get(asked.state, {}) if results.bench else {}
    if not metrics:
        return missing(name, f"run vlmcompress bench; there's no {asked.mode} {asked.state} benchmark", limit)
    if asked.metric not in metrics:
        return missing(name, f"no such metric{did_you_mean(asked.metric, metrics)}", limit)
    ratio = metrics[asked.metric]
    middle, low, high = ratio.ratio, ratio.low, ratio.high
    if not ratio.higher_is_better:
        middle, low, high = (1 / value if value > 0 else float("inf") for value in (middle, high, low))
    verdict: Verdict = "pass" if low >= asked.at_least else "fail" if high < asked.at_least else "inconclusive"
    reason = "the repeats disagree; run more, or longer ones" if verdict == "inconclusive" else ""
    return _rule(name, verdict, f"{middle:.2f}x ({low:.2f} to {high:.2f})", limit, reason)


def size(results: Results, most: float) -> Rule:
    """The rule of the size of the weights."""
    limit = f"at most {most:.2f}x"
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if not before or not after:
        return missing("size", "the files of a served model are out of reach", limit)
    return _bound("size", after / before <= most, f"{after / before:.2f}x", limit)


def _families(suite: str, samples: list[Scored], margins: Mapping[str, float]) -> list[Rule]:
    groups = by_family(samples)
    known = {name: group for name, group in groups.items() if name in margins}
    found = families(known, margin=margins) if known else {}
    unknown = [name for name in margins if name not in groups]
    return [_drop(f"{suite}: {name}", one) for name, one in found.items()] + [
        missing(f"{suite}: {name}", f"no such family{did_you_mean(name, groups)}") for name in unknown
    ]


def _margins(samples: list[Scored], asked: SuiteRules) -> dict[str, float]:
    """Family -> margin, for the families that the gate asks for."""
    if isinstance(asked.families, dict):
        return asked.families
    chosen = sorted({s.family for s in samples}) if asked.families == "all" else asked.families
    return {name: asked.family_margin or asked.margin for name in chosen}


def _drop(name: str, found: Comparison) -> Rule:
    value = f"{100 * found.difference:+.1f} points ({100 * found.low:+.1f} to {100 * found.high:+.1f})"
    reason = ""
    if found.verdict == "inconclusive":
        reason = f"{found.n:,} samples can't tell"
        if found.needed and found.needed > found.n:
            reason += f"; about {found.needed:,} would, if the difference stays the same"
    return _rule(name, found.verdict, value, f"-{100 * found.margin:.1f} points", reason)


def _bound(name: str, holds: bool, value: str, limit: str) -> Rule:
    return _rule(name, "pass" if holds else "fail", value, limit)


def _rule(name: str, verdict: Verdict, value: str, limit: str, reason: str = "") -> Rule:
    return Rule(name=name, verdict=verdict, value=value, limit=limit, reason=reason)
