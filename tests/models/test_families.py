"""What every family has to keep: it loads whole, answers, and its groups are those of its spec."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.models import Group, ModelSpec
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import Recipe


def test_quantized_models_answer_about_one_and_two_images(family, loaded):
    """Visual placeholders grow in proportion to images, and generation gives new tokens."""
    vlm = loaded(family)
    placeholder = getattr(vlm.model.config, vlm.spec.image_token)
    visual = []
    for count in (1, 2):
        batch = encode(vlm, count)
        visual.append(int((batch["input_ids"] == placeholder).sum()))
        out = vlm.model.generate(**batch, max_new_tokens=2, do_sample=False)
        assert out.shape[1] == batch["input_ids"].shape[1] + 2
    assert visual[0] > 0 and visual[1] == 2 * visual[0]


def test_spec_is_its_file_name(family):
    if family in models.REGISTRY.names():
        spec = models.REGISTRY.get(family).SPEC
        assert spec.family == family
        text = {"num_experts": 4 if spec.experts else None}  # Gemma 4 has one model type with and without
        assert all(models.spec_for({"model_type": name, "text_config": text}) is spec for name in spec.model_types)


def test_every_linear_is_accounted_for(family, loaded):
    """Each linear layer is in one decoder or vision group, in the projector, a tower's or the decoder's stem, or the head."""
    vlm = loaded(family)
    llm = [name for group in models.resolve_groups(vlm.model, vlm.spec) for name in group.linears]
    tower = [name for group in models.vision_linears(vlm.model, vlm.spec) for name in group.linears]
    assert len(set(llm + tower)) == len(llm + tower)
    kept = {name for group in models.resolve_groups(vlm.model, vlm.spec) for name in group.kept}
    rest = set(models.linear_names(vlm.model)) - kept - set(llm) - set(tower) - {vlm.spec.lm_head}
    rest -= {name for name in rest if vlm.spec.router and name.endswith(f".{vlm.spec.router}")}
    stem = vlm.spec.layers.rpartition(".")[0]
    assert all(name.startswith((*vlm.spec.vision, *vlm.spec.projector, f"{stem}.")) for name in rest)
    assert not any(name.startswith(f"{vlm.spec.layers}.") for name in rest)
    if vlm.spec.vision_groups:
        assert not any(name.startswith(f"{vlm.spec.vision_layers}.") for name in rest)
    assert all(name.startswith(f"{vlm.spec.layers}.") for name in llm)


def test_no_group_is_a_leftover(family, loaded):
    """Every linear layer of a block is named by a template, so that none is left unsmoothed by oversight."""
    vlm = loaded(family)
    templates = {group.name.replace(".{}", "") for group in (*vlm.spec.groups, *vlm.spec.vision_groups)}
    assert {group.kind for group in _all_groups(vlm.model, vlm.spec)} == templates


def test_linears_of_a_group_read_one_input(family, loaded):
    """Oracle: forward hooks see the same tensor at every linear layer of a group, and layers run in order."""
    vlm = loaded(family)
    inputs_of: dict[str, torch.Tensor] = {}
    handles = [
        vlm.model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: inputs_of.__setitem__(name, args[0])
        )
        for group in _all_groups(vlm.model, vlm.spec)
        for name in (*group.linears, *group.kept)
    ]
    with torch.no_grad():
        vlm.model(**encode(vlm, 1))
    for handle in handles:
        handle.remove()
    for group in models.resolve_groups(vlm.model, vlm.spec):
        first = inputs_of[group.linears[0]]
        assert all(torch.equal(inputs_of[name], first) for name in (*group.linears, *group.kept)), group
    depth = vlm.spec.layers.count(".") + 2
    layers = [".".join(name.split(".")[:depth]) for name in inputs_of if name.startswith(vlm.spec.layers)]
    order = list(dict.fromkeys(layers))
    assert order == models.decoder_layers(vlm.model, vlm.spec)


@pytest.mark.parametrize("part", ["decoder", "tower"])
def test_smoothing_changes_no_logit(family, part, loaded):
    """Oracle: dividing every `smooth` by random s and multiplying its group's weights by s keeps the FP32 logits."""
    vlm = loaded(family)
    model = copy.deepcopy(vlm.model).float()
    batch = {name: value.float() if value.is_floating_point() else value for name, value in encode(vlm, 2).items()}
    groups = models.resolve_groups(model, vlm.spec) if part == "decoder" else models.vision_linears(model, vlm.spec)
    if part == "tower" and not any(template.smooth for template in vlm.spec.vision_groups):
        pytest.skip("nothing in the tower is smoothed")
    assert any(group.smooth for group in groups)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        before = model(**batch).logits
        for group in groups:
            _smooth(model, group, vlm.spec, part, generator)
        after = model(**batch).logits
    assert (after - before).abs().max() < 1e-4 * before.abs().max()


def test_skeleton_has_the_shapes_of_the_model(family, checkpoint, loaded):
    state = loaded(family).model.state_dict()
    meta_model = models.build_meta_model(checkpoint(family))
    assert all(parameter.is_meta for parameter in meta_model.parameters())
    assert {name: value.shape for name, value in meta_model.state_dict().items()} == {
        name: value.shape for name, value in state.items()
    }


def _all_groups(model, spec: ModelSpec) -> list[Group]:
    return models.resolve_groups(model, spec) + models.vision_linears(model, spec)


def _smooth(model, group: Group, spec: ModelSpec, part: str, generator: torch.Generator) -> None:
    """Divide `group.smooth` by a random positive vector [in] and multiply the group's weights by it."""
    if group.smooth is None:
        return
    op = model.get_submodule(group.smooth)
    s = torch.rand(op.weight.shape[0], generator=generator) * 1.5 + 0.5
    offset = spec.norm_offset if part == "decoder" and group.smooth_kind == "norm" else 0.0
    if group.smooth_kind == "norm":
        op.weight.copy_((op.weight + offset) / s - offset)
    else:
        op.weight.div_(s[:, None])
    if getattr(op, "bias", None) is not None:
        op.bias.div_(s)
    for name in (*group.linears, *group.kept):
        model.get_submodule(name).weight.mul_(s)


def test_positions_of_paddleocr_vl_are_sampled_at_centres(loaded):
    """Oracle: torch's resampling, as in the authors' code and vLLM (`paddleocr_vl.py`)."""
    embeddings = copy.deepcopy(loaded("paddleocr-vl").model.model.visual.vision_model.embeddings).float()
    side, shape = embeddings.num_grid_per_side, (6, 2)
    table = embeddings.position_embedding.weight.T.view(1, -1, side, side)
    expected = torch.nn.functional.interpolate(table, shape, mode="bilinear", align_corners=False)[0].flatten(1).T
    patches = torch.zeros(shape[0] * shape[1], 3, 14, 14)
    got = embeddings(patches[None], torch.tensor([[1, *shape]])) - embeddings.patch_embedding(patches).flatten(1)
    assert torch.allclose(got, expected, atol=1e-6)


def test_ministral_3_scales_queries_in_vllm(tmp_path, checkpoint):
    """What vLLM's decoder reads is written next to what transformers' reads."""
    source, out = checkpoint("mistral3"), tmp_path / "out"
    quantize(Recipe.of(source, out, scheme="fp8"))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    rope = before["text_config"]["rope_parameters"]
    assert "llama_4_scaling" not in before["text_config"]
    original = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
    scaling = {"beta": rope["llama_4_scaling_beta"], **original}
    assert after["text_config"] == before["text_config"] | {"llama_4_scaling": scaling}
