"""What rounding the inputs of a layer adds to its error, and whose the largest inputs are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kit.places import DEMO_LLAVA
from vlmcompress.models import Group
from vlmcompress.numerics import ActFormat, round_activations
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import MODALITIES, SAMPLE, GroupStats
from vlmcompress.numerics.statistics.tokens import splits
from vlmcompress.quantization.calibration.solve import QuantMethod, solve_block
from vlmcompress.quantization.run import quantize
from vlmcompress.quantization.schemes import fp8_static, int8
from vlmcompress.recipe import resolve


def data(tokens: int = 60, width: int = 96) -> tuple[Tensor, Tensor]:
    """Rows with a few large channels, those of vision others than those of text, and the modality of each row."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3 * tokens, width, generator=random)
    mask = torch.arange(1, 4, dtype=torch.uint8).repeat(tokens)
    x[mask == 2, :5] *= 20
    x[mask == 1, 5:8] *= 10
    return x.bfloat16(), mask


def observed(x: Tensor, mask: Tensor, needs=("gram", "absmax")) -> GroupStats:
    collector = Collector(x.shape[1], needs)
    parts = mask.split(25)
    for part, split in zip(x.split(25), splits(parts, [[i] for i in range(len(parts))], SAMPLE), strict=True):
        collector.add(part, split)
    return collector.finish()


def test_rounding_is_the_engines():
    """Number by number: INT8 with a scale a token, FP8 with one and with a fixed one."""
    x = data()[0].float()[:7]
    whole = round_activations(x, ActFormat("int", 8, dynamic=True))
    for row, rounded in zip(x.tolist(), whole.tolist(), strict=True):
        scale = max(map(abs, row)) / 127
        assert rounded == pytest.approx([round(v / scale) * scale for v in row], abs=1e-5)
    scale = x.abs().amax(1, keepdim=True) / 448
    assert torch.equal(
        round_activations(x, ActFormat("float", 8, dynamic=True)), (x / scale).to(torch.float8_e4m3fn).float() * scale
    )
    fixed = torch.tensor([0.01])
    clipped = (x / fixed).clamp(-448, 448).to(torch.float8_e4m3fn).float() * fixed
    assert torch.equal(round_activations(x, ActFormat("float", 8, dynamic=False), fixed), clipped)
    assert torch.equal(round_activations(torch.zeros(2, 3), ActFormat("int", 8, dynamic=True)), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("module", "balance"), [(int8.SCHEME, "off"), (int8.SCHEME, "ratio"), (fp8_static.SCHEME, "off")]
)
def test_the_error_is_that_of_the_output(module, balance):
    """Of a group before which nothing can be folded, so that inputs stay: |r(X) Q^T - X W^T|^2 / |X W^T|^2 over all tokens."""
    x, mask = data()
    weight = torch.randn(64, x.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    options = module.OPTIONS(balance=balance) if module is int8.SCHEME else module.OPTIONS()
    group, method = Group(0, "g", ("lin",)), QuantMethod(module, options)
    result = solve_block([group], {"lin": weight}, {"g": observed(x, mask)}, method, torch.bfloat16)
    q, act = result.weights["lin"].dequantize(torch.float32), method.scheme.activations
    y = round_activations(x, act, result.input_scales.get("lin")) @ q.T
    for code, name in enumerate(MODALITIES, start=1):
        rows, outputs = mask == code, x.float()[mask == code] @ weight.float().T
        expected = (y[rows] - outputs).square().sum() / outputs.square().sum()
        alone = ((x.float()[rows] @ q.T) - outputs).square().sum() / outputs.square().sum()
        assert result.errors["lin"][name] == pytest.approx(float(expected), rel=0.1) and expected > 1.2 * alone


def test_smoothed_inputs_are_rounded_smoothed():
    x, mask = data()
    s, weight = torch.rand(x.shape[1]) + 0.5, torch.randn(32, x.shape[1])
    act = ActFormat("int", 8, dynamic=True)
    stats = observed(x, mask).rescaled(s)
    errors = stats.rounding_error(weight * s, weight * s, lambda rows: round_activations(rows, act))
    for code, name in enumerate(MODALITIES, start=1):
        rows = x.float()[mask == code]
        added = ((round_activations(rows / s, act) - rows / s) @ (weight * s).T).square().sum()
        assert errors[name] == pytest.approx(float(added / (rows @ weight.T).square().sum()), rel=1e-4)


def test_whose_maxima():
    x, mask = data()
    biggest = torch.stack([x[mask == code].abs().amax(0) for code in (1, 2, 3)])
    expected = [sum(int(column.argmax()) == i for column in biggest.T) / x.shape[1] for i in range(3)]
    assert list(observed(x, mask).owners().values()) == pytest.approx(expected)
    assert observed(x[mask != 2], mask[mask != 2]).owners().keys() == {"text", "answer"}


def test_smoothquant_of_the_demo_model(tmp_path):
    """The manifest records whose the maxima are, and errors are those of INT8 inputs: several times those of the weights."""
    keys = {"model": str(DEMO_LLAVA), "out": str(tmp_path / "out"), "scheme": "int8", "calibrate": {"samples": 12}}
    result = quantize(resolve(keys).recipe).manifest
    assert len(result["maxima"]) == 16 and all(
        sum(shares.values()) == pytest.approx(1) for shares in result["maxima"].values()
    )
    assert min(min(error.values()) for error in result["errors"].values()) > 1e-5
