"""Figures of joint choices against sums written out, and the evaluator with a reducer against the one of reducers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.kit.places import ROOT
from vlmcompress import models, numerics
from vlmcompress.models.data import Sample
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import Signals, coverage

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import bench_reducers
import joint_choice
import reduced_answers
import teacher_forcing
from joint_choice import PLAIN, Cell

MODELS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "demo-qwen")) for name in ("demo-llava", "demo-qwen")]


@pytest.mark.parametrize("name", MODELS)
def test_answers_from_fewer_tokens_are_those_of_the_bench_of_reducers(name: str) -> None:
    samples, chosen = bench_reducers.samples(name, "validation", 4), parse_reducer("coverage:0.2")
    vlm = models.load(bench_reducers.MODELS[name])
    expected = reduced_answers.Asker(vlm, reduced_answers.prepare(vlm, samples)).ask(chosen)
    with attach(vlm, chosen):
        questions = teacher_forcing.enter_language_model(vlm, joint_choice.encode(samples, vlm))
    logits, label, question = teacher_forcing.predictions(vlm, teacher_forcing.pack(questions))
    exact = teacher_forcing.measure(logits, logits, label, question)["exact"]
    assert exact.bool().tolist() == expected.exact.tolist() and 0 < exact.sum() < len(samples)


def test_inputs_of_one_tensor_are_rounded_once_and_like_each_other() -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    for layer in layers:
        layer.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=arguments)  # type: ignore
    hooks, x, y = teacher_forcing.round_activations(layers), torch.randn(3, 8), torch.randn(3, 8)
    for rows in (x, y, x):
        expected = numerics.round_activations(rows, numerics.ActFormat("int", 8, dynamic=True))
        for layer in layers:
            assert torch.equal(layer(rows), torch.nn.functional.linear(expected, layer.weight))
    assert len(hooks) == 2


def test_a_candidate_without_weights_is_coverage() -> None:
    rows, options = torch.randn(40, 16), coverage.Options(0.3)
    candidate = joint_choice.Candidate("coverage", options, choose=joint_choice.covering)
    signals = Signals((1, 5, 8), features=rows)
    expected = coverage.reduce(signals, options).anchor
    assert torch.equal(candidate.module.reduce(signals, options).anchor, expected)
    # the gains of all but token 3 count next to nothing
    score = torch.zeros(40).index_fill(0, torch.tensor(3), 1e3)
    assert joint_choice.covering(rows, 1, score).tolist() == [3]


def rows_of(right: dict[Cell, str]) -> list[dict]:
    """Rows of a model with four questions; -log p is 1 where an answer is wrong."""
    return [
        {"model": "demo-m", "cell": cell.key, "exact": exact, "nll": [1.0 - int(letter) for letter in exact]}
        for cell, exact in right.items()
    ]


def test_figures_against_sums_written_out(tmp_path: Path) -> None:
    name = next(iter(joint_choice.CANDIDATES))
    plain, joint = joint_choice.SCORERS
    right = {
        Cell(PLAIN, "all"): "1111",
        Cell(PLAIN, "coverage", 0.3): "1110",
        Cell(PLAIN, f"{name}, MXFP4", 0.3): "1110",
        Cell("MXFP4", "all"): "1101",
        Cell("MXFP4", "coverage", 0.3): "1000",
        Cell("MXFP4", "coverage", 0.3, reduced_calibration=True): "1100",
        Cell("MXFP4", name, 0.3): "1110",
        Cell(PLAIN, plain, 0.3): "1111",
        Cell(PLAIN, joint, 0.3): "1110",
        Cell("NVFP4", "all"): "1111",
        Cell("NVFP4", "coverage", 0.3): "1110",
        Cell("NVFP4", plain, 0.3): "1110",
        Cell("NVFP4", joint, 0.3): "1110",
    }
    questions = [Sample(str(number), [], "q", "a", "read") for number in range(4)]
    results = joint_choice.summarise(rows_of(right), {"demo-m": questions})
    (row, other), (figure, *learned), (scorers,) = results["rows"], results["candidates"], results["scorers"]
    parts = ("quantized", "reduced", "both", "reduced_calibration")
    assert [row[part]["points"][0] for part in parts] == [-25, -25, -75, 25] and "reduced_calibration" not in other
    # the differences by question are 0, -1, 0, 0: 1000 - 1101 - 1110 + 1111
    interaction = torch.tensor([0.0, -1, 0, 0])
    half = 196 * float(interaction.std(correction=0)) / 2
    assert row["interaction"]["points"] == [-25, pytest.approx(half, abs=0.01)]
    assert row["interaction"]["nats"][0] == 0.25
    assert figure["quantized"]["points"][0] == 50 and figure[PLAIN]["points"] == [0, 0]
    assert [(each["choice"], each[PLAIN]["points"][0]) for each in learned] == [(plain, 25), (joint, 0)]
    assert scorers[PLAIN]["points"][0] == -25 and scorers["quantized"]["points"][0] == 0
    text = joint_choice.render({"test": results, "validation": joint_choice.EMPTY})
    assert "| m | MXFP4 | 30% | -25.0 ±42.4 | -25.0 ±42.4 | -75.0 ±42.4 * | -25.0 ±42.4 |" in text
    assert f"| model | format | kept | split | {name} | {plain} | {joint} |" in text
    assert "| m | MXFP4 | 30% | test | +50.0 ±49.0 * |  |  |" in text
    assert "| m | 16 bits | 30% | test | +0.0 ±0.0 | +25.0 ±42.4 | +0.0 ±0.0 |" in text
    assert text.endswith("| m | NVFP4 | 30% | +0.0 ±0.0 |\n| m | 16 bits | 30% | -25.0 ±42.4 |")


def test_settings_are_distinct() -> None:
    keys = [cell.key for cell in joint_choice.cells([*joint_choice.CANDIDATES, *joint_choice.SCORERS])]
    assert len(keys) == len(set(keys))
