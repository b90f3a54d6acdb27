"""Gates: rules in a YAML file that a candidate must keep, and the judging of results by them.

    about: Accuracy within a point, and smaller.
    suites:
      "*":                 # every measured suite; a name is for that suite alone
        margin: 0.01       # the drop that is allowed, in shares
        families: all      # or a list, or family -> margin
        family_margin: 0.1
        minimum: 300       # samples
        unparsed: 0.02     # share of the candidate's answers in which no answer was found
        divergence: 0.05   # mean, in nats
    speed:
      - {metric: request_throughput, mode: serve, state: cold, at_least: 1.0}
    size: 0.6              # candidate's weights over the baseline's, at most

A rule whose measurement is missing is inconclusive, never passed. Accuracy is judged by the confidence interval (`compare`),
speed by the repeats: `at_least` is how many times as fast, whichever way the metric counts, and must hold in every repeat to
pass and in none to fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import vlmcompress
from vlmcompress.common import yaml_files as _yaml
from vlmcompress.common.text import points, times
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.results import Comparison, Gate, Results, Rule, Scored, State, Suite, Verdict

Share = Annotated[float, Field(gt=0, lt=1)]
ANY = "*"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SuiteRules(_Strict):
    """Rules of a suite; see the module. Families named by a list or `all` have `family_margin`, if given, else `margin`."""

    margin: Share = 0.01
    families: Literal["all"] | list[str] | dict[str, Share] = []
    family_margin: Share | None = None
    minimum: int = Field(default=0, ge=0)
    unparsed: float | None = Field(default=None, ge=0, le=1)
    divergence: float | None = Field(default=None, ge=0)


class SpeedRule(_Strict):
    """A rule of speed: a benchmark's `metric` must be `at_least` this many times as good as the baseline's."""

    metric: str
    mode: Literal["serve", "offline"] = "serve"
    state: State = "cold"
    at_least: float = Field(gt=0)


class GateFile(_Strict):
    """A gate as its file has it; `name` is the name of the file."""

    name: str = ""
    about: str = ""
    suites: dict[str, SuiteRules] = {}
    speed: list[SpeedRule] = []
    size: float | None = Field(default=None, gt=0)


def judge(results: Results, gate: GateFile) -> Gate:
    """Judge results by a gate. The verdict is the worst of its rules: fail, then inconclusive, then pass."""
    found = []
    named = {suite.name for suite in results.suites}
    for name, asked in gate.suites.items():
        suites = [s for s in results.suites if s.name == name or (name == ANY and s.name not in gate.suites)]
        for suite in suites:
            found += _accuracy(results, suite, asked)
        if (not suites and name != ANY) or not named:
            found.append(_missing(f"suite {name}", "no such suite was measured"))
    found += [_speed(results, rule) for rule in gate.speed]
    if gate.size is not None:
        found.append(_size(results, gate.size))
    order: list[Verdict] = ["fail", "inconclusive", "pass"]
    return Gate(name=gate.name, verdict=min((r.verdict for r in found), key=order.index), rules=found)


def chosen(file: str | Path | None, max_drop: float | None) -> GateFile | None:
    """Make the gate that the command line asks for: a file or bundled gate, or an allowed drop; None for neither."""
    if file is not None and max_drop is not None:
        raise UserError("--gate and --max-drop exclude each other; write the margin into the gate file")
    if max_drop is None:
        return None if file is None else load(file)
    if not 0 < max_drop < 1:
        raise UserError(f"--max-drop {max_drop:g} is no share between 0 and 1; for one point write 0.01")
    return GateFile(name=f"max-drop {max_drop:g}", suites={ANY: SuiteRules(margin=max_drop)})


def margins(gate: GateFile | None) -> dict[str, float]:
    """Map suites to their margins; "" stands for all other suites."""
    return {"" if name == ANY else name: asked.margin for name, asked in gate.suites.items()} if gate else {}


def names() -> list[str]:
    """Names of the bundled gates."""
    return sorted(_bundled())


def about(name: str) -> str:
    """Description of a bundled gate from its own file."""
    return load(name).about


def load(name: str | Path) -> GateFile:
    """Read a gate: a YAML file, or a bundled gate by name.

    Raises:
        UserError: there is no such gate, or it has unknown keys, wrong values or no rules.
    """
    path = Path(name)
    if not (path.exists() or path.suffix or len(path.parts) > 1):
        if path.name not in _bundled():
            raise UserError(f"no bundled gate is called '{name}'{did_you_mean(path.name, _bundled())}")
        path = _bundled()[path.name]
    try:
        gate = GateFile.model_validate({"name": path.stem, **_yaml.read(path, "gate")})
    except ValidationError as error:
        raise UserError(f"gate {path}: {_problem(error)}") from error
    if not gate.suites and not gate.speed and gate.size is None:
        raise UserError(f"gate {path} has no rules; give suites, speed or size")
    return gate


def _bundled() -> dict[str, Path]:
    """Files of the bundled gates: in the package when installed, beside it in a checkout."""
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


def _missing(name: str, reason: str, limit: str = "") -> Rule:
    """Judge a rule inconclusive, as its measurement is missing."""
    return Rule(name=name, verdict="inconclusive", value="not measured", limit=limit, reason=reason)


def _accuracy(results: Results, suite: Suite, asked: SuiteRules) -> list[Rule]:
    """Judge the rules of one suite: accuracy, its families, and counts of samples and answers."""
    from vlmcompress.evaluation.compare import compare, pairs  # needs numpy, which `list` must not load

    samples = [sample for sample in results.samples if sample.suite == suite.name]
    if not samples:
        return [_missing(f"{suite.name}: accuracy", "the results hold no samples of the suite")]
    found = [_drop(suite.name, None, compare(*pairs(samples), margin=asked.margin))]
    found += _families(suite.name, samples, asked)
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
            found.append(_missing(name, "the engine reported no probabilities", limit))
        else:
            mean = suite.divergence.mean
            found.append(_bound(name, mean <= asked.divergence, f"{mean:.4f} nats", limit))
    return found


def _speed(results: Results, asked: SpeedRule) -> Rule:
    """Judge the rule of one benchmark metric."""
    name, limit = f"speed: {asked.metric}, {asked.mode} {asked.state}", f"at least {times(asked.at_least)}"
    metrics = results.bench.summary.get(asked.mode, {}).get(asked.state, {}) if results.bench else {}
    if not metrics:
        return _missing(name, f"run vlmcompress bench; there's no {asked.mode} {asked.state} benchmark", limit)
    if asked.metric not in metrics:
        return _missing(name, f"no such metric{did_you_mean(asked.metric, metrics)}", limit)
    ratio = metrics[asked.metric]
    if ratio.interval is None:
        return _rule(
            name, "inconclusive", "", limit, "one repeat can't tell; run vlmcompress bench with more --repeats"
        )
    middle, (low, high) = ratio.ratio, ratio.interval
    if not ratio.higher_is_better:
        middle, low, high = (1 / value if value > 0 else float("inf") for value in (middle, high, low))
    verdict: Verdict = "pass" if low >= asked.at_least else "fail" if high < asked.at_least else "inconclusive"
    reason = "these repeats can't tell; run more, or longer ones" if verdict == "inconclusive" else ""
    return _rule(name, verdict, f"{times(middle)} ({low:.2f} to {high:.2f})", limit, reason)


def _size(results: Results, most: float) -> Rule:
    """Judge the rule of the weights' size."""
    limit = f"at most {times(most)}"
    before, after = results.baseline.weight_bytes, results.candidate.weight_bytes
    if not before or not after:
        return _missing("size", "the files of a served model are out of reach", limit)
    return _bound("size", after / before <= most, times(after / before), limit)


