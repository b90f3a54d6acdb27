"""MLX's format against a slow packer and, where it is installed, against MLX itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress.cli import main
from vlmcompress.evaluation.doctor.files import diagnose
from vlmcompress.export.convert import convert
from vlmcompress.export.formats import _mlx_config, mlx
from vlmcompress.numerics import MXFP4, MXFP8, NVFP4, ActFormat, Format, QTensor, Scheme, round_to_nearest
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

AFFINE = [
    Format("int", *case) for case in product((2, 3, 4, 5, 6, 8), (32, 64, 128), (True, False)) if case[0] < 8 or case[2]
]
FORMATS = [*AFFINE, Format("int", 4, 256), MXFP4, MXFP8, NVFP4]
ROWS, COLUMNS = 8, 512


def quantized(fmt: Format, dtype: torch.dtype = torch.bfloat16) -> QTensor:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[5] = 0
    return round_to_nearest(weight, fmt, scale_dtype=dtype)


def wide(qt: QTensor) -> QTensor:
    """The matrix with its scales in float32, in which their products with zero points are exact."""
    return replace(qt, scale=qt.scale.float()) if qt.format.kind == "int" else qt


@pytest.mark.parametrize("fmt", AFFINE, ids=str)
def test_affine_codes_are_a_stream_of_bits(fmt):
    """Oracle: the bits of each row written out one by one, and MLX's formula in float64."""
    qt = wide(quantized(fmt))
    stored = mlx.FORMAT.tensors(qt, Scheme(fmt))
    groups = COLUMNS // fmt.group
    for row in range(ROWS):
        number = sum(int(word) << (32 * at) for at, word in enumerate(stored["weight"][row].to(torch.int64)))
        codes = [number >> (at * fmt.bits) & (1 << fmt.bits) - 1 for at in range(COLUMNS)]
        scale, bias = stored["scales"][row].double(), stored["biases"][row].double()
        weights = torch.tensor(codes).view(groups, -1) * scale[:, None] + bias[:, None]
        assert torch.equal(weights.float().flatten(), qt.dequantize(torch.float32)[row])


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_mlx_reads_the_same_weights(fmt):
    """Oracle: `mx.dequantize` in float32."""
    mx = pytest.importorskip("mlx.core")
    scheme, qt = Scheme(fmt), wide(quantized(fmt))
    stored = {name: mx.array(tensor.numpy()) for name, tensor in mlx.FORMAT.tensors(qt, scheme).items()}
    numbers = mlx.numbers(scheme)
    weight = mx.dequantize(stored["weight"], stored["scales"], stored.get("biases"), **numbers, dtype=mx.float32)
    weight, expected = torch.from_dlpack(weight), qt.dequantize(torch.float32)
    if fmt.nvfp4:  # mlx-vlm divides the layer's output, not the scales
        assert torch.allclose(weight / stored["weight_global_scale"].item(), expected, rtol=1e-6, atol=0)
    else:
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_without_zero_points_are_exact(dtype):
    for bits in (2, 3, 4, 5, 6, 8):
        qt = quantized(Format("int", bits, 64), dtype)
        stored = mlx.FORMAT.tensors(qt, Scheme(qt.format))
        assert stored["biases"].dtype == dtype
        assert torch.equal(stored["biases"].double(), -(2.0 ** (bits - 1)) * qt.scale.double())


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(Format("int", 7, 64)), "MLX has integers of 2, 3, 4, 5, 6 and 8 bits, not of 7"),
        (Scheme(Format("int", 8, 64, False)), "would round zero points by up to half a step"),
        (Scheme(Format("int", 4, 16)), "MLX has a scale for each 32, 64 or 128 inputs, not for group_size 16"),
        (Scheme(Format("int", 4, -1)), "not for group_size -1"),
        (Scheme(Format("float", 8, -1)), "no kernel for FP8 with a scale per row, block or matrix; use mxfp8"),
        (Scheme(NVFP4, ActFormat("float", 4, dynamic=True)), "no settings of activations; use a weight-only scheme"),
    ],
)
def test_schemes_that_mlx_lacks_are_refused(scheme, message):
    with pytest.raises(UserError, match=message):
        mlx.FORMAT.storage(scheme)


@pytest.mark.parametrize(("bits", "group", "mode"), [(4, 48, "affine"), (7, 64, "affine"), (4, 64, "mxfp4")])
def test_checkpoints_that_an_mlx_folder_cannot_hold_are_refused(bits, group, mode):
    block = {"bits": bits, "group_size": group, "mode": mode}
    with pytest.raises(UserError, match=f"this is '{mode}' with {bits} bits, group_size {group}"):
        mlx.FORMAT.scheme_in(block, ("a", "b", "c"), {"scales": Spec("BF16", (8, 8))}, (8, 512))


@pytest.mark.parametrize("family", ["qwen3-5", "gemma3"])
def test_doctor_accepts_a_folder(family, tmp_path):
    """Tower, head and draft head stay in 16 bits: the block names none of them, as mlx-vlm looks for scales."""
    rtn.write(build(family, tmp_path / "source"), tmp_path / "ct", Scheme(Format("int", 4, 64)))
    convert(tmp_path / "ct", tmp_path / "mlx", "mlx")
    assert all(check.ok for check in diagnose(tmp_path / "mlx")), diagnose(tmp_path / "mlx")


@pytest.mark.slow
def test_folders_of_mlx_vlm_are_read(tmp_path):
    """Oracle: MLX's weights of the folder that mlx-vlm's converter wrote, whose biases are rounded."""
    mx = pytest.importorskip("mlx.core")
    source, folder, dense = (tmp_path / name for name in ("source", "folder", "dense"))
    build("qwen2-5-vl", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(_mlx_config.published(config)))
    paths = ["--hf-path", str(source), "--mlx-path", str(folder)]
    subprocess.run([sys.executable, "-m", "mlx_vlm.convert", *paths, "-q", "--q-bits", "4"], check=True)
    assert main(["export", str(folder), "--format", "bf16", "-o", str(dense)]) == 0
    stored, written = mx.load(str(folder / "model.safetensors")), load_file(dense / "model.safetensors")
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        layer = [stored[f"language_model.model.layers.1.{name}.{part}"] for part in ("weight", "scales", "biases")]
        expected = torch.from_dlpack(mx.dequantize(*layer, group_size=64, bits=4, dtype=mx.float32))
        step = torch.from_dlpack(layer[1].astype(mx.float32)).abs().repeat_interleave(64, 1)
        (weight,) = [weight for key, weight in written.items() if key.endswith(f"layers.1.{name}.weight")]
        assert ((weight.float() - expected).abs() <= step / 8).all()
