"""Scores of plain data: each rule, the choice by a look at the baseline, and gates where nothing could be lost."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from tests.kit.echo import Echo, checkpoint, picture, question, write_rows
from vlmcompress.evaluation.accuracy import gate as gates
from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate
from vlmcompress.evaluation.accuracy.free_answers import RULES, named_score
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.report.text import tables
from vlmcompress.evaluation.results import Results
from vlmcompress.utils.errors import UserError


@pytest.mark.parametrize(
    "answer, expected, right",
    [
        ("Red.", "red", {"exact", "normalized", "contains"}),
        ("The  red", "red", {"normalized", "contains"}),
        ("Three!", "3", {"normalized", "contains"}),
        ("There are three people on the platform.", "Three.", {"contains"}),
        ("There are 13 people.", "3", set()),
        ("It costs 1,250.50 dollars.", "1,250.50", {"contains"}),
        ("The sign says: way out", "Way out", {"contains"}),
        ("The way is out of order", "way out", set()),
        ("Nothing there", "no", set()),
        ("No, there is none", "no", {"contains"}),
        ("A", "a", {"exact", "normalized", "contains"}),
        ("(B) a dog", "B", {"contains"}),
        ("The answer is B.", "B", {"contains"}),
        ("I see a dog", "A", set()),
        ("答案是红色的", "红色", {"contains"}),
        ("", "red", set()),
        ("It is a plus.", "+", set()),
        ("1 + 1", "+", {"contains"}),
        ("!", "?", set()),
    ],
)
def test_scores_by_each_rule(answer: str, expected: str, right: set[str]) -> None:
    assert {name for name in ("exact", "normalized", "contains") if RULES[name][0](answer, expected)} == right


EQUAL = [  # a pair by `normalized` in each script: case, Unicode's forms, full stops, digits
    ("CAFE\u0301!", "café"),
    ("Αθήνα.", "ΑΘΉΝΑ"),
    ("Москва\u0301,", "москва\u0301"),
    ("\u200fالقاهرة۔", "القاهرة"),
    ("«שלום»", "שלום"),
    ("दिल्ली।", "दिल्ली"),
    ("९", "9"),
    ("กรุงเทพ!", "กรุงเทพ"),
    ("红色。", "红色"),
    ("か\u3099ん", "がん"),
    ("한국", unicodedata.normalize("NFD", "한국")),
    ("\u22125", "-5"),
    ("-$5", "-5"),
    ("5", "+5"),
]
UNEQUAL = [  # neither by `normalized` nor by `contains`
    ("pêche", "péché"),
    ("νόμος", "νομός"),
    ("мой", "мои"),
    ("عَلَم", "عِلْم"),
    ("עִם", "עַם"),
    ("यह मूल है", "मिल"),
    ("กัน", "กิน"),
    ("ก่า", "กา"),
    ("ปลี", "ปล"),
    ("这里有15个人", "5个"),
    ("ハハ", "パパ"),
    ("안경", "안개"),
    ("-5", "5"),
    ("It is 5.", "-5"),
    ("\u22125 °C", "5"),
    ("-5度", "5度"),
]
FOUND = [
    ("这里有5个人", "5"),
    ("คำตอบคือกิน", "กิน"),
    ("빨간색입니다", "빨간색"),
    ("उत्तर मिल है", "मिल"),
    ("It is -5.", "-5"),
]


def test_answers_in_many_scripts() -> None:
    """Words differ by vowel signs, accents and points, and numbers by their sign; neither by Unicode's form."""
    by_normalized, by_contains = RULES["normalized"][0], RULES["contains"][0]
    for answer, expected in EQUAL:
        assert by_normalized(answer, expected) and by_contains(answer, expected), (answer, expected)
    for answer, expected in UNEQUAL:
        assert not by_normalized(answer, expected) and not by_contains(answer, expected), (answer, expected)
    for answer, expected in FOUND:
        assert by_contains(answer, expected), (answer, expected)
    for name in ("exact", "normalized", "contains", "anls"):
        assert RULES[name][0]("café", unicodedata.normalize("NFD", "café")) == 1
    assert RULES["exact"][0]("红色。", "红色") and not RULES["exact"][0]("-5", "5")


