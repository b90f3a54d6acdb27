"""What a comparison showed, as data: verdicts, the headline, and which row of a table is judged by what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.results import Comparison, Gate, Ratio, Results, Suite, Verdict
from vlmcompress.utils.text import size, smaller


class AccuracyRow(NamedTuple):
    """A line of a table of accuracy. Margin and verdict of `comparison` count only if the line is `judged`."""

    name: str
    comparison: Comparison
    judged: bool


def rows(suite: Suite, gate: Gate | None) -> list[AccuracyRow]:
    """All samples together, then the families, each with one verdict at most.

    A row with a rule in the gate has that rule's margin and verdict. Families without a rule have no verdict; all samples
    together are then judged by the suite's margin.
    """
    # Not every family of a suite has a rule: `None` is the rule on all samples.
    judging = {rule.family: rule for rule in (gate.rules if gate else []) if rule.suite == suite.name}
    lines = []
    for family, c in [(None, suite.overall), *suite.families.items()]:
        if (rule := judging.get(family)) and rule.margin is not None:
            needed = c.needed if rule.margin == c.margin else None
            c = c.model_copy(update={"margin": rule.margin, "verdict": rule.verdict, "needed": needed})
        lines.append(AccuracyRow(family or "all", c, family is None or family in judging))
    return lines


@dataclass(frozen=True)
class SuiteFindings:
    """A suite's accuracy: all samples together and the families, see `rows`."""

    suite: Suite
    rows: list[AccuracyRow]

    @property
    def overall(self) -> Comparison:
        return self.rows[0].comparison

    @property
    def fallen(self) -> list[str]:
        """At most one sentence: families without a rule that significantly lost more than the margin, after correction."""
        lost = [row for row in self.rows[1:] if not row.judged and row.comparison.verdict == "fail"]
        names, limit = ", ".join(row.name for row in lost), words.margin(lost[0].comparison.margin) if lost else ""
        count = len(self.suite.families)
        return [f"More than {limit} lost, shown after correction for {count} families: {names}."] if lost else []


@dataclass(frozen=True)
class Findings:
    """What results show; each part is computed on first access."""

    results: Results

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict; without a gate the worst of the suites'; None if nothing was judged."""
        if self.results.gate:
            return self.results.gate.verdict
        verdicts = [suite.overall.verdict for suite in self.results.suites]
        return words.worst(verdicts) if verdicts else None

    @cached_property
    def headline(self) -> list[str]:
        """The summary of the report, as sentences."""
        results, lines, several = self.results, [], len(self.suites) > 1
        # The verdict first, then what it rests on, then what was won: bytes, tokens, speed.
        if gate := results.gate:
            title = gate.title[:1].upper() + gate.title[1:]
            lines.append(f"{title}: {words.tally(gate.verdict, [rule.verdict for rule in gate.rules])}.")
        elif several and self.verdict:
            lines.append(f"Accuracy: {words.tally(self.verdict, [s.suite.overall.verdict for s in self.suites])}.")
        for s in self.suites:
            sentences = [words.verdict_text(s.overall), *words.gained(s.overall), *words.doubt(s.suite)]
            sentences += words.calibrated(s.suite)
            lines.append(f"{s.suite.name}: " * several + " ".join(sentences))
        lines += [f"{s.suite.name}: " * several + line for s in self.suites for line in s.fallen]
        before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
        if before and after and before != after:
            lines.append(f"Weights are {smaller(before, after)} ({size(before)} to {size(after)}).")
        lines += [f"{s.suite.name}: " * several + line for s in self.suites for line in words.tokens(s.suite)]
        if results.bench and self.main_speed:
            name, ratio = self.main_speed
            repeats = f"{results.bench.repeats} repeats" if results.bench.repeats > 1 else "one repeat"
            ends = f"{extremes} in {repeats}" if (extremes := words.spread(ratio)) else repeats
            lines.append(f"Speed: {words.pace(ratio)}, {name} ({ends}).")
        return lines

    @cached_property
    def suites(self) -> list[SuiteFindings]:
        return [SuiteFindings(suite, rows(suite, self.results.gate)) for suite in self.results.suites]

    @cached_property
    def main_speed(self) -> tuple[str, Ratio] | None:
        """The main figure of the benchmark: served and cold if measured, requests per second before latency."""
        summary = self.results.bench.summary if self.results.bench else {}
        # Cold first: images are then encoded and prompts computed, which is what reducers and schemes change.
        for mode, state in product(summary, ("cold", "warm")):
            metrics = summary[mode].get(state, {})
            rates = [n for n, r in metrics.items() if r.higher_is_better and "goodput" not in n and "token" not in n]
            for name in (*rates, "e2e_p50_ms", *metrics):
                if name in metrics and words.comparable(metrics[name]):
                    return f"{words.metric_name(name).removesuffix(', ms')} {words.MODES[mode]} {state}", metrics[name]
        return None

    @property
    def about(self) -> str:
        """Machine, engine, version and date in a line."""
        machine, engine = self.results.machine, self.results.candidate.engine
        parts = [
            " ".join(str(engine[key]) for key in ("name", "version", "device") if key in engine),
            ", ".join(f"{key} {value}" for key, value in machine.items() if isinstance(value, str | int | float)),
            f"vlmcompress {self.results.version}",
            self.results.created,
        ]
        return "; ".join(part for part in parts if part) + "."
