"""The sections of a report on one comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from vlmcompress.evaluation.accuracy.compare import changed_answers
from vlmcompress.evaluation.accuracy.grounding import METRICS
from vlmcompress.evaluation.report import plots, words
from vlmcompress.evaluation.report.document import (
    Examples,
    Lines,
    Part,
    Section,
    Table,
    layer_cell,
    note,
    verdict_cell,
    worse,
)
from vlmcompress.evaluation.report.findings import AccuracyRow, Findings, SuiteFindings
from vlmcompress.evaluation.results import Bench, LoadRun, Side
from vlmcompress.export.manifest import error_kind, errors_text
from vlmcompress.utils.text import figures, percentage, size

LAYERS = 12  # rows of a table of errors
SIDES = ("expected", "baseline", "candidate")
_EXAMPLES = 24  # samples shown
_INTERVALS = (
    "Dots are differences in points, lines their intervals; the shaded region is beyond the margin, the loss that is allowed. "
    "An interval that stays out of it passes, one that reaches into it can't tell, one that lies in it fails."
)
_WORK = {
    "text_tokens": "text tokens a request",
    "visual_tokens": "visual tokens a request",
    "output_tokens": "output tokens a request",
    "cached_tokens": "prompt tokens from the prefix cache",
    "media_hits": "images from a cache",
    "failed": "failed requests",
}
_MADE = {
    "source": "original",
    "family": "family",
    "scheme": "scheme",
    "options": "options",
    "formats": "stored as",
    "bits": "bits per weight",
    "vision": "vision tower",
    "kv_cache": "KV cache",
    "skip": "layers left in 16 bits",
    "resize": "images made smaller",
    "calibration": "calibration data",
    "seed": "seed",
    "versions": "made with",
    "warnings": "warnings",
}


def measured(findings: Findings) -> list[Section]:
    """The gate's rules, accuracy, speed and memory, as far as they were measured."""
    sections, results = [], findings.results
    if gate := results.gate:
        rules = [(rule.name, verdict_cell(rule.verdict), rule.value, rule.limit, rule.reason) for rule in gate.rules]
        part = Table(["rule", "verdict", "value", "limit", ""], rules, look="text cards")
        sections.append(Section(gate.title[:1].upper() + gate.title[1:], [part], "gate", "Gate", gate.verdict))
    if len(findings.suites) > 1:
        overview = differences("suite", [s.rows[0]._replace(name=s.suite.name) for s in findings.suites])
        sections.append(Section("Accuracy on all suites", overview, "accuracy", "Accuracy"))
    for s in findings.suites:
        anchor = ("accuracy", "Accuracy") if len(findings.suites) == 1 else ("", "")
        title = f"Accuracy on {s.suite.name} ({s.suite.metric})"
        sections.append(Section(title, _suite(findings, s), *anchor, s.overall.verdict))
    if results.bench and results.bench.summary:
        sections.append(Section("Speed", _speed(results.bench), "speed"))
    memory, before, after = [], results.baseline.weight_bytes, results.candidate.weight_bytes
    if before and after:
        memory.append(("weights", size(before), size(after)))
    caches = results.bench.memory if results.bench else {}
    if {"baseline", "candidate"} <= caches.keys():
        b, c = caches["baseline"], caches["candidate"]
        memory += [
            ("tokens in the KV cache", f"{b.kv_cache_tokens:,}", f"{c.kv_cache_tokens:,}"),
            ("mean requests that fit at once", figures(b.max_concurrency), figures(c.max_concurrency)),
        ]
    if memory:
        sections.append(Section("Memory", [Table(["", "baseline", "candidate"], memory, "short")], "memory"))
    return sections


def all_sections(findings: Findings) -> list[Section]:
    """What was measured, then errors of layers, examples, and how checkpoint and figures were made."""
    results, sections = findings.results, measured(findings)
    if errors := results.candidate.layer_errors:
        parts: list[Part] = [note(errors_text(errors)), layer_table(errors)]
        sections.append(Section("Error of each layer", parts, "layers", "Layers"))
    if examples := _examples(findings):
        sections.append(Section("Where the answers differ", examples, "examples", "Examples"))
    if made := provenance_rows(results.candidate):
        table = Table(["", ""], made, look="text facts")
        sections.append(Section(f"How {results.candidate.name} was made", [table], "made", "How it was made"))
    method = [words.accuracy_method(suite) for suite in results.suites]
    method += [words.speed_method(results.bench)] if results.bench else []
    data = [f"{s.name}: {s.source.rpartition('/')[2]} {s.sha256[:12]}." for s in results.suites]
    sections.append(Section("Method", [Lines([*method, findings.about, *data], "list")], "method"))
    return sections


