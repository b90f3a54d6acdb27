"""The Triton kernels against the torch functions whose place they take on a GPU; without one, in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from tests.kit.quant_data import inputs, statistics, weight
from vlmcompress.numerics import NVFP4, Format, find_global_scale, find_params
from vlmcompress.quantization.schemes import _columns, _local_search, _ranges, gptq

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None, reason="triton is not part of the CPU's environment: pip install triton"
    ),
]
FORMATS = [Format("int", 4, 48), Format("int", 3, 24, symmetric=False), Format("int", 2, -1, symmetric=False), NVFP4]
ROWS, WIDTH = 40, 144  # rows do not fill the last program, nor columns the last block


@pytest.fixture
def triton_kernels(monkeypatch):
    """The kernels, which everything here takes for its device's."""
    from vlmcompress.quantization.schemes import _triton_kernels

    def use() -> None:
        for module in (_columns, _ranges, _local_search):
            monkeypatch.setattr(module, "kernels", lambda _device, _fmt: _triton_kernels)

    return use


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("actorder", ["static", None])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_visiting_and_searching_columns(fmt, actorder, sweeps, triton_kernels):
    """The same codes, but where a value sits on a boundary, from where a row continues differently."""
    w, stats = weight(ROWS, WIDTH).to(DEVICE), statistics(inputs(WIDTH, tokens=600).to(DEVICE))
    feedback = gptq.SCHEME.prepare([w], stats, gptq.Options(actorder=actorder))
    shared = find_global_scale([w]) if fmt.nvfp4 else None
    params = find_params(w, fmt, scale_dtype=torch.bfloat16, global_scale=shared)

    def codes(block: int, sweeps: int) -> torch.Tensor:
        return _columns.quantize_columns([w], feedback, [params], fmt, block, sweeps, shared)[0].q.float()

    blocks = (128, 48, 1000)
    plain = codes(128, 0)
    expected = [codes(block, sweeps) for block in blocks]
    assert sweeps == 0 or (expected[0] != plain).any()
    triton_kernels()
    for block, torch_codes in zip(blocks, expected, strict=True):
        assert (codes(block, sweeps) == torch_codes).all(1).double().mean() >= 0.9


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_range_errors(fmt, triton_kernels):
    """The errors of each range, and the ranges chosen by them."""
    w, counts = weight(ROWS, WIDTH).to(DEVICE), torch.rand(WIDTH, device=DEVICE)
    kwargs = {"scale_dtype": torch.bfloat16, "global_scale": find_global_scale([w]) if fmt.nvfp4 else None}
    expected = _ranges.ranges_of_least_error(w, counts, fmt, 9, **kwargs)
    plain = [tensor if tensor is None else tensor[None] for tensor in find_params(w, fmt, **kwargs)]
    errors = _ranges._errors(w, *plain, counts, fmt)
    triton_kernels()
    torch.testing.assert_close(_ranges.kernels(w.device).range_errors(w, *plain, counts, fmt), errors)
    scale, zero = _ranges.ranges_of_least_error(w, counts, fmt, 9, **kwargs)
    assert (scale == expected[0]).double().mean() >= 0.99
    assert zero is None or (zero == expected[1]).double().mean() >= 0.99
