"""Experts of a mixture as they are stored: one by one, fused, and fused and transposed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kit.inputs import encode
from tests.kit.tiny import qwen3_vl_moe
from vlmcompress import models
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError

IN, COUNT = 8, 3
BLOCK = "model.language_model.layers.1.mlp.experts"


def weights(width: int) -> dict[str, torch.Tensor]:
    """Random weights of each expert."""
    torch.manual_seed(0)
    shapes = {"gate_proj": (width, IN), "up_proj": (width, IN), "down_proj": (IN, width)}
    return {
        f"{BLOCK}.{index}.{name}.weight": torch.randn(shape).to(torch.bfloat16)
        for index in range(COUNT)
        for name, shape in shapes.items()
    }


def fused(tensors: dict[str, torch.Tensor], block: str = BLOCK) -> dict[str, torch.Tensor]:
    """The experts of a block as transformers saves them."""
    count = sum(name.endswith(".down_proj.weight") for name in tensors)
    gate, up, down = (
        torch.stack([tensors[f"{block}.{index}.{name}.weight"] for index in range(count)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return {f"{block}.gate_up_proj": torch.cat([gate, up], 1), f"{block}.down_proj": down}


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.mT.contiguous() for name, tensor in tensors.items()}


@pytest.fixture
def stored(tmp_path):
    """Read tensors as those of a checkpoint: name -> entry."""

    def get(tensors, **tensors_too):
        save_file(tensors | tensors_too, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
        return models.stored_tensors(tmp_path)

    return get


@pytest.mark.parametrize("layout", [dict, fused, lambda tensors: transposed(fused(tensors))])
@pytest.mark.parametrize("width", [6, IN // 2, IN])
def test_each_expert_is_found_in_any_layout(width, layout, stored, tmp_path):
    """Oracle: the weights before they were fused. With `IN // 2` gate_up_proj is square, with `IN` down_proj is."""
    expected = weights(width)
    entries = stored(layout(expected), **{"mtp.layers.0.mlp.experts.down_proj": torch.zeros(COUNT, IN, width)})
    assert set(entries) == {*expected, "mtp.layers.0.mlp.experts.down_proj"}
    mapped = tensor_files.map_tensors(entries)
    copy = tmp_path / "copy"
    for name, weight in expected.items():
        assert torch.equal(tensor_files.read_tensor(entries[name]), weight)
        assert torch.equal(mapped[name], weight)
        with copy.open("wb") as file:
            tensor_files.copy_at(entries[name], file.fileno(), 0)
        assert copy.read_bytes() == bytes(tensor_files.to_bytes(weight))


def test_impossible_layouts_are_refused_in_one_line(stored):
    whole = fused(weights(6))
    gate_up, down = (f"{BLOCK}.{name}" for name in ("gate_up_proj", "down_proj"))
    with pytest.raises(UserError, match="no known layout") as caught:
        stored(whole | {down: whole[down].mT.contiguous()})  # one of them turned
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no known layout"):
        stored(whole | {down: whole[down][:2].contiguous()})
    with pytest.raises(UserError, match="stands alone"):
        stored({gate_up: whole[gate_up]})


def test_a_published_checkpoint_of_square_experts_computes_what_its_model_does(tmp_path):
    """Oracle: the model in transformers that the file was saved from. Read by shape alone gate_up_proj would be turned."""
    torch.manual_seed(0)
    model = qwen3_vl_moe.model(moe_intermediate_size=64).eval()
    with models.quiet_transformers():
        model.save_pretrained(tmp_path)
        qwen3_vl_moe.processor().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = qwen3_vl_moe.hub(load_file(file))
    assert tensors[f"{BLOCK}.gate_up_proj"].shape == (4, 128, 128)
    save_file(tensors, file, metadata={"format": "pt"})
    vlm = models.load(tmp_path)
    batch = encode(vlm, 2)
    with torch.no_grad():
        torch.testing.assert_close(vlm.model(**batch).logits, model(**batch).logits)


def test_weights_that_contradict_the_config_are_refused(tmp_path, checkpoint):
    folder = checkpoint("qwen3-vl-moe")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 128
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"experts.0.down_proj.weight.*has shape \[128, 256\].*\[128, 128\]"):
        models.load(tmp_path)
