"""transformers loads our checkpoints completely, computes with exactly our weights, and runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

from tests.kit import rtn
from tests.kit.tiny import build

CASES = {
    "mixed": ("w4-asymmetric", "fp8", False),
    "int8": ("int8", "int8", False),
    "w4a8": ("w4a8", None, False),
    "w8a16": ("w8a16", None, False),
    "static and cache": ("fp8-static", None, True),
    "nvfp4": ("nvfp4", "fp8", False),
    "nvfp4a16": ("nvfp4a16", None, False),
    "mxfp4": ("mxfp4", "mxfp8", False),
    "w4a8-fp8": ("w4a8-fp8", None, False),
}


@pytest.fixture(scope="module", params=["llava", "qwen2-5-vl"])
def source(request, tmp_path_factory) -> Path:
    return build(request.param, tmp_path_factory.mktemp("source") / request.param)


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_every_weight_unchanged(source, tmp_path, case):
    """Oracle: transformers' loader. No missing, unexpected or mismatched key; weights equal `QTensor.dequantize`."""
    scheme, vision, kv_cache = CASES[case]
    quantized = rtn.write(
        source, tmp_path / "out", rtn.SCHEMES[scheme], rtn.SCHEMES.get(vision), kv_cache=kv_cache, shard_size="1MB"
    )
    model, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out",
        dtype="auto",
        output_loading_info=True,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    assert not any(info.values()), info
    weights = dict(model.named_parameters())
    for name, (qt, _, _) in quantized.items():
        assert torch.equal(weights[f"{name}.weight"], qt.dequantize(torch.bfloat16)), name
    for name, parameter in AutoModelForImageTextToText.from_pretrained(source, dtype="auto").named_parameters():
        if name.removesuffix(".weight") not in quantized:
            assert torch.equal(parameter, weights[name]), name


@pytest.mark.parametrize("case", CASES)
def test_transformers_runs_every_format(source, tmp_path, case):
    """Scales of another type than the model's would stop attention and static activations."""
    scheme, vision, kv_cache = CASES[case]
    rtn.write(source, tmp_path / "out", rtn.SCHEMES[scheme], rtn.SCHEMES.get(vision), kv_cache=kv_cache)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
