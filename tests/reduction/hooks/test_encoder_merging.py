"""Merging within the encoder, against the encoder run one image and one layer at a time, attending to every patch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools

import pytest
import torch
from transformers import LlavaForConditionalGeneration, SiglipVisionConfig

from tests.kit import reference
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from tests.kit.tiny.llava import CLIP
from vlmcompress.models import VLM
from vlmcompress.reduction.hooks import attach
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

THRESHOLDS = (0.3, 0.4)


@functools.cache
def model(family: str) -> VLM:
    """A tiny model; `siglip` is a LLaVA whose tower has no CLS, so that all rows of its last layer are used."""
    if family != "siglip":
        return tiny(family)
    vlm = tiny("llava")
    config = copy.deepcopy(vlm.model.config)
    config.vision_config = SiglipVisionConfig(**CLIP, vision_use_head=False)
    config.vision_feature_layer, config.vision_feature_select_strategy = -1, "full"
    torch.manual_seed(1)
    built = LlavaForConditionalGeneration(config).double().eval().requires_grad_(False)
    for name, weight in built.named_parameters():
        if weight.ndim == 2 and "lm_head" not in name:
            weight.mul_(5)
    return dataclasses.replace(vlm, model=built)


def attended(attention: torch.nn.Module, states: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attention` makes of `states [rows, c]` when each row is there `sizes` times, and its keys, mean over heads."""
    parts = [linear(states) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    query, key, value = (part.view(len(states), attention.num_heads, -1) for part in parts)
    copies, copied = (part.repeat_interleave(torch.tensor(sizes), 0) for part in (key, value))
    weights = (torch.einsum("qhd,khd->hqk", query, copies) * attention.scale).softmax(-1)
    return attention.out_proj(torch.einsum("hqk,khd->qhd", weights, copied).flatten(1)), key.mean(1)


def encoded(vlm: VLM, picture: torch.Tensor, options: dict) -> tuple[torch.Tensor, int]:
    """Features `[patches, c]` of a picture `[3, h, w]`, each patch with its row's, and how many rows."""
    tower, aside = vlm.model.model.vision_tower, int(vlm.model.config.vision_feature_select_strategy == "default")
    states = tower.embeddings(picture[None])[0]
    states = tower.pre_layrnorm(states) if aside else states
    groups, layers = [[patch] for patch in range(len(states) - aside)], tower.encoder.layers
    layers = layers[:-1] if aside else layers
    for number, layer in enumerate(layers):
        change, keys = attended(
            layer.self_attn, layer.layer_norm1(states), [1] * aside + [len(members) for members in groups]
        )
        states = states + change
        rows = torch.nn.functional.normalize(keys[aside:], dim=-1)
        best, partner = (rows[::2] @ rows[1::2].T).max(1)
        totals = [row * len(group) for row, group in zip(states[aside:], groups, strict=True)]
        count = min(int((best > options["thresholds"][number]).sum()), len(groups) // 2)
        for pair in best.argsort(descending=True)[:count].tolist():
            into = 2 * int(partner[pair]) + 1
            totals[into] = totals[into] + totals[2 * pair]
            groups[into], groups[2 * pair] = groups[into] + groups[2 * pair], []
        means = [total / len(group) for total, group in zip(totals, groups, strict=True) if group]
        states = torch.stack([*states[:aside], *means])
        groups = [group for group in groups if group]
        states = states + layer.mlp(layer.layer_norm2(states))
    features = torch.empty(sum(map(len, groups)), states.shape[1], dtype=states.dtype)
    for row, group in zip(states[aside:], groups, strict=True):
        features[group] = row
    return features, len(groups)


@contextlib.contextmanager
def looped(vlm: VLM, options: dict):
    """The model with the loop's features before its projector; gives how many rows each picture has."""
    base, features, counts = vlm.model.model, [], []

    def run(module, args):
        images = [encoded(vlm, picture, options) for picture in args[0]]
        features[:] = [rows for rows, _ in images]
        counts[:] = [rows for _, rows in images]

    hooks = [
        base.vision_tower.register_forward_pre_hook(run),
        base.multi_modal_projector.register_forward_pre_hook(lambda module, args: (torch.stack(features),)),
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["llava", "siglip"])
def test_equals_layers_in_a_loop(family):
    """The loop's rows, placed by the model's own code, of each row all but one hidden."""
    vlm, thresholds = model(family), (*THRESHOLDS, 0.4)[: 3 if family == "siglip" else 2]  # of each layer that is used
    inputs = encode(vlm, ONE, TWO, NONE)
    units, embeds, counts = reference.compare_with_loop(vlm, inputs, "dymu", {"thresholds": thresholds}, looped)
    for unit in units:
        rows, result = embeds[unit.row, unit.columns], unit.reduction
        assert torch.equal(rows, rows[result.anchor][result.target])
        assert len(rows.unique(dim=0)) == len(result.anchor)
    assert [len(unit.reduction.anchor) for unit in units] == counts
    assert len(set(counts)) > 1  # else padding is not tested


def test_a_shorter_encoder_really_runs():
    """Every layer's MLP and the next layer's attention see what is left."""
    vlm = tiny("llava")
    lengths = []
    layers = vlm.model.model.vision_tower.encoder.layers
    hooks = [
        module.register_forward_hook(lambda module, args, output: lengths.append(output[0].shape[-2]), always_call=True)
        for layer in layers[:-1]
        for module in (layer.self_attn.k_proj, layer.mlp)
    ]
    try:
        with attach(vlm, "dymu", {"thresholds": (-1.0, -1.0)}):
            vlm.model(**encode(vlm, ONE))
    finally:
        for hook in hooks:
            hook.remove()
    assert lengths == [1 + 16, 1 + 8, 1 + 8, 1 + 4]


def test_unsupported_models_are_refused():
    vlm = tiny("llava")
    vlm.model.model.vision_tower.set_attn_implementation("eager")
    try:
        with pytest.raises(UserError, match="attn_implementation='sdpa'"):
            attach(vlm, "dymu", {"thresholds": THRESHOLDS})
    finally:
        vlm.model.model.vision_tower.set_attn_implementation("sdpa")
    vlm.model.config.vision_feature_select_strategy = "full"
    try:
        with pytest.raises(UserError, match="features 'full'"):
            attach(vlm, "dymu", {"thresholds": THRESHOLDS})
    finally:
        vlm.model.config.vision_feature_select_strategy = "default"
