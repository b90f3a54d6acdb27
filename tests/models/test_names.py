"""One tensor, three names: memory, disk and engine, and an `ignore` list that is right under each."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from compressed_tensors.utils.match import match_name

from tests.kit.rtn import SCHEMES
from vlmcompress import models
from vlmcompress.export import layer_targets
from vlmcompress.export.formats.compressed_tensors import ignore_entries
from vlmcompress.models._spec import EngineNames
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_files import read_tensor

# The first tensor of tower, decoder and head, as published checkpoints of the family name them.
HUB = {
    "gemma3": ("vision_tower.vision_model.", "language_model.model.layers.0.", None),
    "gemma4": ("model.vision_tower.encoder.layers.0.", "model.language_model.layers.0.", None),
    "gemma4-moe": ("model.vision_tower.encoder.layers.0.", "model.language_model.layers.0.", None),
    "glm4v": ("model.visual.blocks.0.", "model.language_model.layers.0.", "lm_head.weight"),
    "glm4v-moe": ("model.visual.blocks.0.", "model.language_model.layers.0.", "lm_head.weight"),
    "glm-ocr": ("model.visual.blocks.0.", "model.language_model.layers.0.", "lm_head.weight"),
    "cohere2-vision": ("model.vision_tower.vision_model.", "model.language_model.layers.0.", None),
    "exaone4-5": ("model.visual.blocks.0.", "model.language_model.layers.0.", "lm_head.weight"),
    "gemma4-unified": ("model.vision_embedder.", "model.language_model.layers.0.", None),
    "paddleocr-vl": ("visual.vision_model.", "model.layers.0.", "lm_head.weight"),
    "granite4-vision": ("model.vision_tower.vision_model.", "model.language_model.layers.0.", "lm_head.weight"),
    "idefics3": ("model.vision_model.", "model.text_model.layers.0.", "lm_head.weight"),
    "internvl": ("vision_tower.encoder.layer.0.", "language_model.model.layers.0.", "language_model.lm_head.weight"),
    "lfm2-vl": ("model.vision_tower.vision_model.", "model.language_model.layers.0.", None),
    "llava": ("vision_tower.vision_model.", "language_model.model.layers.0.", "language_model.lm_head.weight"),
    "llava-next": ("vision_tower.vision_model.", "language_model.model.layers.0.", "language_model.lm_head.weight"),
    "llava-onevision": ("vision_tower.vision_model.", "language_model.model.layers.0.", None),
    "mistral3": ("vision_tower.transformer.", "language_model.model.layers.0.", "language_model.lm_head.weight"),
    "qwen2-5-vl": ("visual.blocks.0.", "model.layers.0.", "lm_head.weight"),
    "qwen2-vl": ("visual.blocks.0.", "model.layers.0.", "lm_head.weight"),
    "qwen3-5": ("model.visual.blocks.0.", "model.language_model.layers.0.", None),
    "qwen3-5-moe": ("model.visual.blocks.0.", "model.language_model.layers.0.", None),
    "qwen3-vl-moe": ("model.visual.blocks.0.", "model.language_model.layers.0.", None),
    "qwen3-vl": ("model.visual.blocks.0.", "model.language_model.layers.0.", None),
    "smolvlm": ("model.vision_model.", "model.text_model.layers.0.", None),
}


def test_tiny_checkpoint_has_hub_names(family, checkpoint):
    disk = models.tensor_headers(checkpoint(family))
    tower, decoder, head = HUB[family]
    assert any(name.startswith(tower) for name in disk) and any(name.startswith(decoder) for name in disk)
    assert {name for name in disk if "lm_head" in name} == ({head} if head else set())


@pytest.fixture(scope="module")
def named(checkpoint):
    """`named(family, hub_names)`: the checkpoint's folder, its model without weights, its spec, and its names on disk."""

    @functools.cache
    def get(family: str, hub_names: bool = True):
        folder = checkpoint(family, hub_names)
        meta_model = models.build_meta_model(folder)
        names = models.disk_names(meta_model, models.tensor_headers(folder))
        return folder, meta_model, models.spec_for(models.read_config(folder)), names

    return get


def test_disk_names_are_where_the_values_come_from(family, named, loaded):
    """Oracle: `from_pretrained` itself. The tensor under the disk name holds the values of the loaded parameter."""
    state = loaded(family).model.state_dict()
    for hub_names in (True, False):
        folder, meta_model, spec, names = named(family, hub_names)
        tensors = {name: read_tensor(entry) for name, entry in models.stored_tensors(folder).items()}
        assert sorted([*names.values(), *models.mtp_tensors(spec, tensors)]) == sorted(tensors)
        assert set(state) - set(names) <= set(models.tied_names(meta_model))
        assert all(torch.equal(state[memory], tensors[disk]) for memory, disk in names.items())


SAVED_WITHOUT_VISION_MODEL = (
    *("cohere2-vision", "gemma3", "granite4-vision", "lfm2-vl", "llava", "llava-next", "llava-onevision"),
)
READ_BY_HUB_NAMES_ALONE = ("gemma4-unified", "paddleocr-vl")


def test_hub_names_are_those_of_hub_checkpoints(family, named):
    _, _, spec, names = named(family)
    assert {memory: spec.hub_name(memory) for memory in names} == names


def test_names_that_vllm_does_not_find(family, named):
    """The hub's it finds; of those that transformers saves it lacks the whole tower where it asks for `vision_model`."""
    (_, _, spec, hub), (_, _, _, saved) = named(family), named(family, False)
    assert models.unfound(hub, spec) == {}
    for names in (saved, in_memory := {memory: memory for memory in hub}):
        lacks = family in SAVED_WITHOUT_VISION_MODEL
        tower = {disk: hub[memory] for memory, disk in names.items() if memory.startswith(spec.vision)}
        if names is in_memory and family in READ_BY_HUB_NAMES_ALONE:
            lacks, tower = True, {memory: disk for memory, disk in hub.items() if disk != memory}
        assert models.unfound(names, spec) == (tower if lacks else {})
        assert models.written_names(names, spec) == (hub if lacks else names)


