"""The real vLLM engine on the tiny checkpoint of every family, as it is and quantized.

It answers as transformers does with the same checkpoint, and its layers have the names that the spec says.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit import vllm_answers
from tests.kit.engine import asked
from tests.kit.families import FAMILIES, RECIPES, can_process
from tests.kit.inputs import encode
from vlmcompress import models

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3600)]
KINDS = ["source", *RECIPES]
# How far below its best token's log-probability transformers may see the engine's token. BF16 leaves near-ties; the
# quantized kernels round activations in another order than the dequantized layers of transformers.
MARGIN = {"source": 0.05, "awq": 0.1, "fp8 with tower": 0.3}


@pytest.fixture(scope="module")
def folders(checkpoint, quantized) -> dict[tuple[str, str], Path]:
    """(family, kind) -> folder."""
    return {
        (family, kind): checkpoint(family) if kind == "source" else quantized(family, kind)
        for family in FAMILIES
        if can_process(family)
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def answered(folders) -> dict[Path, dict]:
    """Folder -> what vLLM makes of it."""
    return dict(zip(folders.values(), asked("answers", vllm_answers.jobs(folders.values())), strict=True))


@pytest.fixture
def result(family, kind, folders, answered) -> dict:
    if (family, kind) not in folders:
        pytest.skip("SmolVLM's processor needs num2words")
    spec = models.spec_for(models.read_config(folders[family, kind]))
    if spec.engine.vllm_cpu:
        pytest.skip(spec.engine.vllm_cpu)
    if spec.experts and kind.startswith("fp8"):
        pytest.skip("vLLM's CPU build runs experts in FP8 on no processor")
    answer = answered[folders[family, kind]]
    assert "error" not in answer, answer
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_answers_like_transformers(family, kind, result, folders, loaded):
    """Oracle: transformers with the same checkpoint. Same prompt tokens, and each token is one of its best."""
    vlm = loaded(family)
    with models.quiet_transformers():
        model = models.open_model(folders[family, kind], dtype="auto")[0].eval()
    for count, got in enumerate(result["answers"], start=1):
        batch = encode(vlm, count)
        assert got["prompt"] == batch["input_ids"][0].tolist()
        assert vllm_answers.gap(model, batch, got["answer"]) < MARGIN[kind]


@pytest.mark.parametrize("kind", ["source"])
def test_layers_have_the_names_of_the_spec(family, kind, result, loaded):
    """Every linear layer is in the engine under `engine_name`, or under the fused layer that takes it up."""
    vlm = loaded(family)
    modules = set(result["modules"])
    dropped = unused_tower_layer(vlm)
    mixed = (".mlp.", f".{vlm.spec.experts}.") if vlm.spec.experts else ()
    for group in models.resolve_groups(vlm.model, vlm.spec) + models.vision_linears(vlm.model, vlm.spec):
        if group.linears[0].startswith(dropped) or any(part in group.linears[0] for part in mixed):
            continue  # experts are one layer there, and its class of mixtures names no parts of an MLP: see `test_experts`
        names = [vlm.spec.engine_name(name) for name in group.linears]
        if group.fused:
            parent, _, _ = names[0].rpartition(".")
            leaves = [name.rpartition(".")[2] for name in names]
            # all parts in their order; Gemma 4 has blocks whose keys are their values, and no `v_proj`
            fused = [name for name, parts in result["fused"].items() if [p for p in parts if p in leaves] == leaves]
            assert any(f"{parent}.{name}" in modules for name in fused), (names, fused)
        else:
            assert set(names) <= modules, names


def unused_tower_layer(vlm) -> tuple[str, ...]:
    """LLaVA reads features before the tower's last layer; the engine leaves that layer out."""
    if getattr(vlm.model.config, "vision_feature_layer", -1) != -2:
        return ()
    count = len(list(vlm.model.get_submodule(vlm.spec.vision_layers).children()))
    return (f"{vlm.spec.vision_layers}.{count - 1}.",)
