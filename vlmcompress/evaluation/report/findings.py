"""The content of a report on one comparison, as data: `text` and `html` render these `Findings`, `files` uses their
verdicts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

from vlmcompress.evaluation.accuracy import catalogue
from vlmcompress.evaluation.accuracy.compare import changed_answers
from vlmcompress.evaluation.accuracy.tasks import BUNDLED
from vlmcompress.evaluation.report import words
from vlmcompress.evaluation.results import (
    Comparison,
    Gate,
    GateRule,
    LoadRun,
    Ratio,
    Results,
    Scored,
    Side,
    Suite,
    Verdict,
)
from vlmcompress.utils.text import figures, size, smaller

_WORK = {
    "text_tokens": "text tokens a request",
    "visual_tokens": "visual tokens a request",
    "output_tokens": "output tokens a request",
    "cached_tokens": "prompt tokens from the prefix cache",
    "media_hits": "images from a cache",
    "failed": "failed requests",
}
_PREFIX = {"float": "unquantized", "quantized": "quantized"}


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
    """A suite's accuracy: all samples together and the families, see `rows`, and sentences about them."""

    suite: Suite
    rows: list[AccuracyRow]
    samples: list[Scored] = field(default_factory=list)

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

    @property
    def notes(self) -> list[str]:
        """Sentences on how the score was chosen, on tokens, on how far the answers agree, and on refused samples."""
        refused, choice = words.refused(self.suite, self.samples), [self.suite.choice] * bool(self.suite.choice)
        return [*choice, *words.tokens(self.suite), *words.agreement(self.suite), *refused]

    @property
    def suspect(self) -> list[tuple[str, tuple[int, int]]]:
        """Counts of suspect answers: kind, (of the baseline, of the candidate)."""
        unfinished = f"thoughts that {self.suite.max_tokens} tokens do not end (raise --max-tokens)"
        return [
            ("no answer found in the text", self.suite.unparsed),
            ("not answered, as the model or engine raised", self.suite.refused),
            (words.empty(self.suite), self.suite.empty),
            *[(unfinished, self.suite.unfinished)] * any(self.suite.unfinished),
            (f"cut off at {self.suite.max_tokens} tokens", self.suite.cut_off),
        ]


class SpeedTable(NamedTuple):
    """Metrics of a benchmark in one mode ("serve") and state ("cold", "warm")."""

    mode: str
    state: str
    metrics: dict[str, Ratio]


@dataclass(frozen=True)
class Findings:
    """The content of a report on results; each part is computed on first access."""

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
            sentences = [words.verdict_text(s.overall), *words.doubt(s.suite), *words.calibrated(s.suite)]
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
    def rules(self) -> list[GateRule]:
        """The gate's rules, with those of a suite's families merged into one, as `rows` shows each of them."""
        rules, merged = self.results.gate.rules if self.results.gate else [], list[GateRule]()
        for rule in rules:
            # A gate by family has dozens of lines, which the table of accuracy shows one by one; here they are counted.
            families = [r for r in rules if r.suite == rule.suite and r.family is not None]
            if rule.family is None or len(families) == 1:
                merged.append(rule)
            elif rule is families[0]:
                verdicts, limits = [r.verdict for r in families], {r.limit for r in families}
                merged.append(
                    GateRule(
                        name=f"{rule.suite}: each of {len(families)} families",
                        verdict=words.worst(verdicts),
                        value=words.counted(verdicts),
                        limit=rule.limit if len(limits) == 1 else "a margin each",
                        reason="each under Accuracy",
                    )
                )
        return merged

    @cached_property
    def suites(self) -> list[SuiteFindings]:
        gate, samples = self.results.gate, self.results.samples
        return [SuiteFindings(s, rows(s, gate), [x for x in samples if x.suite == s.name]) for s in self.results.suites]

    @property
    def speed(self) -> list[SpeedTable]:
        summary = self.results.bench.summary if self.results.bench else {}
        return [SpeedTable(mode, *row) for mode, states in summary.items() for row in states.items()]

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
    def work(self) -> list[tuple[str, str, str]]:
        """Work done by baseline and candidate, by state: tokens, answers from caches, failures."""
        runs = self.results.bench.runs if self.results.bench else []

        def amount(name: str, side: str, state: str) -> str:
            selected = [run for run in runs if (run.side, run.state) == (side, state)]
            total = sum(getattr(run, name) for run in selected)
            requests = max(1, sum(run.completed for run in selected))
            return figures(total / requests) if "a request" in _WORK[name] else f"{total:,}"

        states = dict.fromkeys(run.state for run in runs)
        return [
            (f"{what}, {state}", amount(name, "baseline", state), amount(name, "candidate", state))
            for (name, what), state in product(_WORK.items(), states)
        ]

    @property
    def memory(self) -> list[tuple[str, str, str]]:
        """Memory of baseline and candidate: weights, and the KV cache if the benchmark measured it."""
        before, after = self.results.baseline.weight_bytes, self.results.candidate.weight_bytes
        table = [("weights", size(before), size(after))] if before and after else []
        memory = self.results.bench.memory if self.results.bench else {}
        if {"baseline", "candidate"} <= memory.keys():
            b, c = memory["baseline"], memory["candidate"]
            table += [
                ("tokens in the KV cache", f"{b.kv_cache_tokens:,}", f"{c.kv_cache_tokens:,}"),
                ("mean requests that fit at once", figures(b.max_concurrency), figures(c.max_concurrency)),
            ]
        return table

    @property
    def drafting(self) -> list[tuple[str, ...]]:
        """Drafted and accepted tokens by side and state, with a head; empty if nothing was drafted.

        A step produces one token more than it accepts. Its time is compared with that of a baseline that does not draft:
        drafting gains if steps produce more tokens than they cost.
        """
        runs = self.results.bench.runs if self.results.bench else []
        table: list[tuple[str, ...]] = []
        for side, state in dict.fromkeys((run.side, run.state) for run in runs):
            of = [run for run in runs if (run.side, run.state) == (side, state)]
            plain = [run for run in runs if (run.side, run.state) == ("baseline", state)]
            drafts, drafted, accepted = (
                sum(getattr(r, name) for r in of) for name in ("drafts", "drafted", "accepted")
            )
            if not drafts or not drafted:
                continue
            by_place = (sum(counts) / drafts for counts in zip(*(run.accepted_at for run in of), strict=True))
            seconds, before = _step_seconds(of), _step_seconds(plain)
            cost = f"{seconds / before:.2f} of the baseline's" * (
                seconds > 0 < before and not any(r.drafts for r in plain)
            )
            counts = (f"{drafted:,}", f"{accepted:,}", words.percent(accepted / drafted))
            places = ", ".join(f"{share:.0%}" for share in by_place)
            table.append((f"{side}, {state}", *counts, places, f"{1 + accepted / drafts:.2f}", cost))
        head = ("", "drafted", "accepted", "rate", "by place", "tokens of a step with a draft", "time of a step")
        return [head, *table] if table else []

    @cached_property
    def changed(self) -> list[Scored]:
        """Samples with different answers, lost ones first."""
        return changed_answers(self.results.samples)

    @property
    def made(self) -> list[tuple[str, str]]:
        """The candidate's provenance as rows (what, how); empty if unknown."""
        return provenance_rows(self.results.candidate)

    @property
    def method(self) -> list[str]:
        """How the figures were made."""
        bench = self.results.bench
        speed = [words.speed_method(bench)] if bench else []
        return [*map(words.accuracy_method, self.results.suites), *speed]

    @property
    def bench_command(self) -> str:
        """The command that measures, or measured, the speed of the two."""
        sides = f"{shlex.quote(self.results.candidate.path)} --baseline {shlex.quote(self.results.baseline.path)}"
        if not (bench := self.results.bench):
            return f"vlmcompress bench {sides}"
        load = f"--load {bench.load} --requests {bench.requests}"
        return f"vlmcompress bench {sides} {load} --out-tokens {bench.out_tokens} --repeats {bench.repeats}"

    @property
    def commands(self) -> list[str]:
        """The commands that evaluate and measure the two again; flags that change nothing here are left out."""
        results = self.results
        sides = f"{shlex.quote(results.candidate.path)} --baseline {shlex.quote(results.baseline.path)}"
        lines = []
        for suite in results.suites:
            engine = results.candidate.engine.get("name", "vllm")
            flags = f" --suite {shlex.quote(suite.name)}" if suite.name in catalogue.task_names() else ""
            if suite.source and not (flags and suite.name.partition("_")[0] in BUNDLED):
                flags += f" --data {shlex.quote(suite.source)}"
            flags += f" --engine {shlex.quote(str(engine))}"
            if suite.samples < suite.available:
                flags += f" --limit {suite.samples} --seed {suite.seed}"
            lines.append(f"vlmcompress eval {sides}{flags}")
        return [*lines, *[self.bench_command] * (results.bench is not None)]

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