def test_disk_names_refuse_what_does_not_fit(checkpoint):
    folder = checkpoint("llava")
    meta_model, disk = models.build_meta_model(folder), list(models.tensor_headers(folder))
    with pytest.raises(UserError, match="'surplus.weight' has no place"):
        models.disk_names(meta_model, [*disk, "surplus.weight"])
    with pytest.raises(UserError, match="no output head, and config.json does not tie it"):
        models.disk_names(meta_model, [name for name in disk if "lm_head" not in name])
    with pytest.raises(UserError, match="are both 'lm_head.weight'"):
        models.disk_names(meta_model, [*disk, "lm_head.weight"])


def test_memory_names_of_a_quantized_layer(family, named):
    """A packed weight and its scale belong to the module that the plain weight belonged to."""
    _, meta_model, _, names = named(family)
    for memory in models.linear_names(meta_model):
        if f"{memory}.weight" in names:
            disk = names[f"{memory}.weight"].removesuffix(".weight")
            parts = [f"{disk}.weight_packed", f"{disk}.weight_scale", f"{disk}.weight"]
            memory_of = models.memory_names(meta_model, parts)
            assert list(memory_of.values()) == [f"{memory}.weight_packed", f"{memory}.weight_scale", f"{memory}.weight"]


def test_disk_names_skip_rotary_tables_of_old_checkpoints(checkpoint):
    folder = checkpoint("llava")
    disk = list(models.tensor_headers(folder))
    old = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    assert old not in models.disk_names(models.build_meta_model(folder), [*disk, old]).values()


@pytest.mark.parametrize("hub_names", [True, False], ids=["hub", "transformers"])
def test_ignore_covers_exactly_the_rest(family, hub_names, named):
    """Oracle: compressed-tensors' own matcher. Under each naming it matches all unquantized layers and no other, whether the
    decoder is quantized, with the tower, or without one of its layers."""
    _, meta_model, spec, names = named(family, hub_names)
    decoder, tower = models.resolve_groups(meta_model, spec), models.vision_linears(meta_model, spec)
    but_one = [group for group in decoder if group.layer != 1 or group.name != "down"]
    for groups in (decoder, [*decoder, *tower], but_one):
        quantized = {name for group in groups for name in group.linears}
        ignore = ignore_entries(models.kept_modules(meta_model, spec, quantized, names))
        for name in models.linear_names(meta_model):
            forms = {name, spec.engine_name(name)}
            if f"{name}.weight" in names:
                forms.add(names[f"{name}.weight"].removesuffix(".weight"))
            for form in forms:
                assert any(match_name(form, entry) for entry in ignore) == (name not in quantized), (form, ignore)
        assert len(ignore) < 30


def test_ignore_names_tower_and_projector_without_linear_layers(checkpoint):
    """Gemma's projector is a bare matrix in transformers, but the engine may see a layer there."""
    folder = checkpoint("gemma3")
    meta_model, spec = models.build_meta_model(folder), models.spec_for(models.read_config(folder))
    quantized = {name for group in models.resolve_groups(meta_model, spec) for name in group.linears}
    names = models.disk_names(meta_model, models.tensor_headers(folder))
    ignore = ignore_entries(models.kept_modules(meta_model, spec, quantized, names))
    assert any(match_name("multi_modal_projector.mm_input_projection", entry) for entry in ignore)


def test_a_layer_whose_keys_are_its_values_is_named_as_both(checkpoint):
    """vLLM's `qkv_proj` of such a block is loaded from two layers and looks for the scheme of three."""
    folder = checkpoint("gemma4")
    meta_model, spec = models.build_meta_model(folder), models.spec_for(models.read_config(folder))
    names = models.disk_names(meta_model, models.tensor_headers(folder))
    attention = [f"model.language_model.layers.{layer}.self_attn" for layer in range(3)]
    assert [f"{path}.v_proj.weight" in names for path in attention] == [True, False, False]
    assert [f"{path}.k_proj.weight" in names for path in attention] == [True, True, False]
    quantized = {name for group in models.resolve_groups(meta_model, spec) for name in group.linears}
    left = {f"{path}.{part}_proj" for path in attention for part in "qk"}
    ignore = ignore_entries(models.kept_modules(meta_model, spec, quantized - left, names))
    for path, kept in zip(attention, (False, True, False), strict=True):
        for form in (f"{path}.v_proj", spec.engine_name(f"{path}.v_proj")):
            assert any(match_name(form, entry) for entry in ignore) == kept, (form, ignore)
    schemes = dict.fromkeys(sorted(quantized), SCHEMES["fp8"]) | {f"{attention[1]}.k_proj": SCHEMES["w4-symmetric"]}
    (names_of_layer,) = [
        targets_of
        for scheme, targets_of in layer_targets.targets(schemes, names, spec)
        if scheme == SCHEMES["w4-symmetric"]
    ]
    assert names_of_layer == [f"{attention[1]}.{part}_proj" for part in "kv"]


def test_engine_name_maps_whole_path_components():
    names = EngineNames(prefixes=(("model.a", "x"),), parts=(("c", "d"),))
    spec = dataclasses.replace(models.all_specs()[0], names=names)
    assert spec.engine_name("model.a.b") == "x.b"
    assert spec.engine_name("model.a") == "x"
    assert spec.engine_name("model.ab.c") == "model.ab.d"
    assert spec.engine_name("model.a.c.cc") == "x.d.cc"
