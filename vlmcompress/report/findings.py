"""What a report on one comparison shows, as data: `text` and `html` lay the same `Findings` out, `files` judges by them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from vlmcompress.common.text import figures, size, smaller
from vlmcompress.evaluation.compare import changed_answers
from vlmcompress.report import words
from vlmcompress.results import Bench, Comparison, Gate, Made, Ratio, Results, Rule, Scored, Side, Suite, Verdict

_WORK = {
    "text_tokens": "text tokens a request",
    "visual_tokens": "visual tokens a request",
    "output_tokens": "output tokens a request",
    "cached_tokens": "prompt tokens from the prefix cache",
    "media_hits": "images from a cache",
    "failed": "failed requests",
}
_PREFIX = {"float": "seen behind unquantized blocks", "quantized": "seen behind quantized blocks"}

BothSides = list[tuple[str, str, str]]  # rows: what, baseline, candidate


class Row(NamedTuple):
    """A line of a table of accuracy. Margin and verdict of `comparison` count only if the line is `judged`."""

    name: str
    comparison: Comparison
    judged: bool


@dataclass(frozen=True)
class SuiteFindings:
    """A suite's accuracy.

    Attributes:
        rows: all samples together, then the families; see `rows`.
        fallen: a sentence on families that fell without a rule of the gate, if there are any.
        notes: sentences on tokens and on how far the answers agree.
        suspect: (what, (of the baseline, of the candidate)): counts of answers that are suspect in themselves.
    """

    suite: Suite
    rows: list[Row]
    fallen: list[str]
    notes: list[str]
    suspect: list[tuple[str, tuple[int, int]]]

    @property
    def overall(self) -> Comparison:
        return self.rows[0].comparison


class SpeedTable(NamedTuple):
    """Metrics of a benchmark in one mode ("serve", "offline") and state ("cold", "warm")."""

    mode: str
    state: str
    metrics: dict[str, Ratio]


@dataclass(frozen=True)
class Findings:
    """All that a report shows, in its order.

    Attributes:
        verdict: the gate's; without a gate the worst of the suites'; None if nothing was judged.
        headline: sentences for someone who reads one paragraph.
        rules: the gate's rules, those of a suite's families as one.
        work: work done by both sides; `memory`: what they take.
        changed: samples with different answers, lost ones first.
        made: how the candidate was made, as (what, how).
        method: how the figures were made; `about`: machine, engine, version and date.
    """

    results: Results
    verdict: Verdict | None
    headline: list[str]
    glossary: str
    rules: list[Rule]
    suites: list[SuiteFindings]
    speed: list[SpeedTable]
    main_speed: tuple[str, Ratio] | None
    work: BothSides
    memory: BothSides
    changed: list[Scored]
    layers: str
    made: list[tuple[str, str]]
    method: list[str]
    about: str

    @classmethod
    def of(cls, results: Results) -> Findings:
        suites, bench = [_suite(suite, results.gate) for suite in results.suites], results.bench
        return cls(
            results=results,
            verdict=overall(results),
            headline=_headline(results, suites),
            glossary=words.glossary(results),
            rules=rules(results.gate) if results.gate else [],
            suites=suites,
            speed=[SpeedTable(mode, *row) for mode, states in bench.summary.items() for row in states.items()]
            if bench
            else [],
            main_speed=main_speed(bench) if bench else None,
            work=_work(bench) if bench else [],
            memory=_memory(results),
            changed=changed_answers(results.samples),
            layers=words.layers(results.candidate.layer_errors),
            made=made(results.candidate),
            method=[words.accuracy_method(suite) for suite in results.suites]
            + ([words.speed_method(bench)] if bench else []),
            about=_about(results),
        )


def _suite(suite: Suite, gate: Gate | None) -> SuiteFindings:
    table = rows(suite, gate)
    fallen = [row.name for row in table[1:] if not row.judged and row.comparison.verdict == "fail"]
    lost = ""
    if fallen:
        limit = words.margin(next(c.margin for c in suite.families.values()))
        lost = (
            f"More than {limit} lost, shown after correction for {len(suite.families)} families: {', '.join(fallen)}."
        )
    return SuiteFindings(
        suite=suite,
        rows=table,
        fallen=[lost] if lost else [],
        notes=words.tokens(suite) + words.agreement(suite),
        suspect=[
            ("no answer found in the text", suite.unparsed),
            ("empty answers", suite.empty),
            (f"cut off at {suite.max_tokens} tokens", suite.cut_off),
        ],
    )


def rows(suite: Suite, gate: Gate | None) -> list[Row]:
    """All samples together, then the families, each with one verdict at most.

    A row that a rule of the gate judges has that rule's margin and verdict. Families that no rule judges have no verdict;
    all samples together are then judged by the suite's own margin.
    """
    judging = {rule.family: rule for rule in (gate.rules if gate else []) if rule.suite == suite.name}
    families = [Row(name, _by(judging.get(name), c), name in judging) for name, c in suite.families.items()]
    return [Row("all", _by(judging.get(None), suite.overall), True), *families]


def _by(rule: Rule | None, c: Comparison) -> Comparison:
    """The comparison with the margin and verdict of the rule that judges it."""
    if rule is None or rule.margin is None:
        return c
    needed = c.needed if rule.margin == c.margin else None
    return c.model_copy(update={"margin": rule.margin, "verdict": rule.verdict, "needed": needed})


def rules(gate: Gate) -> list[Rule]:
    """A gate's rules, with those of a suite's families merged into one, as `rows` shows each of them."""
    merged: list[Rule] = []
    for rule in gate.rules:
        if rule.family is None:
            merged.append(rule)
        elif not any(other.suite == rule.suite and other.family is not None for other in merged):
            merged.append(_together([r for r in gate.rules if r.suite == rule.suite and r.family is not None]))
    return merged


def _together(families: list[Rule]) -> Rule:
    if len(families) == 1:
        return families[0]
    verdicts = [rule.verdict for rule in families]
    limits = list(dict.fromkeys(rule.limit for rule in families))
    return families[0].model_copy(
        update={
            "name": f"{families[0].suite}: each of {len(families)} families",
            "verdict": words.worst(verdicts),
            "value": words.counted(verdicts),
            "limit": limits[0] if len(limits) == 1 else "a margin each",
            "reason": "each under Accuracy",
        }
    )


def overall(results: Results) -> Verdict | None:
    """The gate's verdict; without a gate the worst of the suites'; None if nothing was judged."""
    if results.gate:
        return results.gate.verdict
    return words.worst([suite.overall.verdict for suite in results.suites]) if results.suites else None


def main_speed(bench: Bench) -> tuple[str, Ratio] | None:
    """The speed that stands for a benchmark: served and cold if measured, requests per second before latency."""
    for mode in ("serve", "offline"):
        for state in ("cold", "warm"):
            metrics = bench.summary.get(mode, {}).get(state, {})
            rates = [n for n, r in metrics.items() if r.higher_is_better and "goodput" not in n and "token" not in n]
            for name in (*rates, "e2e_p50_ms", *metrics):
                if name in metrics and words.comparable(metrics[name]):
                    return f"{words.metric(name).removesuffix(', ms')} {words.MODES[mode]} {state}", metrics[name]
    return None


def _headline(results: Results, suites: list[SuiteFindings]) -> list[str]:
    lines, several = [], len(suites) > 1
    if gate := results.gate:
        lines.append(f"Gate {gate.name}: {words.tally(gate.verdict, [rule.verdict for rule in gate.rules])}.")
    elif several and (verdict := overall(results)):
        lines.append(f"Accuracy: {words.tally(verdict, [s.suite.overall.verdict for s in suites])}.")
    lines += [f"{s.suite.name}: " * several + words.verdict(s.overall) for s in suites]
    lines += [f"{s.suite.name}: " * several + line for s in suites for line in s.fallen]
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after and before != after:
        lines.append(f"Weights are {smaller(before, after)} ({size(before)} to {size(after)}).")
    lines += [f"{s.suite.name}: " * several + line for s in suites for line in words.tokens(s.suite)]
    if results.bench and (main := main_speed(results.bench)):
        name, ratio = main
        repeats = f"{results.bench.repeats} repeats" if results.bench.repeats > 1 else "one repeat"
        ends = f"{extremes} in {repeats}" if (extremes := words.spread(ratio)) else repeats
        lines.append(f"Speed: {words.pace(ratio)}, {name} ({ends}).")
    return lines


def _work(bench: Bench) -> BothSides:
    """Work done by both sides: tokens, answers from caches, failures, by state."""

    def amount(name: str, side: str, state: str) -> str:
        runs = [run for run in bench.runs if (run.side, run.state) == (side, state)]
        total = sum(getattr(run, name) for run in runs)
        requests = max(1, sum(run.completed for run in runs))
        return figures(total / requests) if "a request" in _WORK[name] else f"{total:,}"

    states = dict.fromkeys(run.state for run in bench.runs)
    return [
        (f"{what}, {state}", amount(name, "baseline", state), amount(name, "candidate", state))
        for name, what in _WORK.items()
        for state in states
    ]


def _memory(results: Results) -> BothSides:
    """Memory of both sides: weights, and the KV cache if the benchmark measured it."""
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    table = [("weights", size(before), size(after))] if before and after else []
    memory = results.bench.memory if results.bench else {}
    if {"baseline", "candidate"} <= memory.keys():
        b, c = memory["baseline"], memory["candidate"]
        table += [
            ("KV cache, a token", size(b.kv_bytes_per_token), size(c.kv_bytes_per_token)),
            ("KV cache, a mean request", size(b.kv_bytes_per_request), size(c.kv_bytes_per_request)),
            ("KV cache, all of it", size(b.kv_cache_bytes), size(c.kv_cache_bytes)),
            ("mean requests that fit at once", figures(b.max_concurrency), figures(c.max_concurrency)),
        ]
    return table


def made(side: Side) -> list[tuple[str, str]]:
    """How a checkpoint was made, as rows (what, how); empty where nothing is known."""
    stored = side.made.reducer if side.made else ""
    attached = ", attached for this run; the checkpoint does not carry it" * (side.reducer != stored)
    reducer = ("visual-token reducer", side.reducer + attached if side.reducer else "")
    if (facts := side.made) is None:
        return [reducer] if side.reducer else []
    options = (f"{name} {_plain(value)}" for name, value in facts.options.items())
    table = [
        ("original", facts.source + f" ({facts.family})" * bool(facts.family)),
        ("scheme", ", ".join([facts.scheme, *options])),
        ("stored as", "; ".join(facts.formats) or "weights as they were"),
        ("bits per weight", f"{facts.bits:g} with scales, shared out among groups of layers" if facts.bits else ""),
        ("vision tower", {"bf16": "16 bit, as it was"}.get(facts.vision, facts.vision)),
        ("KV cache", facts.kv_cache or "16 bit"),
        ("layers left in 16 bits", ", ".join(facts.skip)),
        ("images made smaller", facts.resize),
        reducer,
        ("calibration data", _calibration(facts)),
        ("seed", "" if facts.seed is None else str(facts.seed)),
        ("made with", ", ".join(f"{package} {version}" for package, version in facts.versions.items())),
    ]
    return [row for row in table if row[1]] + [("warning", line) for line in facts.warnings]


def _calibration(facts: Made) -> str:
    data = facts.calibration
    if data is None:
        return "none: each weight was rounded on its own"
    parts = [f"{data.samples:,} samples of {data.source}"]
    if data.images is not None:
        parts.append(f"{data.images:,} different images")
    if data.text:
        parts.append(f"{data.text:,} of the samples are text alone, from {data.text_source}")
    if data.tokens:
        parts.append(", ".join(f"{count:,} {kind}" for kind, count in data.tokens.items()) + " tokens")
    return "; ".join([*parts, *([_PREFIX[data.prefix]] if data.prefix in _PREFIX else [])])


def _plain(value: object) -> str:
    """An option's value for a reader."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | dict):
        return json.dumps(value)
    return "none" if value is None else str(value)


def _about(results: Results) -> str:
    """Machine, engine, version and date in a line."""
    machine = [f"{key} {value}" for key, value in results.machine.items() if isinstance(value, str | int | float)]
    engine = [str(results.candidate.engine[k]) for k in ("name", "version", "device") if k in results.candidate.engine]
    parts = [" ".join(engine), ", ".join(machine), f"vlmcompress {results.version}", results.created]
    return "; ".join(part for part in parts if part) + "."
