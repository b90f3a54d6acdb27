"""FP8 in blocks of 128 x 128: oracles are a loop over blocks and compressed-tensors' own decompressor."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

from tests.kit.tiny import build
from vlmcompress import cli
from vlmcompress.evaluation.doctor.files import diagnose
from vlmcompress.export.stored import Stored
from vlmcompress.numerics import _rounding, round_to_nearest
from vlmcompress.quantization.schemes import fp8_block

FORMAT = fp8_block.SCHEME.scheme(fp8_block.Options()).weights


def test_a_loop_over_blocks():
    """With blocks that the edges cut, a block of zeros, and scales in 16 bits."""
    torch.manual_seed(0)
    for rows, columns in ((256, 128), (300, 200), (64, 384)):
        weight = torch.randn(rows, columns, dtype=torch.bfloat16)
        weight[:128, :128] = 0
        for dtype in (torch.float32, torch.bfloat16):
            rounded = round_to_nearest(weight, FORMAT, scale_dtype=dtype)
            assert rounded.scale.shape == (-(-rows // 128), -(-columns // 128)) and rounded.scale.dtype == dtype
            expected = torch.empty(rows, columns)
            for top in range(0, rows, 128):
                for left in range(0, columns, 128):
                    part = weight[top : top + 128, left : left + 128].float()
                    scale = (part.abs().max() / 448).to(dtype).float()
                    scale = scale if scale > 0 else torch.tensor(1.0)
                    codes = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                    expected[top : top + 128, left : left + 128] = codes.float() * scale
            assert torch.equal(rounded.dequantize(torch.float32), expected)


def run(capsys, *arguments):
    code = cli.main([*map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_checkpoint(tmp_path, capsys, monkeypatch):
    """Read back by our reader and by transformers with compressed-tensors: the same weights, by vLLM's names and block.

    Rows are taken a few at a time, as those of wide layers are.
    """
    monkeypatch.setattr(_rounding, "_CACHED", 1000)
    source, out = build("llava", tmp_path / "source"), tmp_path / "out"
    code, _, error = run(capsys, "quantize", source, "-o", out, "--scheme", "fp8-block")
    assert code == 0, error
    block = json.loads((out / "config.json").read_text())["quantization_config"]
    (group,) = block["config_groups"].values()
    assert group["weights"]["strategy"] == "block" and group["weights"]["block_structure"] == [128, 128]
    assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == ("group", 128)
    assert [check for check in diagnose(out) if not check.ok] == []
    theirs = AutoModelForImageTextToText.from_pretrained(
        out, quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.bfloat16
    )
    stored = Stored.of(out)
    assert len(stored) == 14
    for name, (weight, _, _) in stored.items():
        torch.testing.assert_close(
            theirs.get_parameter(f"{name}.weight").float(),
            weight.dequantize(torch.bfloat16).float(),
            rtol=2**-7,
            atol=0,
        )


def test_layers_that_are_fused_need_whole_blocks(tmp_path, capsys):
    """vLLM refuses a matrix of several whose parts, but for the last, are no whole blocks; so do we, before a run."""
    source = build("llava", tmp_path / "source")
    bare = tmp_path / "bare"
    bare.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 192
    (bare / "config.json").write_text(json.dumps(config))
    rows = json.loads(run(capsys, "plan", bare, "--target", "h100", "--json")[1])["formats"]
    (refused,) = [row["refused"] for row in rows if row["name"] == "fp8-block"]
    assert "gate_proj, up_proj as one matrix, and blocks of 128 rows do not divide" in refused