def _suite(findings: Findings, s: SuiteFindings) -> list[Part]:
    """A suite's accuracy: all samples and families, notes, and counts of suspect answers."""
    suite, o = s.suite, s.overall
    parts = differences("family", s.rows, strong=[0])
    if any(not row.judged for row in s.rows):
        parts.append(note("Families without a verdict are not judged: no gate asks for it."))
    notes = [suite.choice] * bool(suite.choice)
    if o.both is not None:
        notes.append(f"Right in both: {o.both:,}; only before: {o.baseline_only:,}; only after: {o.candidate_only:,}.")
    samples = [sample for sample in findings.results.samples if sample.suite == suite.name]
    notes += [*words.agreement(suite), *words.refused(suite, samples)]
    suspect = [
        ("no answer found in the text", suite.unparsed),
        ("not answered, as the model or engine raised", suite.refused),
        ("empty answers", suite.empty),
        (f"thoughts that {suite.max_tokens} tokens do not end (raise --max-tokens)", suite.unfinished),
        (f"cut off at {suite.max_tokens} tokens", suite.cut_off),
    ]
    counts = [(what, f"{b:,}", worse(f"{c:,}") if c > b else f"{c:,}") for what, (b, c) in suspect if b or c]
    table = Table(["suspect answers", "baseline", "candidate"], counts, look="short")
    return [*parts, Lines(notes), *[table] * bool(counts)]


def differences(what: str, rows: Sequence[AccuracyRow], strong: Sequence[int] = ()) -> list[Part]:
    """A table of accuracy, with a chart in each row, and how to read it. `what`: what a row is."""
    axis, lines = plots.points_axis([row.comparison for row in rows]), []
    for name, c, judged in rows:
        judgement = (f"{100 * c.margin:.4g}", verdict_cell(c.verdict)) if judged else ("", "")
        scores = (f"{c.n:,}", words.percent(c.baseline), words.percent(c.candidate), words.recovery(c))
        lines.append((name, *scores, words.difference_text(c), plots.accuracy(c, axis, judged=judged), *judgement))
    interval = f"points ({rows[0].comparison.level:.0%} interval)"
    head = [what, "n", "baseline", "candidate", "recovery", interval, plots.ruler(axis), "margin", "verdict"]
    return [Table(head, lines, "cards", strong), Lines([_INTERVALS], "legend")]


def _speed(bench: Bench) -> list[Part]:
    """Metrics of each mode and state, the work that was done, and drafted tokens."""
    sizes = f", images {', '.join(bench.sizes)}" if bench.sizes else ""
    load = words.load_text(bench)
    work = f"{bench.requests:,} requests a burst, {bench.out_tokens} output tokens each{sizes}"
    parts: list[Part] = [Lines([f"{load[:1].upper()}{load[1:]}, {work}, {bench.repeats} repeats, of {bench.source}."])]
    head = ["", "baseline", "candidate", "candidate is", "in the repeats"]
    for mode, states in bench.summary.items():
        for state, metrics in states.items():
            rows = [
                (
                    words.metric_name(name),
                    figures(r.baseline),
                    figures(r.candidate),
                    words.pace(r),
                    words.spread(r),
                )
                for name, r in metrics.items()
            ]
            caches = "no caches" if state == "cold" else "caches on"
            title = f"{words.MODES[mode].capitalize()}, {state} ({caches})"
            parts += [Lines([title], "heading"), Table(head, rows, "cards")]
    parts += [note(words.TIMES), Lines(["What was processed, counted by the server"], "heading")]
    parts.append(Table(["", "baseline", "candidate"], work_rows(bench), look="short"))
    if drafted := drafting(bench.runs):
        parts += [Lines(["Speculative decoding"], "heading"), Table(drafted[0], drafted[1:], look="cards")]
    return parts


def work_rows(bench: Bench) -> list[tuple[str, str, str]]:
    """Work done by baseline and candidate, by state: tokens, answers from caches, failures; what is not zero."""

    def amount(name: str, side: str, state: str) -> str:
        selected = [run for run in bench.runs if (run.side, run.state) == (side, state)]
        total = sum(getattr(run, name) for run in selected)
        requests = max(1, sum(run.completed for run in selected))
        return figures(total / requests) if "a request" in _WORK[name] else f"{total:,}"

    states = dict.fromkeys(run.state for run in bench.runs)
    rows = [
        (f"{what}, {state}", amount(name, "baseline", state), amount(name, "candidate", state))
        for (name, what), state in product(_WORK.items(), states)
    ]
    return [row for row in rows if row[1:] != ("0", "0")]


