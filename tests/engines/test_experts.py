"""Mixtures of experts in vLLM: unquantized, and with 4 bits by the tests' emulation where the processor has no AMX."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.kit import reduced_cases, vllm_answers
from tests.kit.engine import asked
from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.models._experts import Experts
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
ONE_BY_ONE = {"scheme": "none", "reduce": "uniform:1.0", "engine": "transformers"}
# Part of a name -> factor of such weights, so that what experts compute shows in the answers; Gemma 4 has norms after them.
LARGER = {".experts.": 10, "post_feedforward_layernorm_2.": 100, "post_feedforward_layernorm.": 100}
REST = [r"self_attn|\.0\.mlp\."]  # stays as it is: 4-bit kernels of linear layers take no float32
# Family -> type, how far a token may be from transformers' best in log-probability, recipes. In float32 engines agree; in BF16,
# the only type of the Gated DeltaNet's kernel, there are near-ties, and one of the router's sends a token elsewhere.
CASES = {
    "qwen3-vl-moe": (
        torch.float32,
        1e-3,
        {
            "one by one": ONE_BY_ONE,
            "4 bits": {"scheme": "rtn", "skip": REST},
            "asymmetric": {"scheme": "rtn", "options": {"group_size": 64, "symmetric": False}, "skip": REST},
        },
    ),
    "qwen3-5-moe": (torch.bfloat16, 0.1, {"one by one": ONE_BY_ONE, "4 bits": {"scheme": "rtn"}}),
    "glm4v-moe": (
        torch.float32,
        1e-3,
        {"4 bits": {"scheme": "rtn", "skip": [r"self_attn|\.0\.mlp\.|shared_experts"]}},
    ),
    "gemma4-moe": (torch.float32, 1e-3, {"4 bits": {"scheme": "rtn", "skip": [r"self_attn|mlp\.|per_layer"]}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, str], Path]:
    """(family, kind) -> folder."""
    checkpoints = {}
    for family, (_, _, recipes) in CASES.items():
        root = tmp_path_factory.mktemp(family)
        source = reduced_cases.tiny(family, root / "source")
        tensors = {
            name: tensor.mul(next((factor for part, factor in LARGER.items() if part in name), 1))
            for name, tensor in load_file(source / "model.safetensors").items()
        }
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        checkpoints[family, "published"] = source
        for index, (kind, options) in enumerate(recipes.items()):
            out = root / str(index)
            quantize(resolve({"model": str(source), "out": str(out), **options}).recipe)
            checkpoints[family, kind] = out
    return checkpoints


def test_answers_are_those_of_transformers(folders):
    """Oracle: transformers, with the experts' dequantized weights one by one. Each token is its best, and is not when
    the experts are exchanged, so that one read into another's place would show."""
    jobs = vllm_answers.jobs(folders.values(), max_tokens=8)
    types = [str(CASES[family][0]).removeprefix("torch.") for family, _ in folders]
    results = asked("answers", [job | {"dtype": dtype} for job, dtype in zip(jobs, types, strict=True)])
    for ((family, kind), folder), answers in zip(folders.items(), results, strict=True):
        assert "error" not in answers, (family, kind, answers)
        dtype, margin, _ = CASES[family]
        vlm = models.load(folders[family, "published"], dtype=dtype)
        with models.quiet_transformers():
            model = models.open_model(folder, dtype=dtype)[0].eval()
        batches = [encode(vlm, count) for count in (1, 2)]
        for batch, got in zip(batches, answers["answers"], strict=True):
            assert got["prompt"] == batch["input_ids"][0].tolist()
            assert vllm_answers.gap(model, batch, got["answer"]) < margin, (family, kind)
        _exchange(model)
        gaps = [
            vllm_answers.gap(model, batch, got["answer"])
            for batch, got in zip(batches, answers["answers"], strict=True)
        ]
        assert min(gaps) > 0.1, (family, kind)


def _exchange(model: nn.Module) -> None:
    """Put each expert into the place of the one before it."""
    for module in model.modules():
        if isinstance(module, Experts):
            experts = list(module)
            for index in range(len(experts)):
                module[index] = experts[(index + 1) % len(experts)]
