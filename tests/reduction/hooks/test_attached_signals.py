"""What is read from a running model equals what its eager attention says."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import FAMILIES, INSIDE, given, recorded
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from vlmcompress.reduction.hooks import attach

pytestmark = pytest.mark.representatives


def eager(vlm, inputs, part: str):
    """Attention maps `[b, heads, s, s]` of each layer of the tower or the language model."""
    module = vlm.model.get_submodule(part)
    kernel = module.config._attn_implementation
    attention = {}
    hook = module.register_forward_hook(lambda m, a, k, out: attention.update(maps=out.attentions), with_kwargs=True)
    ask = module.register_forward_pre_hook(lambda m, a, k: (a, k | {"output_attentions": True}), with_kwargs=True)
    try:
        module.set_attn_implementation("eager")
        vlm.model(**inputs)
    finally:
        module.set_attn_implementation(kernel)
        hook.remove()
        ask.remove()
    return attention["maps"]


@pytest.mark.parametrize("method", ["visionzip", "vscan"])
def test_signals_of_the_encoder(method, monkeypatch):
    vlm = tiny("llava")
    inputs = encode(vlm, ONE, TWO)
    calls = recorded(monkeypatch)
    with attach(vlm, method, given(method)) as attached:
        vlm.model(**inputs)
    maps = eager(vlm, inputs, "model.vision_tower")
    tower = vlm.model.model.vision_tower
    states = tower(inputs["pixel_values"], output_hidden_states=True).hidden_states
    layers = tower.encoder.layers
    keys = layers[-2].self_attn.k_proj(layers[-2].layer_norm1(states[-3]))[:, 1:]
    assert len(calls) == len(attached.reduced_units) == 3
    for number, signals in enumerate(calls):
        torch.testing.assert_close(signals.saliency, maps[-2][number, :, 0, 1:].mean(0), atol=1e-7, rtol=1e-6)
        torch.testing.assert_close(signals.keys, keys[number])
        assert signals.grid == (1, 4, 4) and signals.heads == 4
        if method == "vscan":
            torch.testing.assert_close(signals.windowed, maps[0][number, :, 0, 1:].mean(0), atol=1e-7, rtol=1e-6)
        if method != "visionzip":
            expected = vlm.model.model.multi_modal_projector(states[-2][number, 1:])
        else:
            expected = states[-2][number, 1:]
        torch.testing.assert_close(signals.features, expected)


@pytest.mark.parametrize("family", INSIDE)
@pytest.mark.parametrize("layer", [1, 2])
def test_signals_of_the_last_token(family, layer, monkeypatch):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    calls = recorded(monkeypatch)
    with attach(vlm, "fastv", {"keep": 0.4, "layer": layer}) as attached:
        vlm.model(**inputs)
    text = vlm.spec.layers.rpartition(".")[0]
    maps = [eager(vlm, encode(vlm, prompt), text)[layer - 1] for prompt in (ONE, TWO)]  # unpadded, eager has no NaN
    assert len(calls) == len(attached.reduced_units) >= 3
    for signals, unit in zip(calls, attached.reduced_units, strict=True):
        padding = inputs["input_ids"].shape[1] - maps[unit.row].shape[-1]
        expected = maps[unit.row][0, :, -1].mean(0)[unit.columns - padding]
        assert expected.std() > 1e-4
        torch.testing.assert_close(signals.saliency.double(), expected.double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", INSIDE)
def test_states_within_the_language_model(family, monkeypatch):
    """dart-llm: states through the final norm, and only text after the image asks."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO)
    calls = recorded(monkeypatch)
    with attach(vlm, "dart-llm", {"keep": 0.4, "layer": 1}) as attached:
        vlm.model(**inputs)
    text = vlm.model.get_submodule(vlm.spec.layers.rpartition(".")[0])
    entered = []
    hook = text.layers[1].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    cache = vlm.model(**inputs).past_key_values
    hook.remove()
    states = text.norm(entered[0])
    keys = cache.layers[0].keys.transpose(1, 2).flatten(2)
    for signals, unit in zip(calls, attached.reduced_units, strict=True):
        torch.testing.assert_close(signals.features, states[unit.row, unit.columns])
        torch.testing.assert_close(signals.keys, keys[unit.row, unit.columns])
        ids = inputs["input_ids"][unit.row]
        after = [
            i for i in range(int(unit.columns[-1]) + 1, len(ids)) if ids[i] < 256
        ]  # bytes; above are special tokens
        assert len(after) > 9
        torch.testing.assert_close(signals.query, states[unit.row, after])
        torch.testing.assert_close(signals.query_keys, keys[unit.row, after])


@pytest.mark.parametrize("family", FAMILIES)
def test_signals_of_projected_tokens(family, monkeypatch):
    """Features are the projector's rows of the image."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO)
    embeds = reference.arguments(vlm, inputs)["inputs_embeds"]
    calls = recorded(monkeypatch)
    with attach(vlm, "dart", {"keep": 0.4}) as attached:
        vlm.model(**inputs)
    expected = {
        name: value
        for name, value in inputs.items()
        if any(part in name for part in ("pixel", "grid", "image", "spatial"))
    }
    features = vlm.model.get_image_features(**expected).pooler_output
    where = inputs["input_ids"] == getattr(vlm.model.config, vlm.spec.image_token)
    rows = embeds.masked_scatter(where[..., None], torch.cat([part.flatten(0, -2) for part in features]))
    for signals, unit in zip(calls, attached.reduced_units, strict=True):
        torch.testing.assert_close(signals.features, rows[unit.row, unit.columns])
        where[unit.row, unit.columns] = False  # each token is of one unit
    rest = embeds[where]
    if vlm.spec.images.grid == "anyres":
        assert len(rest) and torch.equal(rest, vlm.model.model.image_newline.expand_as(rest))
    else:
        assert not len(rest)
    for signals, unit in zip(calls, attached.reduced_units, strict=True):
        assert signals.grid == unit.grid and signals.query is None  # which `dart` does not read


def test_grids_follow_the_images():
    """Mixed sizes: rows and columns are those of the image, not swapped."""
    vlm = tiny("qwen2-5-vl")
    with attach(vlm, "uniform", {"keep": 0.5}) as attached:
        vlm.model(**encode(vlm, TWO))
    assert [unit.grid for unit in attached.reduced_units] == [(1, 3, 5), (1, 4, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_signals_of_whole_images(family):
    """Of all tokens of an image: units where they stand, newlines kept."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO)
    with attach(vlm, "coverage", given("coverage")) as attached:
        vlm.model(**inputs)
    images = [reduction.require_valid() for reduction in attached.images()]
    where = inputs["input_ids"] == getattr(vlm.model.config, vlm.spec.image_token)
    assert sum(len(reduction.target) for reduction in images) == where.sum()
    embeds = reference.arguments(vlm, inputs)["inputs_embeds"]
    kept = reference.merged(embeds, attached.reduced_units)[reference.hidden_mask(where, attached.reduced_units).bool()]
    parts = embeds[where].split([len(reduction.target) for reduction in images])
    rows = torch.cat([reduction.apply(part) for reduction, part in zip(images, parts, strict=True)])
    torch.testing.assert_close(rows, kept, atol=1e-5, rtol=1e-5)
