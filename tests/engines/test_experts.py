"""Mixtures of experts in vLLM: unquantized, and with 4 bits by the plugin's emulation where the processor has no AMX."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.kit import reduced_cases, vllm_answers
from tests.kit.engine import asked
from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.compression.quantize import quantize
from vlmcompress.recipe import resolve

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
MIXTURES = ("qwen3-vl-moe", "qwen3-5-moe")
KINDS = {
    "one by one": {"scheme": "none", "reduce": "uniform:1.0", "engine": "transformers"},
    "4 bits": {"scheme": "rtn"},
    "4 bits asymmetric": {"scheme": "rtn", "options": {"group_size": 64, "symmetric": False}},
    "4 bits but one block": {"scheme": "rtn", "skip": ["layers.0.mlp.experts."]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], Path]:
    """(family, kind) -> folder. Weights are large, so that what experts compute shows in the answers."""
    found = {}
    for family in MIXTURES:
        root = tmp_path_factory.mktemp(family)
        source = reduced_cases.tiny(family, root / "source")
        tensors = {
            name: tensor.mul(5) if tensor.ndim == 3 and ".experts." in name else tensor
            for name, tensor in load_file(source / "model.safetensors").items()
        }
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        found[family, "published"] = source
        for index, (kind, given) in enumerate(KINDS.items()):
            if "but one" in kind and family == "qwen3-vl-moe":  # whose first block has no experts
                continue
            out = root / str(index)
            quantize(resolve({"model": str(source), "out": str(out), **given}).recipe)
            found[family, kind] = out
    return found


def test_answers_are_those_of_transformers(folders):
    """Oracle: transformers, with the experts' dequantized weights one by one. Each token is one of its best."""
    results = asked("answers", vllm_answers.jobs(folders.values(), max_tokens=8))
    said = set()
    for ((family, kind), folder), found in zip(folders.items(), results, strict=True):
        assert "error" not in found, (family, kind, found)
        vlm = models.load(folders[family, "published"])
        with models.quiet():
            model = models.open_model(folder, dtype="auto")[0].eval()
        for count, got in enumerate(found["answers"], start=1):
            batch = encode(vlm, count)
            assert got["prompt"] == batch["input_ids"][0].tolist()
            assert vllm_answers.gap(model, batch, got["answer"]) < 0.1, (family, kind)
            said.add((family, kind, tuple(got["answer"])))
    assert len({answer for *_, answer in said}) > len(folders)  # they depend on the images and on the weights