def drafting(runs: Sequence[LoadRun]) -> list[tuple[str, ...]]:
    """Drafted and accepted tokens by side and state, with a head; empty if nothing was drafted.

    A step produces one token more than it accepts. Its time is compared with that of a baseline that does not draft:
    drafting gains if steps produce more tokens than they cost.
    """
    table: list[tuple[str, ...]] = []
    for side, state in dict.fromkeys((run.side, run.state) for run in runs):
        of = [run for run in runs if (run.side, run.state) == (side, state)]
        plain = [run for run in runs if (run.side, run.state) == ("baseline", state)]
        drafts, drafted, accepted = (sum(getattr(r, name) for r in of) for name in ("drafts", "drafted", "accepted"))
        if not drafts or not drafted:
            continue
        by_place = (sum(counts) / drafts for counts in zip(*(run.accepted_at for run in of), strict=True))
        seconds, before = _step_seconds(of), _step_seconds(plain)
        cost = f"{seconds / before:.2f} of the baseline's" * (seconds > 0 < before and not any(r.drafts for r in plain))
        counts = (f"{drafted:,}", f"{accepted:,}", words.percent(accepted / drafted))
        places = ", ".join(f"{share:.0%}" for share in by_place)
        table.append((f"{side}, {state}", *counts, places, f"{1 + accepted / drafts:.2f}", cost))
    head = ("", "drafted", "accepted", "rate", "by place", "tokens of a step with a draft", "time of a step")
    return [head, *table] if table else []


def _step_seconds(runs: Sequence[LoadRun]) -> float:
    """Mean seconds of a request's decoding step by the server's clock, as tokens reach a busy client in bunches, or 0.0."""
    steps = sum(run.output_tokens - run.completed - run.accepted for run in runs)
    return sum(run.decode_seconds for run in runs) / steps if steps > 0 else 0.0


def layer_table(errors: Mapping[str, Mapping[str, float]]) -> Table:
    """The layers with the largest error of any kind, and their errors of each kind."""
    kinds = list(dict.fromkeys(kind for by_kind in errors.values() for kind in by_kind))
    names = sorted(errors, key=lambda name: (-max(errors[name].values(), default=0.0), name))
    rows = [
        (layer_cell(name), *(percentage(errors[name][kind]) if kind in errors[name] else "" for kind in kinds))
        for name in names[:LAYERS]
    ]
    return Table([f"the worst of {len(errors)} layers", *map(error_kind, kinds)], rows, look="short")


def _examples(findings: Findings) -> list[Part]:
    """Samples with different answers, lost ones first, and of those with pictures first, as readers can judge them."""
    results, changed = findings.results, changed_answers(findings.results.samples)
    chosen = sorted(changed, key=lambda sample: (sample.id not in results.pictures, sample.change))[:_EXAMPLES]
    if not chosen:
        return []
    # pixels are of a picture whose size is not known here, so that their boxes are not drawn
    about_boxes = {s.name for s in results.suites if s.metric in METRICS and not s.name.endswith("_pixels")}
    examples = [
        (
            sample,
            {side: getattr(sample, side) for side in SIDES} if sample.suite in about_boxes else {},
            results.pictures.get(sample.id, []),
        )
        for sample in chosen
    ]
    counts = (
        f"{len(changed):,} of {len(results.samples):,} samples, {sum(s.change == 0 for s in changed):,} of them lost. Lost "
        "ones come first; results.json has every answer."
    )
    return [note(counts), Examples(examples)]


def provenance_rows(side: Side) -> list[tuple[str, str]]:
    """A checkpoint's provenance as rows (what, how), without what is unset; empty if unknown."""
    facts = side.made.model_dump() if side.made else {}
    if facts:
        facts["calibration"] = {key: value for key, value in (facts.get("calibration") or {}).items() if value}
    rows = [(what, _text(facts[name])) for name, what in _MADE.items() if name in facts]
    if facts and not facts["calibration"]:
        rows.append(("calibration data", "none: each weight was rounded on its own"))
    attached = ", attached for this run; the checkpoint does not carry it" * (side.reducer != facts.get("reducer", ""))
    rows.append(("visual-token reducer", side.reducer + attached if side.reducer else ""))
    return [row for row in rows if row[1]]


def _text(value: Any) -> str:
    """A fact in words; empty for what is unset."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key.replace('_', ' ')} {_text(item)}" for key, item in value.items() if item not in ("", {}, None)
        )
    if isinstance(value, list):
        return "; ".join(map(_text, value))
    return {True: "yes", False: "no", None: ""}[value] if isinstance(value, bool | None) else str(value)
