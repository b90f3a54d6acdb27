"""The real vLLM engine loads our checkpoints and answers as transformers does with the same files.

Three checkpoints, chosen so that between them they read every storage format: zero points and a mixed-precision config with an
FP8 tower; INT8 with FP8 key and value scales; 4-bit weights with INT8 activations, next to biases.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.kit import rtn, vllm_answers
from tests.kit.engine import asked
from tests.kit.inputs import encode
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.export.convert import convert
from vlmcompress.utils.registry import FORMATS

pytestmark = pytest.mark.engine
CASES = {
    "llava": ("w4-asymmetric", "fp8", False),
    "qwen2-5-vl": ("int8", None, True),
    "qwen2-vl": ("w4a8", None, False),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Family -> its compressed checkpoint."""
    by_family = {}
    for family, (scheme, vision, kv_cache) in CASES.items():
        base = tmp_path_factory.mktemp(family)
        source, by_family[family] = build(family, base / "source"), base / "out"
        rtn.write(source, by_family[family], rtn.SCHEMES[scheme], rtn.SCHEMES.get(vision), kv_cache=kv_cache)
    return by_family


@pytest.fixture(scope="module")
def served(folders) -> dict[str, dict]:
    """Family -> what vLLM makes of it."""
    return dict(zip(folders, asked("answers", vllm_answers.jobs(folders.values(), max_tokens=6)), strict=True))


@pytest.mark.parametrize("family", CASES)
def test_answers_like_transformers(family, folders, served):
    """Oracle: transformers on the same checkpoint. Each token of the engine is its best one (BF16 leaves near-ties)."""
    folder, answers = folders[family], served[family]
    if "FP8 KV cache on CPU requires" in answers.get("error", ""):
        pytest.skip("vLLM's CPU build has FP8 caches on processors with AVX-512 alone")
    assert "error" not in answers, answers["error"]
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    spec = models.spec_for(models.read_config(folder))
    vlm = models.VLM(model, AutoProcessor.from_pretrained(folder), spec, folder)
    batch, got = encode(vlm, 1), answers["answers"][0]
    assert got["prompt"] == batch["input_ids"][0].tolist()
    assert vllm_answers.gap(model, batch, got["answer"]) < 0.05
    if CASES[family][2]:
        scales = answers["kv_scales"]
        assert scales and all(pair == pytest.approx([0.02, 0.03], rel=2**-8) for pair in scales)


SAME = {"awq": ("llava", "w4-asymmetric"), "gptq": ("qwen2-5-vl", "w4-symmetric"), "modelopt": ("qwen2-vl", "fp8")}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Format -> a checkpoint in compressed-tensors, and the same in that format."""
    by_format = {}
    for name, (family, scheme) in SAME.items():
        base = tmp_path_factory.mktemp(name)
        rtn.write(build(family, base / "source"), base / "ct", rtn.SCHEMES[scheme])
        convert(base / "ct", base / name, name)
        by_format[name] = base / "ct", base / name
    return by_format


@pytest.fixture(scope="module")
def answers(converted) -> dict[str, list[dict]]:
    folders = [folder for pair in converted.values() for folder in pair]
    records = asked("answers", vllm_answers.jobs(folders, max_tokens=6))
    return {name: records[2 * i : 2 * i + 2] for i, name in enumerate(converted)}


@pytest.mark.parametrize("name", SAME)
def test_the_same_weights_give_the_same_answers_in_every_format(name, answers):
    """Oracle: the compressed-tensors checkpoint with the same codes and scales, token by token."""
    plain, other = answers[name]
    assert "error" not in plain, plain["error"]
    assert "error" not in other, other["error"]
    assert other["answers"] == plain["answers"]


def test_vllm_quantizes_exactly_the_quantized_layers(converted):
    """Oracle: vLLM's own config classes, by the names that it gives to layers."""
    for name, (_, folder) in converted.items():
        config = models.read_config(folder)
        spec, module = models.spec_for(config), FORMATS.get(name)
        block = config["quantization_config"]
        names = [spec.engine_name(linear) for linear in models.linear_names(models.build_meta_model(folder))]
        (naming,) = asked("naming", [{"block": block, "names": names}])
        assert "error" not in naming, naming["error"]
        assert naming["quantized"] == [module.quantizes(block, linear) for linear in names]
        assert True in naming["quantized"] and False in naming["quantized"]
