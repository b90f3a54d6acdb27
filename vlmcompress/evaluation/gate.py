"""Gates: what a candidate must hold, as a YAML file, and how measured results are judged by it.

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

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import vlmcompress
from vlmcompress.common import yaml_files as _yaml
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.results import Gate, Results, State, Verdict

Share = Annotated[float, Field(gt=0, lt=1)]
ANY = "*"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SuiteRules(_Strict):
    """What a suite must hold; see the module. Families that a list or `all` names have `family_margin`, else `margin`."""

    margin: Share = 0.01
    families: Literal["all"] | list[str] | dict[str, Share] = []
    family_margin: Share | None = None
    minimum: int = Field(default=0, ge=0)
    unparsed: float | None = Field(default=None, ge=0, le=1)
    divergence: float | None = Field(default=None, ge=0)


class SpeedRule(_Strict):
    """`metric` of a benchmark must be `at_least` so many times as good as the baseline's."""

    metric: str
    mode: Literal["serve", "offline"] = "serve"
    state: State = "cold"
    at_least: float = Field(gt=0)


class GateFile(_Strict):
    """A gate as it's written; `name` is that of its file."""

    name: str = ""
    about: str = ""
    suites: dict[str, SuiteRules] = {}
    speed: list[SpeedRule] = []
    size: float | None = Field(default=None, gt=0)


def judge(results: Results, gate: GateFile) -> Gate:
    """Judge results by a gate. The verdict is the worst of its rules: fail, then inconclusive, then pass."""
    from vlmcompress.evaluation import rules

    found = []
    named = {suite.name for suite in results.suites}
    for name, asked in gate.suites.items():
        suites = [s for s in results.suites if s.name == name or (name == ANY and s.name not in gate.suites)]
        for suite in suites:
            found += rules.accuracy(results, suite, asked)
        if (not suites and name != ANY) or not named:
            found.append(rules.missing(f"suite {name}", "no such suite was measured"))
    found += [rules.speed(results, rule) for rule in gate.speed]
    if gate.size is not None:
        found.append(rules.size(results, gate.size))
    order: list[Verdict] = ["fail", "inconclusive", "pass"]
    return Gate(name=gate.name, verdict=min((r.verdict for r in found), key=order.index), rules=found)


def chosen(file: str | Path | None, max_drop: float | None) -> GateFile | None:
    """The gate that the command line asks for: a file or bundled gate, or a drop that is allowed; None for neither."""
    if file is not None and max_drop is not None:
        raise UserError("--gate and --max-drop exclude each other; write the margin into the gate file")
    if max_drop is None:
        return None if file is None else load(file)
    if not 0 < max_drop < 1:
        raise UserError(f"--max-drop {max_drop:g} is no share between 0 and 1; for one point write 0.01")
    return GateFile(name=f"max-drop {max_drop:g}", suites={ANY: SuiteRules(margin=max_drop)})


def margins(gate: GateFile | None) -> dict[str, float]:
    """Suite -> margin; that of all other suites is under ""."""
    return {"" if name == ANY else name: asked.margin for name, asked in gate.suites.items()} if gate else {}


def names() -> list[str]:
    """The bundled gates."""
    return sorted(_bundled())


def about(name: str) -> str:
    """What a bundled gate says of itself."""
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
    """Gates are in the package when installed, beside it in a checkout."""
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