def _step_seconds(runs: Sequence[LoadRun]) -> float:
    """Mean seconds of a request's decoding step by the server's clock, as tokens reach a busy client in bunches, or 0.0."""
    steps = sum(run.output_tokens - run.completed - run.accepted for run in runs)
    return sum(run.decode_seconds for run in runs) / steps if steps > 0 else 0.0


def provenance_rows(side: Side) -> list[tuple[str, str]]:
    """A checkpoint's provenance as rows (what, how); empty if unknown."""
    stored = side.made.reducer if side.made else ""
    attached = ", attached for this run; the checkpoint does not carry it" * (side.reducer != stored)
    reducer = ("visual-token reducer", side.reducer + attached if side.reducer else "")
    if (facts := side.made) is None:
        return [reducer] if side.reducer else []
    options = []
    for name, value in facts.options.items():
        text = {True: "yes", False: "no", None: "none"}.get(value) if isinstance(value, bool | None) else str(value)
        options.append(f"{name} {json.dumps(value) if isinstance(value, list | dict) else text}")
    calibration = "none: each weight was rounded on its own"
    if data := facts.calibration:
        parts = [f"{data.samples:,} samples of {data.source}"]
        parts += [] if data.images is None else [f"{data.images:,} different images"]
        parts += [f"{data.text:,} of the samples are text alone, from {data.text_source}"] if data.text else []
        tokens = ", ".join(f"{count:,} {kind}" for kind, count in data.tokens.items())
        parts += [f"{tokens} tokens"] if tokens else []
        parts += [f"seen after {state} blocks" for prefix, state in _PREFIX.items() if prefix == data.prefix]
        calibration = "; ".join(parts)
    table = [
        ("original", facts.source + f" ({facts.family})" * bool(facts.family)),
        ("scheme", ", ".join([facts.scheme, *options])),
        ("stored as", "; ".join(facts.formats) or "weights as they were"),
        ("bits per weight", f"{facts.bits:g} with scales, split among groups of layers" if facts.bits else ""),
        ("vision tower", {"bf16": "16 bit, as it was"}.get(facts.vision, facts.vision)),
        ("KV cache", facts.kv_cache or "16 bit"),
        ("layers left in 16 bits", ", ".join(facts.skip)),
        ("images made smaller", facts.resize),
        reducer,
        ("calibration data", calibration),
        ("seed", "" if facts.seed is None else str(facts.seed)),
        ("made with", ", ".join(f"{package} {version}" for package, version in facts.versions.items())),
    ]
    return [row for row in table if row[1]] + [("warning", line) for line in facts.warnings]
