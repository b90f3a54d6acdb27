"""Gates: files as written, rules as judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmcompress.evaluation.accuracy import gate as gates
from vlmcompress.evaluation.accuracy.compare import by_family, compare, families, pairs
from vlmcompress.evaluation.accuracy.gate import GateFile, SpeedRule, SuiteRules
from vlmcompress.evaluation.results import Bench, Divergence, Ratio, Results, Scored, Side, Suite
from vlmcompress.utils.errors import UserError


def scored(suite: str, n: int, lost: dict[str, int]) -> list[Scored]:
    """n questions in turn about charts and counts, the first of each family lost."""
    left, samples = dict(lost), []
    for i in range(n):
        family = ("chart", "count")[i % 2]
        left[family] = left.get(family, 0) - 1
        samples.append(
            Scored(id=f"{suite}{i}", suite=suite, family=family, question="", expected="", baseline="", candidate="",
                   baseline_score=1.0, candidate_score=float(left[family] < 0), image=f"{i}")
        )  # fmt: skip
    return samples


def suite(name: str, samples: list[Scored], moved: float | None = 0.01, unparsed: int = 0) -> Suite:
    return Suite(
        name=name, metric="exact_match", source="", sha256="", samples=len(samples), available=len(samples), seed=0,
        max_tokens=8, overall=compare(*pairs(samples)), families=families(by_family(samples)), agreement=1.0,
        unparsed=(0, unparsed),
        divergence=None if moved is None else Divergence(n=1, mean=moved, median=moved, p95=moved, same_first=1.0),
    )  # fmt: skip


def bench(**ratios: Ratio) -> Bench:
    return Bench(load="closed:8", requests=1, out_tokens=1, source="", sizes=[], repeats=3, order=[], tool="", runs=[],
                 summary={"serve": {"cold": ratios}})  # fmt: skip


def ratio(middle: float, low: float, high: float, higher: bool = True) -> Ratio:
    ends = {"low": low, "high": high, "interval": (low, high)}
    return Ratio(baseline=1, candidate=middle, ratio=middle, **ends, higher_is_better=higher, unit="")


def results(
    n: int = 1000, lost: dict[str, int] | None = None, sizes: tuple[int, int] = (100, 50), **changes
) -> Results:
    samples = scored("world", n, lost or {})
    return Results(
        created="", version="", samples=samples, bench=changes.pop("bench", None),
        baseline=Side(name="b", path="b", weight_bytes=sizes[0]),
        candidate=Side(name="c", path="c", weight_bytes=sizes[1]),
        suites=[suite("world", samples, **changes)] if n else [],
    )  # fmt: skip


def judged(gate: GateFile, measured: Results) -> dict[str, str]:
    return {rule.name: rule.verdict for rule in gates.judge(measured, gate).rules}


def test_accuracy_overall_and_by_family() -> None:
    """60 of 500 charts lost: 6 points overall, 12 in one family, none in the other."""
    measured = results(lost={"chart": 60})
    gate = GateFile(suites={"*": SuiteRules(margin=0.03, families="all", family_margin=0.05)})
    assert judged(gate, measured) == {"world: accuracy": "fail", "world: chart": "fail", "world: count": "pass"}
    mild = GateFile(suites={"world": SuiteRules(margin=0.1, families={"chart": 0.2})})
    assert judged(mild, measured) == {"world: accuracy": "pass", "world: chart": "pass"}
    assert gates.judge(measured, mild).verdict == "pass"
    rule = gates.judge(measured, gate).rules[0]
    assert rule.value.startswith("-6.0 points (-7.") and rule.limit == "-3.0 points"
    named = [(rule.suite, rule.family, rule.margin) for rule in gates.judge(measured, gate).rules]
    assert named == [("world", None, 0.03), ("world", "chart", 0.05), ("world", "count", 0.05)]


def test_too_few_samples_are_undecided() -> None:
    gate = GateFile(suites={"*": SuiteRules(margin=0.01, minimum=300)})
    judgement = gates.judge(results(n=200), gate)
    assert judgement.verdict == "inconclusive"
    assert {rule.name: rule.verdict for rule in judgement.rules} == {
        "world: accuracy": "inconclusive", "world: samples": "inconclusive"}  # fmt: skip
    assert "200 samples can't tell; about 168 more would" in judgement.rules[0].reason
    assert "100 more" in judgement.rules[1].reason


@pytest.mark.parametrize(
    "rules, changes, verdict",
    [
        (SuiteRules(margin=0.05, unparsed=0.02), {"unparsed": 20}, "pass"),
        (SuiteRules(margin=0.05, unparsed=0.02), {"unparsed": 21}, "fail"),
        (SuiteRules(margin=0.05, divergence=0.02), {"moved": 0.01}, "pass"),
        (SuiteRules(margin=0.05, divergence=0.02), {"moved": 0.03}, "fail"),
        (SuiteRules(margin=0.05, divergence=0.02), {"moved": None}, "inconclusive"),
        (SuiteRules(margin=0.05, families=["charts"]), {}, "inconclusive"),
    ],
)
def test_other_rules_of_a_suite(rules, changes, verdict) -> None:
    assert gates.judge(results(**changes), GateFile(suites={"world": rules})).verdict == verdict


@pytest.mark.parametrize(
    "metric, at_least, verdict",
    [
        (ratio(1.5, 1.4, 1.6), 1.3, "pass"),
        (ratio(1.5, 1.2, 1.6), 1.3, "inconclusive"),
        (ratio(1.1, 1.0, 1.2), 1.3, "fail"),
        (ratio(0.5, 0.4, 0.6, higher=False), 1.5, "pass"),  # a latency: halved, at worst 0.6 of it
        (ratio(0.5, 0.4, 0.8, higher=False), 1.5, "inconclusive"),
        (ratio(0.5, 0.5, 0.5, higher=False).model_copy(update={"interval": None}), 1.5, "inconclusive"),  # one repeat
        (ratio(1.5, 1.4, 1.6, higher=False), 1.0, "fail"),
    ],
)
def test_speed(metric, at_least, verdict) -> None:
    gate = GateFile(speed=[SpeedRule(metric="m", at_least=at_least)])
    assert judged(gate, results(bench=bench(m=metric))) == {"speed: m, serve cold": verdict}


def test_unmeasured_rules_do_not_pass() -> None:
    gate = GateFile(suites={"chartqa": SuiteRules()}, speed=[SpeedRule(metric="ttft_p50_ms", at_least=1)], size=0.6)
    judgement = gates.judge(results(sizes=(100, 0)), gate)
    assert [rule.verdict for rule in judgement.rules] == ["inconclusive"] * 3
    assert judgement.verdict == "inconclusive"
    other = gates.judge(results(bench=bench(ttft_p90_ms=ratio(1, 1, 1))), gate)
    assert "choose from ttft_p90_ms" in other.rules[1].reason
    everything = GateFile(suites={"*": SuiteRules()})
    assert gates.judge(results(n=0), everything).verdict == "inconclusive"


def test_size() -> None:
    assert judged(GateFile(size=0.5), results()) == {"size": "pass"}
    assert judged(GateFile(size=0.49), results()) == {"size": "fail"}


def test_the_worst_rule_decides() -> None:
    gate = GateFile(suites={"*": SuiteRules(margin=0.05)}, size=0.1, speed=[SpeedRule(metric="m", at_least=1)])
    assert gates.judge(results(), gate).verdict == "fail"


def test_bundled_gates() -> None:
    assert gates.gate_names() == ["default", "demo", "strict"]
    for name in gates.gate_names():
        assert gates.load(name).name == name and gates.about_gate(name).endswith(".")
    assert gates.margins(gates.load("default")) == {"": 0.01}


def test_max_drop() -> None:
    gate = gates.choose_gate(None, ["0.02"])
    assert gate is not None and gates.margins(gate) == {"": 0.02}
    assert gates.judge(results(), gate).verdict == "pass"
    gate = gates.choose_gate(None, ["0.02", "pages=0.01"])
    assert gate is not None and gates.margins(gate) == {"": 0.02, "pages": 0.01}
    assert [rule.name for rule in gates.judge(results(), gate).rules] == ["world: accuracy", "suite pages"]
    assert gates.choose_gate(None) is None and gates.margins(None) == {}
    for share in ("1.0", "pages=", "=", "world=one", "nan"):
        with pytest.raises(UserError, match="for one point write 0.01"):
            gates.choose_gate(None, [share])
    with pytest.raises(UserError, match="exclude each other"):
        gates.choose_gate("default", ["0.01"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("suits: {}", "unknown key 'suits'; did you mean 'suites'?"),
        ("speed: [{metric: m, at_least: 1, stat: cold}]", r"unknown key 'speed.0.stat'; did you mean 'state'\?"),
        ("speed: [{metric: m}]", "'speed.0.at_least' is missing"),
        ("suites: {world: {margin: 5}}", "suites.world.margin is 5, it should be less than 1"),
        ("suites: {world: {families: some}}", "suites.world.families should be all, a list of names"),
        ("about: nothing", "has no rules"),
        ("speed: [{metric: m, at_least: .nan}]", "speed.0.at_least is nan, it should be"),
        ("speed: [{metric: m, at_least: 1, state: warm}]", "speed.0.state is 'warm', it should be 'cold'"),
        ("- 1", "holds no mapping"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        gates.load(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_images_of_the_calibration_can_be_forbidden() -> None:
    gate = gates.GateFile(suites={"*": gates.SuiteRules(calibrated=0.1)})
    for shared, verdict in ((None, "inconclusive"), (100, "pass"), (101, "fail")):
        measured = results()
        suites = [suite.model_copy(update={"calibrated": shared}) for suite in measured.suites]
        rule = gates.judge(measured.model_copy(update={"suites": suites}), gate).rules[-1]
        assert (rule.name, rule.verdict) == ("world: images of the calibration", verdict)


def test_no_such_gate(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'strict'"):
        gates.load("strikt")
    with pytest.raises(UserError, match="cannot read gate"):
        gates.load(tmp_path / "none.yaml")
