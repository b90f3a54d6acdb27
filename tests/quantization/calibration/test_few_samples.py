"""Calibration with next to no data: GPTQ's Gram matrix is singular. It is damped, reported, and still better than rounding."""

from __future__ import annotations

import json

import torch

from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli, numerics
from vlmcompress.cli import _process as terminal
from vlmcompress.export import manifest
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import GroupStats
from vlmcompress.quantization.calibration.solve import BlockResult, warnings
from vlmcompress.quantization.schemes import gptq, solve


def stats(rows: torch.Tensor) -> GroupStats:
    collector = Collector(rows.shape[1])
    collector.add(rows, torch.full(rows.shape[:1], 2, dtype=torch.uint8))
    return collector.finish()


def test_one_sample(tmp_path, capfd, monkeypatch):
    """Exit code 0, the same lines on stderr and in the manifest, and errors of the next samples of the data, which no weight
    was fitted to."""
    monkeypatch.setattr(terminal, "quiet_libraries", lambda: None)
    extra = ["--samples", "1"]
    capfd.readouterr()
    assert (
        cli.main(["quantize", str(DEMO_LLAVA), "-o", str(tmp_path / "out"), "--scheme", "gptq", "--json", *extra]) == 0
    )
    output = capfd.readouterr()
    printed = [line for line in output.err.splitlines() if line.startswith("warning: ")]
    result = manifest.read_manifest(tmp_path / "out")
    assert printed == [f"warning: {line}" for line in result["warnings"]] and len(printed) == 2
    assert json.loads(output.out)["warnings"] == result["warnings"] and "calibrated on 1 samples" in printed[0]
    tokens = sum(result["calibration"]["tokens"].values())
    assert (
        "16 groups of layers" in printed[1]
        and f"{tokens} tokens, 256 inputs" in printed[1]
        and "--samples" in printed[1]
    )
    errors = [max(error.values()) for error in result["errors"].values()]
    assert 0.01 < max(errors) < 0.06  # on its own tokens 0.3%
    assert "measured_on" in json.loads(output.out) and result["calibration"]["held_out"] == 4


def test_one_sample_is_more_than_rounding_to_nearest():
    """Of weights as of one token: the error on it is far below that of rounding, though damping alone made H definite."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128), torch.randn(1, 128)
    options = gptq.Options(group_size=32)
    solution = solve(gptq.SCHEME, [weight], stats(x), options, torch.float32)
    rounded = numerics.round_to_nearest(weight, gptq.SCHEME.scheme(options).weights)
    error, plain = (
        ((q.dequantize(torch.float32) - weight) @ x.T).square().sum() for q in (solution.weights[0], rounded)
    )
    assert error < plain / 10
    assert [detail for _, detail in solution.warnings] == ["1 tokens, 128 inputs"]


def test_a_balance_counts_the_tokens_that_have_weight():
    x = torch.randn(200, 64)
    collector = Collector(64)
    collector.add(x, torch.tensor([2] * 190 + [3] * 10, dtype=torch.uint8))
    stats = collector.finish()
    weight, plain = torch.randn(32, 64), gptq.Options(group_size=32)
    answers = gptq.Options(group_size=32, balance={"text": 0, "vision": 0, "answer": 1})
    assert not solve(gptq.SCHEME, [weight], stats, plain, torch.float32).warnings
    assert [d for _, d in solve(gptq.SCHEME, [weight], stats, answers, torch.float32).warnings] == [
        "10 tokens, 64 inputs"
    ]


def test_inputs_that_are_always_zero_need_no_tokens():
    x = torch.cat([torch.randn(40, 32), torch.zeros(40, 32)], 1)
    assert not solve(gptq.SCHEME, [torch.randn(32, 64)], stats(x), gptq.Options(group_size=32), torch.float32).warnings


def test_more_damping_than_requested():
    """With next to none a singular matrix can't be factorized: ten times more until it can, and both facts are reported."""
    x = torch.randn(8, 128).repeat(100, 1)  # rank 8, though tokens are many
    solution = solve(
        gptq.SCHEME, [torch.randn(32, 128)], stats(x), gptq.Options(group_size=32, damp=1e-12), torch.float32
    )
    ((what, detail),) = solution.warnings
    assert "could not factorize" in what and detail.endswith("instead of 1e-12") and float(detail.split()[0]) > 1e-12


def test_warnings_are_merged():
    """One line for each kind, whatever the number of blocks."""
    results = [BlockResult(warnings=[("a", f"x.{i}", "5"), ("b", "y", "6")][: 2 - i]) for i in range(2)]
    assert warnings(results) == ["a; 2 groups of layers, first x.0: 5", "b; 1 group of layers, first y: 6"]
