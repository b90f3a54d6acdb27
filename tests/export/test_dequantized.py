"""Other tools' checkpoints taken in: auto-round's files, written by auto-round itself, and FP8 quantized anew."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import cli, models
from vlmcompress.export.auto_round import translated
from vlmcompress.export.convert import convert
from vlmcompress.export.formats import gptq
from vlmcompress.export.stored import Stored
from vlmcompress.numerics import Format, round_to_nearest
from vlmcompress.utils.errors import UserError

ROUNDED = "model.language_model.layers.0.mlp.down_proj"
STORED = "language_model.model.layers.0.mlp.down_proj"  # the same on disk


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return build("llava", tmp_path_factory.mktemp("source") / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "symmetric"), [("auto_round", True), ("auto_round:auto_gptq", False)])
def test_auto_rounds_own_files(source, packing, symmetric, tmp_path):
    """Oracle: the weights that auto-round left in the model in memory before it packed them."""
    from auto_round import AutoRound

    vlm = models.load(source)
    rounding = AutoRound(
        vlm.model,
        tokenizer=vlm.processor.tokenizer,
        processor=vlm.processor,
        iters=0,
        bits=4,
        group_size=32,
        sym=symmetric,
        device_map="cpu",
        low_cpu_mem_usage=False,
        enable_torch_compile=False,
        disable_opt_rtn=True,
        to_quant_block_names=vlm.spec.layers,
    )
    rounding.quantize()
    expected = {name: parameter.detach().float() for name, parameter in vlm.model.named_parameters()}
    rounding.save_quantized(str(tmp_path / "theirs"), format=packing)
    convert(tmp_path / "theirs", tmp_path / "ours", "compressed-tensors")
    stored = Stored.of(tmp_path / "ours")
    assert len(stored) == 14 and {scheme.weights.symmetric for scheme in stored.schemes.values()} == {symmetric}
    for name in stored:
        weight = stored[name][0].dequantize(torch.float32)
        torch.testing.assert_close(weight, expected[f"{name}.weight"], rtol=2**-7, atol=2**-10 * weight.abs().max())


def test_auto_rounds_config():
    block = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    extra = {"lm_head": {"bits": 8}, ".*mlp.*": {"group_size": 32}}
    config = translated(block | {"extra_config": extra, "block_name_to_quantize": "language_model.layers"})
    assert config["checkpoint_format"] == "gptq"
    packed = {"qweight": None}
    scheme = {
        name: gptq.FORMAT.scheme_in(config, (name,), packed, (8, 8)).weights
        for name in ("a.lm_head", "b.mlp.up_proj", "b.self_attn.o_proj", "not_lm_head")
    }
    assert [(fmt.bits, fmt.group) for fmt in scheme.values()] == [(8, 128), (4, 32), (4, 128), (4, 128)]
    assert gptq.FORMAT.quantizes(config, "model.language_model.layers.0.mlp.up_proj")
    assert gptq.FORMAT.quantizes(config, "language_model.model.layers.0.mlp.up_proj")
    assert not gptq.FORMAT.quantizes(config, "model.vision_tower.encoder.layers.0.self_attn.k_proj")
    assert translated(block | {"packing_format": "auto_round:auto_awq"})["quant_method"] == "awq"
    assert translated(block | {"packing_format": "auto_round:exllamav2"})["checkpoint_format"] == "gptq_v2"
    for other in ({"data_type": "mx_fp"}, {"act_bits": 8}, {"extra_config": ["lm_head"]}):
        with pytest.raises(UserError, match="integers packed like GPTQ's or AutoAWQ's"):
            translated(block | other)


def run(capsys, *arguments):
    code = cli.main([*map(str, arguments)])
    return code, *capsys.readouterr()


def test_fp8_is_quantized_anew_in_one_step(source, tmp_path, capsys):
    """Oracle: rounding to nearest, by hand, of the FP8 codes times their scales in 16 bits."""
    fp8, out = tmp_path / "fp8", tmp_path / "out"
    rtn.write(source, fp8, rtn.SCHEMES["fp8"])
    rounding = ("--scheme", "rtn", "--set", "options.group_size=32")
    code, _, error = run(capsys, "quantize", fp8, "-o", out, *rounding)
    assert code == 2 and "--from-quantized quantizes what it stands for" in error and error.count("\n") == 1
    assert run(capsys, "quantize", fp8, *rounding, "--from-quantized", "--dry-run")[0] == 0
    code, _, error = run(capsys, "quantize", fp8, "-o", out, *rounding, "--from-quantized")
    assert code == 0, error
    weight = Stored.of(fp8)[ROUNDED][0].dequantize(torch.bfloat16)
    expected = round_to_nearest(weight, Format("int", 4, 32), scale_dtype=torch.bfloat16)
    written = Stored.of(out)[ROUNDED][0]
    assert torch.equal(written.q, expected.q) and torch.equal(written.scale.float(), expected.scale.float())
    manifest = json.loads((out / "vlmcompress.json").read_text())
    assert manifest["model"]["source"] == "fp8" and manifest["recipe"]["from_quantized"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "out"]
    assert "quantization_config" in json.loads((out / "config.json").read_text())
    assert not any("F8" in str(tensor.dtype) for tensor in load_file(out / "model.safetensors").values())


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, f"tensor '{STORED}.weight' has codes (F8_E4M3) without scales"),
        (0, f"a scale in '{STORED}.weight_scale' is 0 over codes that are not"),
        (float("nan"), f"a scale in '{STORED}.weight_scale' is NaN or infinite"),
        (float("inf"), f"a scale in '{STORED}.weight_scale' is NaN or infinite"),
        (-1, f"a scale in '{STORED}.weight_scale' is negative"),
    ],
)
def test_codes_without_a_valid_scale_are_refused(source, scale, message, tmp_path, capsys):
    """Even where the config lists the layer as unquantized; in everything that reads another tool's checkpoint."""
    fp8 = tmp_path / "fp8"
    rtn.write(source, fp8, rtn.SCHEMES["fp8"])
    (fp8 / "vlmcompress.json").unlink()
    weights, config = load_file(fp8 / "model.safetensors"), json.loads((fp8 / "config.json").read_text())
    if scale is None:
        del weights[f"{STORED}.weight_scale"]
        config["quantization_config"]["ignore"].append(ROUNDED)
    else:
        weights[f"{STORED}.weight_scale"][3] = scale
    save_file(weights, fp8 / "model.safetensors")
    (fp8 / "config.json").write_text(json.dumps(config))
    anew = ("--scheme", "rtn", "--set", "options.group_size=32", "--from-quantized")
    calls = [("export", "--format", "bf16", "-o", tmp_path / "out"), ("quantize", *anew, "-o", tmp_path / "out")]
    for verb, *flags in (*calls, ("check", *anew)):
        code, output, error = run(capsys, verb, fp8, *flags)
        assert code == 2 and message in output + error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8"]


