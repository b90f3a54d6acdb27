"""`solve_block` on a small gated block. Oracle: the block computed in full precision from explicit activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vlmcompress.models import Group
from vlmcompress.numerics import ActFormat, round_activations
from vlmcompress.numerics.statistics.collect import Collector
from vlmcompress.numerics.statistics.inputs import SAMPLE, GroupStats
from vlmcompress.numerics.statistics.tokens import splits
from vlmcompress.quantization import schemes
from vlmcompress.quantization.calibration.solve import QuantMethod, apply, solve_block
from vlmcompress.quantization.schemes import Needs
from vlmcompress.utils.errors import UserError

WIDTH, INNER, TOKENS = 128, 256, 300
GATE_UP = Group(0, "gate_up", ("gate", "up"), "norm", "norm", fused=True)
DOWN = Group(0, "down", ("down",), "up", "linear")


class Norm(nn.Module):
    """Scales channels, as an RMS norm does after dividing by the length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH).mul(0.8).exp())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    """`down(silu(gate(norm x)) * up(norm x))` with a bias in `up`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.nn.functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(x))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().requires_grad_(False)


def observe(block: Block, x: Tensor, needs: frozenset[str]) -> dict[str, GroupStats]:
    mask = torch.where(torch.arange(len(x)) < TOKENS // 2, 2, 1)
    stats = {}
    for name, values in (("gate_up", block.norm(x)), ("down", block.inner(x))):
        collector = Collector(values.shape[1], needs | {"gram"})
        collector.add(values, splits([mask], [[0]], SAMPLE)[0])
        stats[name] = collector.finish()
    return stats


def solve(block: Block, scheme: str, x: Tensor, **options):
    module = schemes.REGISTRY.get(scheme)
    method = QuantMethod(module, module.OPTIONS(**options))
    weights = {name: getattr(block, name).weight for name in ("gate", "up", "down")}
    norms = {"norm": block.norm.weight}
    stats = observe(block, x, method.needs.statistics)
    return solve_block([GATE_UP, DOWN], weights, stats, method, torch.float32, norms=norms)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("scheme", ["awq", "int8"])
def test_weights_are_multiplied_by_what_the_norm_was_divided_by(block, scheme, offset):
    """In 16 bits the quotient is rounded: norm times scale is still the norm, up to float32. A norm may add an offset."""
    x = torch.randn(TOKENS, WIDTH)
    weight = (block.norm.weight - offset).bfloat16()
    block.norm.weight.data = weight.float() + offset
    weights = {name: getattr(block, name).weight for name in ("gate", "up", "down")}
    module = schemes.REGISTRY.get(scheme)
    method = QuantMethod(module, module.OPTIONS())
    stats = observe(block, x, method.needs.statistics)
    result = solve_block(
        [GATE_UP, DOWN], weights, stats, method, torch.float32, norms={"norm": weight}, norm_offset=offset
    )
    stored = Norm()
    stored.weight = nn.Parameter(weight.clone(), requires_grad=False)
    modules = dict(block.named_children()) | {"norm": stored}
    apply(result, modules, offset)
    s = result.smoothing["norm"]
    assert (s != 1).any() and stored.weight.dtype is torch.bfloat16
    torch.testing.assert_close((stored.weight.float() + offset) * s, weight.float() + offset, rtol=1e-5, atol=1e-6)


def test_broken_statistics_name_the_layer(block):
    module = schemes.REGISTRY.get("awq")
    method = QuantMethod(module, module.OPTIONS())
    stats = observe(block, torch.randn(TOKENS, WIDTH), method.needs.statistics)
    stats["down"]._pending["text"][3, 3] = float("inf")
    weights = {name: getattr(block, name).weight for name in ("gate", "up", "down")}
    with pytest.raises(UserError, match="^down: the calibration statistics hold NaN or Inf; collect them again$"):
        solve_block([GATE_UP, DOWN], weights, stats, method, torch.float32)


@pytest.mark.parametrize("scheme", ["awq", "int8"])
def test_smoothing_alone_changes_nothing(block, scheme):
    """Undo the rounding: with the smoothed but unrounded weights the block computes what it did."""
    x = torch.randn(TOKENS, WIDTH)
    before = block(x)
    result = solve(block, scheme, x)
    assert "norm" in result.smoothing
    norm, up = (result.smoothing.get(name, torch.ones(())) for name in ("norm", "up"))
    block.norm.weight /= norm
    block.gate.weight *= norm
    block.up.weight *= norm
    block.up.weight /= up.view(-1, 1)
    block.up.bias /= up
    block.down.weight *= up
    torch.testing.assert_close(block(x), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", ["rtn", "gptq", "awq", "int8", "fp8", "w8a16"])
def test_applied_result_is_close_and_errors_are_true(block, scheme):
    """The reported error of `down` by modality equals the one computed from its explicit input."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, WIDTH)
    before, inner = block(x), block.inner(x)
    weight = block.down.weight.clone()
    result = solve(block, scheme, x)
    apply(result, dict(block.named_children()))
    relative = (block(x) - before).square().sum() / before.square().sum()
    assert 0 < relative < (0.06 if scheme in ("rtn", "gptq", "awq") else 0.003)
    smooth = result.smoothing.get("up", torch.ones(INNER))
    difference = result.weights["down"].dequantize(torch.float32) - weight * smooth
    for modality, rows in (("vision", slice(0, TOKENS // 2)), ("text", slice(TOKENS // 2, None))):
        y, size = inner[rows] / smooth, (inner[rows] @ weight.T).square().sum()
        error = (y @ difference.T).square().sum()
        if scheme == "int8":  # whose inputs an engine rounds; a sample of the tokens tells how much that adds
            rounded = round_activations(y, ActFormat("int", 8, dynamic=True))
            error += ((rounded - y) @ (weight * smooth).T).square().sum()
        near = 0.1 if scheme == "int8" else 1e-2
        assert result.errors["down"][modality] == pytest.approx((error / size).item(), rel=near)


def test_inputs_stay_as_they_are(block):
    weight = block.up.weight.clone()
    solve(block, "awq", torch.randn(TOKENS, WIDTH))
    assert torch.equal(block.up.weight, weight)


def test_no_folding_into_a_layer_that_is_left_alone(block):
    """`up` is skipped, so `down` must not be smoothed: nothing could take the scale in."""
    module = schemes.REGISTRY.get("awq")
    method = QuantMethod(module, module.OPTIONS())
    stats = observe(block, torch.randn(TOKENS, WIDTH), method.needs.statistics)
    result = solve_block([DOWN], {"down": block.down.weight}, stats, method, torch.float32)
    assert result.smoothing == {}
    assert set(result.weights) == {"down"}


def test_without_data_the_error_is_that_of_the_weight(block):
    module = schemes.REGISTRY.get("rtn")
    result = solve_block([DOWN], {"down": block.down.weight}, {}, QuantMethod(module, module.OPTIONS()), torch.float32)
    difference = result.weights["down"].dequantize(torch.float32) - block.down.weight
    expected = difference.square().sum() / block.down.weight.square().sum()
    assert result.errors["down"] == {"weight": pytest.approx(expected.item(), rel=1e-4)}


def test_a_group_can_have_a_method_of_its_own(block):
    """Oracle: each group solved in a run in which all groups have its method; here nothing is smoothed."""
    gptq, rtn = (schemes.REGISTRY.get(name) for name in ("gptq", "rtn"))
    four, two = QuantMethod(gptq, gptq.OPTIONS(group_size=64)), QuantMethod(rtn, rtn.OPTIONS(bits=2, group_size=32))
    mixed = QuantMethod(gptq, four.options, others={(0, "down"): two})
    x = torch.randn(TOKENS, WIDTH)
    weights = {name: module.weight for name, module in block.named_modules() if isinstance(module, nn.Linear)}

    def solved(method):
        return solve_block([GATE_UP, DOWN], weights, observe(block, x, method.needs.statistics), method, torch.bfloat16)

    mixed_result, all_four, all_two = solved(mixed), solved(four), solved(two)
    for name, expected in (("gate", all_four), ("up", all_four), ("down", all_two)):
        assert torch.equal(mixed_result.weights[name].q, expected.weights[name].q)
        assert mixed_result.weights[name].format == expected.weights[name].format
    assert mixed.of(DOWN).scheme == two.scheme and mixed.of(GATE_UP).scheme == four.scheme
    assert mixed.needs.statistics == {"gram"} and two.needs == Needs()
    weighed = QuantMethod(gptq, gptq.OPTIONS(balance="mbq"))
    assert weighed.needs == Needs(frozenset({"gram", "gradient"}))
    assert QuantMethod(rtn, two.options, {(0, "down"): weighed}).needs == weighed.needs
