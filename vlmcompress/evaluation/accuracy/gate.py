"""Gates: rules in a YAML file, and the verdict on results by them.

    about: Accuracy within a point, and smaller.
    suites:
      "*":                 # every measured suite; or the name of one suite
        margin: 0.01       # the allowed drop, as a share
        families: all      # or a list, or family -> margin
        family_margin: 0.1
        minimum: 300       # samples
        unparsed: 0.02     # share of the candidate's texts without a parsable answer
        divergence: 0.05   # mean, in nats
        calibrated: 0      # share of samples with an image that the candidate was calibrated on
    speed:
      - {metric: request_throughput, mode: serve, state: cold, at_least: 1.0}
    size: 0.6              # candidate's weights over the baseline's, at most

A rule without a measurement is inconclusive, never passed. Accuracy is judged by the confidence interval (`compare`), speed by
the interval of the ratio over the repeats: `at_least` is a speed-up, for metrics of either direction. The rule passes if the
whole interval is at least that, and fails if the whole interval is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import vlmcompress
from vlmcompress.evaluation.results import Comparison, Gate, GateRule, Results, Suite, Verdict
from vlmcompress.utils import yaml_files as _yaml
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.text import points, times

Share = Annotated[float, Field(gt=0, lt=1)]
ANY = "*"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SuiteRules(_Strict):
    """Rules of a suite; see the module. Families in a list or `all` have `family_margin`, if set, else `margin`."""

    margin: Share = 0.01
    families: Literal["all"] | list[str] | dict[str, Share] = []
    family_margin: Share | None = None
    minimum: int = Field(default=0, ge=0)
    unparsed: float | None = Field(default=None, ge=0, le=1)
    divergence: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    calibrated: float | None = Field(default=None, ge=0, le=1)


class SpeedRule(_Strict):
    """A benchmark's `metric` must be `at_least` this many times as good as the baseline's."""

    metric: str
    mode: Literal["serve"] = "serve"
    state: Literal["cold"] = "cold"
    at_least: float = Field(gt=0, allow_inf_nan=False)


class GateFile(_Strict):
    """The content of a gate's file; `name` is the name of the file."""

    name: str = ""
    about: str = ""
    suites: dict[str, SuiteRules] = {}
    speed: list[SpeedRule] = []
    size: float | None = Field(default=None, gt=0, allow_inf_nan=False)


def judge(results: Results, gate: GateFile) -> Gate:
    """Judge results by a gate. The verdict is the worst of its rules': fail, then inconclusive, then pass."""
    judged = []
    for name, rules in gate.suites.items():
        suites = [s for s in results.suites if s.name == name or (name == ANY and s.name not in gate.suites)]
        for suite in suites:
            judged += _accuracy(results, suite, rules)
        if (not suites and name != ANY) or not results.suites:
            judged.append(_missing(f"suite {name}", "no such suite was measured"))
    judged += [_speed(results, rule) for rule in gate.speed]
    if gate.size is not None:
        limit = f"at most {times(gate.size)}"
        if (before := results.baseline.weight_bytes) and (after := results.candidate.weight_bytes):
            judged.append(_bound("size", after / before <= gate.size, times(after / before), limit))
        else:
            judged.append(_missing("size", "the files of a served model are out of reach", limit))
    order: list[Verdict] = ["fail", "inconclusive", "pass"]
    verdict = min((rule.verdict for rule in judged), key=order.index)
    return Gate(name=gate.name, verdict=verdict, rules=judged, file=gate.model_dump(mode="json", exclude_defaults=True))


def choose_gate(file: str | Path | None, max_drop: Sequence[str] = ()) -> GateFile | None:
    """The gate of `--gate`, a file or bundled gate, or of `--max-drop`, each SHARE or SUITE=SHARE; None: neither is set."""
    if file is not None and max_drop:
        raise UserError("--gate and --max-drop exclude each other; write the margin into the gate file")
    if not max_drop:
        return None if file is None else load(file)
    suites = {}
    for text in max_drop:
        suite, _, share = text.rpartition("=")
        try:
            suites[suite or ANY] = SuiteRules(margin=share)  # type: ignore[arg-type]  # pydantic reads the number
        except ValidationError as error:
            raise UserError(f"--max-drop {text} is not a share between 0 and 1; for one point write 0.01") from error
    return GateFile(name=f"max-drop {', '.join(max_drop)}", suites=suites)