def test_fp8_with_the_names_of_comfyui(source, tmp_path, capsys):
    """Its config.json has nothing of FP8; with the block that the message names, the weights are those of the codes."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    rtn.write(source, ours, rtn.SCHEMES["fp8"])
    shutil.copytree(ours, theirs)
    (theirs / "vlmcompress.json").unlink()
    weights, config = load_file(ours / "model.safetensors"), json.loads((ours / "config.json").read_text())
    renamed = {name.replace(".weight_scale", ".scale_weight"): value for name, value in weights.items()}
    save_file(renamed, theirs / "model.safetensors")
    for block in (None, {"quant_method": "fp8"}):
        (theirs / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
        code, _, error = run(capsys, "export", theirs, "-o", tmp_path / "out")
        assert code == (0 if block else 2), error
        assert block or 'add "quantization_config": {"quant_method": "fp8"}' in error
    assert torch.equal(*(Stored.of(folder)[ROUNDED][0].dequantize() for folder in (ours, tmp_path / "out")))


def test_tensors_that_are_not_fp8_are_not_rounded_twice(source, tmp_path, capsys):
    four = tmp_path / "four"
    rtn.write(source, four, rtn.SCHEMES["w4-symmetric"])
    code, _, error = run(capsys, "quantize", four, "-o", tmp_path / "out", "--scheme", "rtn", "--from-quantized")
    assert code == 2 and "takes only FP8" in error and not (tmp_path / "out").exists()
    code, _, error = run(capsys, "quantize", source, "-o", tmp_path / "out", "--scheme", "rtn", "--from-quantized")
    assert code == 2 and "is not quantized" in error


def test_a_config_alone_names_an_unsupported_family(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni"}))
    code, _, error = run(capsys, "check", tmp_path, "--scheme", "rtn")
    assert code == 2 and "model type 'qwen2_5_omni' is not supported: it hears and speaks" in error
