"""The real vLLM engine loads each tiny checkpoint, answers as transformers does, and names layers as the spec says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.inputs import encode
from vlmcompress import models

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def probed(checkpoint):
    """`probed(family)`: what `engine_probe.py` says about the tiny checkpoint; one engine per family."""
    done: dict[str, dict] = {}

    def get(family: str) -> dict:
        if family not in done:
            pytest.importorskip("vllm")
            command = [sys.executable, "tests/models/engine_probe.py", str(checkpoint(family))]
            env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
            run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
            lines = [line for line in run.stdout.splitlines() if line.startswith("PROBE ")]
            assert lines, run.stderr[-3000:]
            done[family] = json.loads(lines[0].removeprefix("PROBE "))
        return done[family]

    return get


def test_answers_like_transformers(family, probed, loaded):
    """Oracle: transformers. Same prompt tokens; each token of the engine is one of its best (BF16 leaves near-ties)."""
    vlm = loaded(family)
    if vlm.spec.vllm_cpu:
        pytest.skip(vlm.spec.vllm_cpu)
    for count, got in enumerate(probed(family)["answers"], start=1):
        batch = encode(vlm, count)
        assert got["prompt"] == batch["input_ids"][0].tolist()
        answer = torch.tensor([got["answer"]])
        batch["input_ids"] = torch.cat([batch["input_ids"], answer], 1)
        for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
            if name in batch:
                fill = torch.full_like(answer, int(name == "attention_mask"))
                batch[name] = torch.cat([batch[name], fill], 1)
        with torch.no_grad():
            logp = vlm.model(**batch).logits[0, -4:-1].float().log_softmax(-1)
        assert (logp.max(-1).values - logp.gather(1, answer.T)[:, 0]).max() < 0.05


def test_layers_have_the_names_of_the_spec(family, probed, loaded):
    """Every linear layer is in the engine under `engine_name`, or under the fused layer that takes it up."""
    vlm = loaded(family)
    if vlm.spec.vllm_cpu:
        pytest.skip(vlm.spec.vllm_cpu)
    result = probed(family)
    modules = set(result["modules"])
    dropped = _unused_tower_layer(vlm)
    for group in models.resolve(vlm.model, vlm.spec) + models.vision_linears(vlm.model, vlm.spec):
        if group.linears[0].startswith(dropped):
            continue
        names = [vlm.spec.engine_name(name) for name in group.linears]
        if group.fused:
            parent, _, _ = names[0].rpartition(".")
            leaves = [name.rpartition(".")[2] for name in names]
            fused = [name for name, parts in result["fused"].items() if list(parts) == leaves]
            assert any(f"{parent}.{name}" in modules for name in fused), (names, fused)
        else:
            assert set(names) <= modules, names


def _unused_tower_layer(vlm) -> tuple[str, ...]:
    """LLaVA reads features before the tower's last layer; the engine leaves that layer out."""
    layer = getattr(vlm.model.config, "vision_feature_layer", -1)
    if layer != -2:
        return ()
    count = len(list(vlm.model.get_submodule(vlm.spec.vision_layers).children()))
    return (f"{vlm.spec.vision_layers}.{count - 1}.",)