def margins(gate: GateFile | None) -> dict[str, float]:
    """Suite -> margin; "" for all other suites."""
    return {"" if name == ANY else name: rules.margin for name, rules in gate.suites.items()} if gate else {}


def gate_names() -> list[str]:
    """Names of the bundled gates."""
    return sorted(_bundled())


def about_gate(name: str) -> str:
    """Description of a bundled gate from its own file."""
    return load(name).about


def load(name: str | Path) -> GateFile:
    """Read a gate: a YAML file, or a bundled gate by name.

    Raises:
        UserError: there is no such gate, or it has unknown keys, wrong values or no rules.
    """
    path = Path(name)
    # A word is a bundled gate's name; anything that looks like a path is a path, so that its typing errors are named.
    if not (path.exists() or path.suffix or len(path.parts) > 1):
        if path.name not in _bundled():
            raise UserError(f"no bundled gate is called '{name}'{did_you_mean(path.name, _bundled())}")
        path = _bundled()[path.name]
    try:
        gate = GateFile.model_validate({"name": path.stem, **_yaml.read_yaml(path, "gate")})
    except ValidationError as error:
        raise UserError(f"gate {path}: {_problem(error)}") from error
    if not gate.suites and not gate.speed and gate.size is None:
        raise UserError(f"gate {path} has no rules; give suites, speed or size")
    return gate


def recorded(gate: Gate) -> GateFile | None:
    """The rules that an outcome was judged by; None if they were not kept. Raises `UserError` if they are damaged."""
    try:
        return GateFile.model_validate(gate.file) if gate.file else None
    except ValidationError as error:
        raise UserError(
            f"the report's gate {gate.name} is damaged: {_problem(error)}; judge it again with --gate"
        ) from error


