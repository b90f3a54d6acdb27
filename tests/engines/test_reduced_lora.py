"""LoRA adapters on reduced checkpoints in the real vLLM engine: answers are those of transformers with the adapter merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.kit import reduced_cases as cases
from tests.kit.engine import asked
from tests.kit.places import DEMOS
from tests.kit.reduced_serving import CACHED, CHUNKED, TOKENS, check
from vlmcompress.models import VLM

pytestmark = [pytest.mark.engine, pytest.mark.slow]
RANK, SCALE = 4, 2


def adapter(vlm: VLM, folder: Path) -> dict[str, torch.Tensor]:
    """Write one of random numbers for the language model's queries and values; what it adds to each weight."""
    draw = torch.Generator().manual_seed(0)
    tensors, added = {}, {}
    for name, module in vlm.model.named_modules():
        if "language_model" in name and name.endswith(("q_proj", "v_proj")):
            a = torch.randn(RANK, module.in_features, generator=draw) / module.in_features**0.5
            b = torch.randn(module.out_features, RANK, generator=draw)
            tensors |= {f"base_model.model.{name}.lora_{side}.weight": part for side, part in (("A", a), ("B", b))}
            added[f"{name}.weight"] = SCALE * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.mark.parametrize(
    ("name", "reducer"),
    [("llava", "dart:0.5"), ("qwen", "divprune:0.5")],
)
def test_answers_are_those_of_the_merged_model(tmp_path, name, reducer):
    """Oracle: transformers in float32 with the same reducer attached and the adapter added to its weights."""
    pytest.importorskip("vllm")
    source = DEMOS / f"demo-{name}"
    vlm = cases.loaded(source)
    requests = [cases.request(vlm, turns, tmp_path / "images") for turns in cases.questions(8, name)]
    plain = cases.reference(vlm, reducer, requests, TOKENS)
    for key, value in adapter(vlm, tmp_path / "adapter").items():
        vlm.model.get_parameter(key).data += value
    expected = cases.reference(vlm, reducer, requests, TOKENS)
    assert all(answer["tokens"] != other["tokens"] for answer, other in zip(plain, expected, strict=True))
    job = {
        "folder": str(cases.reduced(source, tmp_path / "model", reducer)),
        "adapter": str(tmp_path / "adapter"),
        "settings": CHUNKED | CACHED | {"enable_lora": True, "max_lora_rank": 8},
        "passes": 1,
        "max_tokens": TOKENS,
        "requests": requests,
    }
    check(*asked("reduced", [job]), expected)