QUESTIONS = [("red", "red"), ("blue", "blue"), ("how many", "3"), ("sign", "way out")] * 30


def compared(folder: Path, baseline, candidate=None, score: str = "auto") -> Results:
    """Both sides answer as two functions of the question say."""
    checkpoint(folder / "model")
    rows = [{"id": str(n), "question": text, "answer": answer} for n, (text, answer) in enumerate(QUESTIONS)]
    data = write_rows(folder / "data.jsonl", *rows)
    before = Echo(lambda request: baseline(question(request)))
    after = Echo(lambda request: (candidate or baseline)(question(request)))
    model = folder / "model"
    return evaluate(model, model, [data], None, EvalOptions(after, before, score=score, margin={"": 0.05}))


ANSWERS = dict(QUESTIONS)


@pytest.mark.parametrize(
    "say, metric",
    [
        (lambda text: ANSWERS[text].upper(), "exact_match"),
        (lambda text: f"the {ANSWERS[text]}!", "normalized_match"),
        (lambda text: f"The picture shows {ANSWERS[text]} here", "contains"),
        (lambda text: "The picture shows what you asked about.", "exact_match"),
    ],
)
def test_the_baselines_answers_choose_the_score(tmp_path: Path, say, metric: str) -> None:
    """The strictest rule that accepts the baseline's answers; the candidate's, which differ, do not count."""
    suite = compared(tmp_path, say, lambda text: "nothing").suites[0]
    assert suite.metric == metric
    assert suite.overall.baseline == (0.0 if "asked about" in say("red") else 1.0) and suite.overall.candidate == 0
    chosen = metric != "exact_match"
    assert bool(suite.choice) == chosen and ("of the baseline's first 64 answers" in suite.choice) == chosen


def test_tables_are_one_reference(tmp_path: Path) -> None:
    """A Markdown table has the separator of several references in it, and is scored as a whole."""
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    file = write_rows(
        tmp_path / "data.jsonl", {"question": "table", "answer": table}, {"question": "text", "answer": "abcd"}
    )
    engine = Echo(lambda request: "| a | b |\n| 1 | 3 |" if question(request) == "table" else "abc")
    model = checkpoint(tmp_path / "model")
    (suite,) = evaluate(model, model, [file], None, EvalOptions(engine, engine, score="edit")).suites
    assert suite.metric == "edit_similarity" and suite.overall.baseline == 0.75


def test_nothing_right_passes_no_gate(tmp_path: Path) -> None:
    """What a user saw: a baseline that is always wrong by exact match, a candidate with the same answers, and a green badge."""
    results = compared(tmp_path, lambda text: f"The picture shows {ANSWERS[text]}.", score="exact")
    gate = gates.judge(results, gates.GateFile(name="g", suites={"*": gates.SuiteRules(margin=0.05, unparsed=0.1)}))
    assert gate.verdict == "inconclusive" and "the baseline scores 0.0%" in gate.rules[0].reason
    text = tables(Findings(results.model_copy(update={"gate": gate})))
    assert "can't tell" in text
    assert "too little for a loss of 5 points to show" in "\n".join(Findings(results).headline)
    auto = compared(tmp_path, lambda text: f"The picture shows {ANSWERS[text]}.")
    assert auto.suites[0].overall.verdict == "pass"
    assert "Scored by `contains`: of the baseline's first 64 answers 0 by exact" in tables(Findings(auto))


def test_a_baseline_in_doubt_is_named_with_the_verdict(tmp_path: Path) -> None:
    """A quarter right, and a quarter without any text: the remedy is in the prompt or the score, not in the candidate."""
    results = compared(tmp_path, lambda text: {"red": "red", "blue": ""}.get(text, "?"), score="exact")
    (line,) = Findings(results).headline
    assert line.endswith(
        "The verdict means little, as the baseline itself scores 25.0% and gives no answer to 25.0% of the samples: "
        "check the prompt or --score."
    )