def _bundled() -> dict[str, Path]:
    """Files of the bundled gates: in the package when installed, next to it in a checkout."""
    package = Path(vlmcompress.__file__).parent
    folders = (package / "gates", package.parent / "eval" / "gates")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _problem(error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    where = ".".join(path)
    if first["type"] == "extra_forbidden":
        models: dict[str, type[BaseModel]] = {"suites": SuiteRules, "speed": SpeedRule}
        model = models.get(path[0], GateFile) if len(path) > 1 else GateFile
        return f"unknown key '{where}'{did_you_mean(path[-1], model.model_fields)}"
    if first["type"] == "missing":
        return f"'{where}' is missing; add it"
    if "families" in path:
        return f"{'.'.join(path[: path.index('families') + 1])} should be all, a list of names, or name: margin"
    return f"{where} is {first['input']!r}, it {first['msg'].removeprefix('Input ')}"


def _missing(name: str, reason: str, limit: str = "") -> GateRule:
    """An inconclusive rule, because its measurement is missing."""
    return GateRule(name=name, verdict="inconclusive", value="not measured", limit=limit, reason=reason)


def _accuracy(results: Results, suite: Suite, rules: SuiteRules) -> list[GateRule]:
    """Judge the rules of one suite: accuracy, its families, and counts of samples and answers."""
    from vlmcompress.evaluation.accuracy.compare import (  # needs numpy, which `list` must not load
        by_family,
        compare,
        families,
        pairs,
    )

    samples = [sample for sample in results.samples if sample.suite == suite.name]
    if not samples:
        return [_missing(f"{suite.name}: accuracy", "the results hold no samples of the suite")]
    judged = [_drop(suite.name, None, compare(*pairs(samples), margin=rules.margin))]

    groups = by_family(samples)  # none where the data have no families
    if isinstance(rules.families, dict):
        margins = rules.families
    else:
        names = list(groups) if rules.families == "all" else rules.families
        margins = {name: rules.family_margin or rules.margin for name in names}
    # Families are judged together, as their p-values are corrected for their number (Holm).
    if measured := {name: group for name, group in groups.items() if name in margins}:
        judged += [_drop(suite.name, name, c) for name, c in families(measured, margin=margins).items()]
    judged += [
        _missing(f"{suite.name}: {name}", f"no such family{did_you_mean(name, groups)}")
        for name in margins
        if name not in groups
    ]

    if suite.samples < rules.minimum:
        reason = f"ask {rules.minimum - suite.samples:,} more"
        judged.append(
            GateRule(
                name=f"{suite.name}: samples",
                verdict="inconclusive",
                value=f"{suite.samples:,}",
                limit=f"{rules.minimum:,}",
                reason=reason,
            )
        )
    if rules.unparsed is not None:
        # An answer that is lost in its thoughts has no readable end either.
        share = (suite.unparsed[1] + suite.unfinished[1]) / suite.samples
        limit = f"at most {100 * rules.unparsed:.1f}%"
        judged.append(_bound(f"{suite.name}: unparsed answers", share <= rules.unparsed, f"{100 * share:.1f}%", limit))
    if rules.calibrated is not None:
        name, limit = f"{suite.name}: images of the calibration", f"at most {100 * rules.calibrated:.1f}%"
        if suite.calibrated is None:
            judged.append(
                _missing(name, "the candidate's manifest does not tell which images it was calibrated on", limit)
            )
        else:
            share = suite.calibrated / suite.samples
            judged.append(_bound(name, share <= rules.calibrated, f"{100 * share:.1f}%", limit))
    if rules.divergence is not None:
        name, limit = f"{suite.name}: divergence", f"at most {rules.divergence:g} nats"
        if suite.divergence is None:
            judged.append(_missing(name, "the engine reported no probabilities", limit))
        else:
            mean = suite.divergence.mean
            judged.append(_bound(name, mean <= rules.divergence, f"{mean:.4f} nats", limit))
    return judged


def _drop(suite: str, family: str | None, c: Comparison) -> GateRule:
    """The rule on the accuracy of a suite, or of one of its families."""
    reason = ""
    if c.verdict == "inconclusive":
        reason = f"{c.clusters:,} {c.unit} can't tell"
        if not c.sensitive:
            reason = f"the baseline scores {100 * c.baseline:.1f}%, too little for a loss of the margin to show"
        elif c.missing:
            reason += f"; about {c.missing:,} more would, if the difference stays the same"
            reason += f"; one has {c.largest / c.n:.0%} of the samples" * c.heavy
    return GateRule(
        name=f"{suite}: {'accuracy' if family is None else family}",
        verdict=c.verdict,
        value=f"{points(c.difference)} points ({points(c.low)} to {points(c.high)})",
        limit=f"-{100 * c.margin:.1f} points",
        reason=reason,
        suite=suite,
        family=family,
        margin=c.margin,
    )


def _speed(results: Results, rule: SpeedRule) -> GateRule:
    """Judge the rule of one benchmark metric."""
    name, limit = f"speed: {rule.metric}, {rule.mode} {rule.state}", f"at least {times(rule.at_least)}"
    metrics = results.bench.summary.get(rule.mode, {}).get(rule.state, {}) if results.bench else {}
    if not metrics:
        return _missing(name, f"run vlmcompress bench; there's no {rule.mode} {rule.state} benchmark", limit)
    if rule.metric not in metrics:
        return _missing(name, f"no such metric{did_you_mean(rule.metric, metrics)}", limit)
    ratio = metrics[rule.metric]
    if ratio.interval is None:
        reason = "one repeat can't tell; run vlmcompress bench with more --repeats"
        return GateRule(name=name, verdict="inconclusive", value="", limit=limit, reason=reason)
    low, high = ratio.interval
    # The whole interval has to be on one side of the limit, as for accuracy.
    verdict: Verdict = "pass" if low >= rule.at_least else "fail" if high < rule.at_least else "inconclusive"
    reason = "these repeats can't tell; run more, or longer ones" if verdict == "inconclusive" else ""
    value = f"{times(ratio.gain)} ({low:.2f} to {high:.2f})"
    return GateRule(name=name, verdict=verdict, value=value, limit=limit, reason=reason)


def _bound(name: str, holds: bool, value: str, limit: str) -> GateRule:
    return GateRule(name=name, verdict="pass" if holds else "fail", value=value, limit=limit)
