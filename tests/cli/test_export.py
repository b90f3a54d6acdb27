"""`export` through the command line: what they print, and bad input in one line with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import rtn
from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Demo-llava with 4-bit weights, in compressed-tensors."""
    out = tmp_path_factory.mktemp("checkpoint") / "ct"
    rtn.write(DEMO_LLAVA, out, rtn.SCHEMES["w4-symmetric"])
    return out


def test_an_exported_checkpoint_comes_back_equal(checkpoint, tmp_path, capsys):
    assert cli.main(["export", str(checkpoint), "--format", "gptq", "-o", str(tmp_path / "gptq"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["from"] == "compressed-tensors" and output["to"] == "gptq" and output["out"] == str(tmp_path / "gptq")
    assert output["weights_after"] < output["weights_before"]
    assert cli.main(["export", str(tmp_path / "gptq"), "-o", str(tmp_path / "back")]) == 0
    assert "gptq -> compressed-tensors" in capsys.readouterr().out
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert cli.main(["doctor", str(tmp_path / "gptq")]) == 0
    card = (tmp_path / "gptq" / "README.md").read_text()
    assert "Written as compressed-tensors first, then as gptq" in card and (tmp_path / "gptq" / "serve").is_dir()


def test_what_vllm_does_not_load_is_not_offered_to_it(checkpoint, tmp_path, capfd):
    """GPTQ with zero points: neither by quantize's next steps nor by the card, and `serve`, `bench` and `doctor --engine vllm`
    refuse it in a line; transformers is not offered what it loads without scales."""
    out = str(tmp_path / "gptq")
    command = ["quantize", str(DEMO_LLAVA), "-o", out, "--scheme=rtn", "--format=gptq-v2"]
    assert cli.main([*command, "--set", "options.symmetric=false"]) == 0
    output = capfd.readouterr().out
    assert "vlmcompress serve" not in output and "--engine hf" in output
    assert cli.main(["doctor", out]) == 0
    reason = "of gptq-v2 it reads only 4 and 8 bits without zero points"
    assert f"not vLLM: {reason}; transformers (" in capfd.readouterr().out
    for verb in (["serve", out], ["doctor", out, "--engine", "vllm"], ["bench", out, "--baseline", out]):
        assert cli.main(verb) == 2
        assert f"error: vLLM does not load {out}: {reason}; " in capfd.readouterr().err
    rtn.write(DEMO_LLAVA, tmp_path / "fp8", rtn.SCHEMES["fp8"])
    assert cli.main(["export", str(tmp_path / "fp8"), "--format", "modelopt", "-o", str(tmp_path / "modelopt")]) == 0
    ask = ["eval", str(tmp_path / "modelopt"), "--baseline", str(DEMO_LLAVA), "--limit", "1"]
    assert cli.main([*ask, "--engine", "hf"]) == 2
    assert "codes without their scales; take eval --engine vllm (" in capfd.readouterr().err
    assert cli.main(["eval", str(tmp_path / "fp8"), "--baseline", str(DEMO_LLAVA), "--engine", "llamacpp"]) == 2
    assert (
        "it reads GGUF, not compressed-tensors; take eval --engine vllm or hf or mlx (--baseline-engine, "
        in capfd.readouterr().err
    )


def test_export_names_what_it_leaves_out(tmp_path, capsys):
    rtn.write(DEMO_LLAVA, tmp_path / "ct", rtn.SCHEMES["fp8"], kv_cache=True)
    assert cli.main(["export", str(tmp_path / "ct"), "--format", "bf16", "-o", str(tmp_path / "out"), "--json"]) == 0
    output = capsys.readouterr()
    (warning,) = json.loads(output.out)["warnings"]
    assert "as bf16 has no place for them" in warning and output.err.splitlines()[-1] == f"warning: {warning}"
