"""Results of finished blocks in a work folder: an exact round trip."""

from __future__ import annotations

import torch

from tests.kit.work import begun
from vlmcompress.numerics import NVFP4, Format, round_to_nearest
from vlmcompress.numerics.statistics.kv_range import BINS
from vlmcompress.quantization.calibration.block_store import load_block, save_block
from vlmcompress.quantization.calibration.solve import BlockResult


def result() -> BlockResult:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    result = BlockResult()
    result.weights["a.b"] = round_to_nearest(weight, Format("int", 4, 32, symmetric=False), scale_dtype=torch.bfloat16)
    result.weights["a.c"] = round_to_nearest(weight, Format("float", 8, -1))
    result.weights["a.d"] = round_to_nearest(weight, NVFP4)
    result.smoothing["norm"] = torch.rand(128)
    result.multiplied["router"] = torch.rand(128)
    result.input_scales["a.b"] = torch.tensor([0.25])
    result.kv_ranges["attn"] = torch.rand(2, 3, 1 + BINS, dtype=torch.float64)
    result.errors = {"a.b": {"vision": 0.125}}
    result.maxima = {"a.b": {"vision": 1.0}}
    result.warnings = [("what", "a.b", "how much")]
    return result


def test_round_trip_is_exact(tmp_path):
    work, saved = begun(tmp_path / "out"), result()
    save_block(work, 3, saved)
    assert work.has("layer-0003") and not work.has("layer-0002")
    loaded = load_block(work, 3)
    assert loaded.errors == saved.errors and loaded.warnings == saved.warnings and loaded.maxima == saved.maxima
    for kind in ("smoothing", "multiplied", "input_scales", "kv_ranges"):
        assert getattr(loaded, kind).keys() == getattr(saved, kind).keys()
        assert all(torch.equal(getattr(loaded, kind)[name], value) for name, value in getattr(saved, kind).items())
    for name, weight in saved.weights.items():
        again = loaded.weights[name]
        assert again.format == weight.format
        assert torch.equal(again.q.view(torch.int8), weight.q.view(torch.int8))
        assert torch.equal(again.step, weight.step) and again.scale.dtype == weight.scale.dtype
        assert (again.zero_point is None) == (weight.zero_point is None)
        assert weight.zero_point is None or torch.equal(again.zero_point, weight.zero_point)