def _families(suite: str, samples: list[Scored], asked: SuiteRules) -> list[Rule]:
    """Judge the families that a gate names; all of them are none where the data have no families."""
    from vlmcompress.evaluation.compare import by_family, families

    groups = by_family(samples)
    margins = _margins(groups, asked)
    known = {name: group for name, group in groups.items() if name in margins}
    found = families(known, margin=margins) if known else {}
    unknown = [name for name in margins if name not in groups]
    return [_drop(suite, name, one) for name, one in found.items()] + [
        _missing(f"{suite}: {name}", f"no such family{did_you_mean(name, groups)}") for name in unknown
    ]


def _margins(groups: Iterable[str], asked: SuiteRules) -> dict[str, float]:
    """Map the families that the gate asks for to their margins."""
    if isinstance(asked.families, dict):
        return asked.families
    chosen = list(groups) if asked.families == "all" else asked.families
    return {name: asked.family_margin or asked.margin for name in chosen}


def _drop(suite: str, family: str | None, found: Comparison) -> Rule:
    """Judge the accuracy of a suite, or of one of its families."""
    value = f"{points(found.difference)} points ({points(found.low)} to {points(found.high)})"
    reason = ""
    if found.verdict == "inconclusive":
        reason = f"{found.clusters:,} {found.unit} can't tell"
        if found.missing:
            reason += f"; about {found.missing:,} more would, if the difference stays the same"
    return Rule(
        name=f"{suite}: {'accuracy' if family is None else family}",
        verdict=found.verdict,
        value=value,
        limit=f"-{100 * found.margin:.1f} points",
        reason=reason,
        suite=suite,
        family=family,
        margin=found.margin,
    )


def _bound(name: str, holds: bool, value: str, limit: str) -> Rule:
    return _rule(name, "pass" if holds else "fail", value, limit)


def _rule(name: str, verdict: Verdict, value: str, limit: str, reason: str = "") -> Rule:
    return Rule(name=name, verdict=verdict, value=value, limit=limit, reason=reason)