def test_an_earlier_reports_answers_are_scored_anew(tmp_path: Path) -> None:
    """The baseline may be a report; its answers get the named score, too."""
    from vlmcompress.evaluation.report.files import write_report

    first = compared(tmp_path, lambda text: f"It is {ANSWERS[text]}", score="exact")
    assert first.suites[0].overall.baseline == 0
    write_report(first, tmp_path / "report")
    engine = Echo(lambda request: f"It is {ANSWERS[question(request)]}")
    options = EvalOptions(engine, engine, score="contains")
    again = evaluate(tmp_path / "model", tmp_path / "report", [tmp_path / "data.jsonl"], None, options)
    assert (again.suites[0].overall.baseline, again.suites[0].overall.candidate) == (1, 1)


def test_a_score_from_a_users_file(tmp_path: Path) -> None:
    """A pattern, whose group is the answer and which may find none, and a function from a file."""
    pattern = compared(
        tmp_path, lambda text: f"Answer: {ANSWERS[text]}" if text != "red" else "none", score=r"regex:Answer: (.+)$"
    )
    assert pattern.suites[0].overall.baseline == 0.75 and pattern.suites[0].unparsed == (30, 30)
    file = tmp_path / "mine.py"
    file.write_text("def half(answer, expected):\n    return 0.5 if expected in answer else None\n")
    function = compared(tmp_path, lambda text: ANSWERS[text] if text != "red" else "?", score=f"{file}:half")
    assert function.suites[0].overall.baseline == 0.375 and function.suites[0].metric == f"{file}:half"
    file.write_text("def half(answer, expected):\n    return answer / 2\n")
    with pytest.raises(UserError, match="fails on sample '0'"):
        compared(tmp_path, lambda text: "x", score=f"{file}:half")
    file.write_text("def half(answer, expected):\n    return 2\n")
    with pytest.raises(UserError, match="gives 2 for sample '0'; give 0 to 1"):
        compared(tmp_path, lambda text: "x", score=f"{file}:half")


@pytest.mark.parametrize(
    "name, message",
    [
        ("contain", "is none of auto, exact.*; did you mean 'contains'"),
        ("regex:(", "the pattern is invalid"),
        ("math:nothing", "can't be loaded"),
        ("math:pi", "is no function"),
    ],
)
def test_wrong_scores_are_refused_before_the_engine_starts(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named_score(name)


def test_a_suite_keeps_its_own_score(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    data = write_rows(
        tmp_path / "test.jsonl",
        {"image": picture(tmp_path, "a.png"), "query": "q", "label": ["4"], "human_or_machine": 0},
    )
    engine = Echo(question)
    with pytest.raises(UserError, match="is for your own data; suite chartqa has a score"):
        evaluate(
            tmp_path / "model", tmp_path / "model", ["chartqa"], data, EvalOptions(engine, engine, score="contains")
        )
    assert not engine.asked


def test_any_of_several_answers_is_right(tmp_path: Path) -> None:
    """Rows with the answers of several people, as TextVQA has them; a lone `|` in an answer is its own."""
    checkpoint(tmp_path / "model")
    rows = [
        {"id": "0", "question": "q", "answers": ["a dog", "a dog", "hound"]},
        {"id": "1", "question": "q", "answer": "a|b"},
    ]
    data = write_rows(tmp_path / "data.jsonl", *rows)
    output = Echo(lambda request: "hound" if request.id == "0" else "a|b")
    results = evaluate(tmp_path / "model", tmp_path / "model", [data], None, EvalOptions(output, output, score="exact"))
    assert [sample.baseline_score for sample in results.samples] == [1, 1]
    assert results.samples[0].expected == "a dog | hound"
