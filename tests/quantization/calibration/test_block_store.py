"""The store of finished blocks: exact round trip, and nothing survives a change of what it depends on."""

from __future__ import annotations

import torch

from vlmcompress.numerics import NVFP4, Format, round_to_nearest
from vlmcompress.numerics.statistics.kv_range import BINS
from vlmcompress.quantization.calibration.block_store import BlockStore
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
    store = BlockStore(tmp_path / "s", "x", resume=False)
    saved = result()
    store.save(3, saved)
    assert store.has(3) and not store.has(2) and store.finished() == 1
    loaded = store.load(3)
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


def test_kept_only_for_the_same_fingerprint_and_on_request(tmp_path):
    BlockStore(tmp_path / "s", "x", resume=False).save(0, result())
    assert BlockStore(tmp_path / "s", "x", resume=True).has(0)
    assert not BlockStore(tmp_path / "s", "y", resume=True).has(0)
    BlockStore(tmp_path / "s", "y", resume=True).save(0, result())
    assert not BlockStore(tmp_path / "s", "y", resume=False).has(0)


def test_a_half_written_block_does_not_count(tmp_path):
    store = BlockStore(tmp_path / "s", "x", resume=False)
    (store.folder / "layer-0001.part").write_bytes(b"half")
    assert not store.has(1) and store.finished() == 0


def test_remove_leaves_nothing(tmp_path):
    store = BlockStore(tmp_path / "s", "x", resume=False)
    store.save(0, result())
    store.remove()
    assert list(tmp_path.iterdir()) == []
