"""Merging where a token is a block of patches, against the encoder with all patches in place, patch by patch.

The oracle leaves every patch where it is. What merges gets equal rows: each patch of a block the mean of the patches that
stand at its place in the blocks that it is one of by now. Attention needs no sizes there, as all copies are looked at.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.kit import reference
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny, wide
from vlmcompress.models import VLM
from vlmcompress.reduction import choice, threshold_file
from vlmcompress.reduction.hooks import attach, learning
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

FAMILIES = ["internvl", "idefics3", "gemma3"]
THRESHOLDS = (0.2, 0.25)
SIDE, BLOCKS = 2, 4  # patches along a block, blocks along a picture


def place(block: int, part: int) -> int:
    """The number in raster order of a patch: the `part`-th of a block's."""
    row, column = block // BLOCKS * SIDE + part // SIDE, block % BLOCKS * SIDE + part % SIDE
    return row * BLOCKS * SIDE + column


def key(keys: torch.Tensor, groups: list[list[int]], number: int, aside: int) -> torch.Tensor:
    """What blocks are compared by: the patches' keys, mean over heads, one after another."""
    parts = [keys[aside + place(groups[number][0], part)].view(4, -1).mean(0) for part in range(SIDE**2)]
    return torch.cat(parts)


def encoded(vlm: VLM, picture: torch.Tensor, options: dict) -> tuple[torch.Tensor, list[list[int]]]:
    """The encoder's output `[rows, d]` for a picture `[3, h, w]`, and the blocks that each token left stands for."""
    tower = vlm.model.get_submodule(vlm.spec.vision[0])
    layers = vlm.model.get_submodule(vlm.spec.vision_layers)
    aside = int(vlm.spec.family == "internvl")
    whole = {"patch_attention_mask": torch.ones(1, 8, 8, dtype=torch.bool)} if vlm.spec.family == "idefics3" else {}
    states = tower.embeddings(picture[None], **whole)[0]
    groups = [[block] for block in range(BLOCKS**2)]
    for number, layer in enumerate(layers):
        attention, before, after, scales = parts_of(layer)
        normed = before(states)
        keys = attention.k_proj(normed)
        states = states + scales[0] * attention(normed[None], attention_mask=None)[0][0]
        rows = torch.stack([key(keys, groups, image_index, aside) for image_index in range(len(groups))])
        rows = torch.nn.functional.normalize(rows, dim=-1)
        best, partner = (rows[::2] @ rows[1::2].T).max(1)
        count = min(int((best > options["thresholds"][number]).sum()), len(groups) // 2)
        for pair in best.argsort(descending=True)[:count].tolist():
            into = 2 * int(partner[pair]) + 1
            groups[into], groups[2 * pair] = groups[into] + groups[2 * pair], []
        groups = [group for group in groups if group]
        for group in groups:
            for part in range(SIDE**2):
                places = [aside + place(block, part) for block in group]
                states[places] = states[places].mean(0)
        states = states + scales[1] * layer.mlp(after(states))
    last = tower.layernorm if vlm.spec.family == "internvl" else tower.post_layernorm
    return last(states), groups


def parts_of(layer: torch.nn.Module) -> tuple:
    """The attention, the norms before and after it, and the factors of what is added."""
    if hasattr(layer, "lambda_1"):
        return layer.attention, layer.layernorm_before, layer.layernorm_after, (layer.lambda_1, layer.lambda_2)
    return layer.self_attn, layer.layer_norm1, layer.layer_norm2, (1, 1)


@contextlib.contextmanager
def looped(vlm: VLM, options: dict):
    """The model with the loop's rows after its encoder; gives the groups of blocks of each picture."""
    groups_by_picture: list[list[list[int]]] = []

    def run(module, args, kwargs, output):
        pictures = kwargs["pixel_values"] if "pixel_values" in kwargs else args[0]
        results = [encoded(vlm, picture, options) for picture in pictures]
        groups_by_picture[:] = [groups for _, groups in results]
        output.last_hidden_state = torch.stack([rows for rows, _ in results])
        return output

    tower = vlm.model.get_submodule(vlm.spec.vision[0])
    hook = tower.register_forward_hook(run, with_kwargs=True)
    try:
        yield groups_by_picture
    finally:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_every_patch_in_its_place(family):
    """The loop's rows after the model's own shuffle and projector, of each token left all but one hidden."""
    vlm = wide(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    units, embeds, groups = reference.compare_with_loop(vlm, inputs, "dymu", {"thresholds": THRESHOLDS}, looped)
    assert len(groups) == len(units) > 2
    for unit, expected in zip(units, groups, strict=True):
        rows, target = embeds[unit.row, unit.columns], unit.reduction.target.tolist()
        torch.testing.assert_close(rows, rows[unit.reduction.anchor][unit.reduction.target], atol=1e-9, rtol=1e-9)
        mine = [{block for block in range(16) if target[block] == row} for row in range(len(unit.reduction.anchor))]
        assert mine == [{*group} for group in expected]
        assert unit.reduction.anchor.tolist() == [group[0] for group in expected]  # what others were merged into
    counts = {len(unit.reduction.anchor) for unit in units}
    assert len(counts) > 1  # else padding is not tested


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"thresholds": (1.0, 1.0)}, {"thresholds": (0.0, 0.0), "keep": 1}])
@pytest.mark.parametrize("family", [*FAMILIES, "llava"])
def test_nothing_merged_changes_no_bit(family, options, dtype):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO)
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    try:
        plain = vlm.model.to(dtype)(**inputs).logits
        with attach(vlm, "dymu", options):
            assert torch.equal(vlm.model(**inputs).logits, plain)
    finally:
        tiny.cache_clear()


def test_a_shorter_encoder_really_runs():
    """Every layer's MLP and the next layer's attention see what is left: 4 patches of each of 16, 8 and 4 blocks, and CLS."""
    vlm, lengths = wide("internvl"), []
    hooks = [
        module.register_forward_hook(lambda module, args, output: lengths.append(output.shape[-2]))
        for layer in vlm.model.get_submodule(vlm.spec.vision_layers)
        for module in (layer.attention.k_proj, layer.mlp)
    ]
    try:
        with attach(vlm, "dymu", {"thresholds": (-1.0, -1.0)}):
            vlm.model(**encode(vlm, ONE))
    finally:
        for hook in hooks:
            hook.remove()
    assert lengths == [1 + 64, 1 + 32, 1 + 32, 1 + 16]


@pytest.mark.parametrize("family", FAMILIES)
def test_thresholds_are_learnt_and_belong_to_one_model(family, tmp_path):
    """On one batch the share is kept on average; a file of them is read by its model, and by no other encoder."""
    vlm, file = wide(family), tmp_path / "dymu.json"
    batches = [encode(vlm, prompt) for prompt in (ONE, TWO, NONE)]
    learned = learning.learn_thresholds(vlm, batches, choice.parse_reducer("dymu:0.5"))
    kept = learning.count_kept(vlm, batches, learned)
    assert len(learned.reducer.thresholds) == 2 and abs(sum(kept) / len(kept) - 8) < 0.5 and len(set(kept)) > 1
    counts = []
    with attach(vlm, learned) as attached:
        for inputs in batches[:2]:
            vlm.model(**inputs)
            counts += [len(unit.reduction.anchor) for unit in attached.reduced_units]
    assert counts == kept
    threshold_file.save_thresholds(file, vlm, learned, [8], {"source": "here"})
    named = choice.parse_reducer(f"dymu:thresholds={file}")
    with attach(vlm, named) as attached:
        assert attached.reducer.thresholds == learned.reducer.thresholds
    with pytest.raises(UserError, match="another model.*its encoder has image_size"):
        attach(tiny(family), named)


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_from_pixels_are_met_exactly(family):
    vlm = wide(family)
    batches = [encode(vlm, prompt) for prompt in (ONE, TWO)]
    learned = learning.learn_thresholds(vlm, batches, choice.parse_reducer("dymu:0.6"))
    counter = learning.counter(vlm, batches, learned)
    assert counter.patch == 14 and counter.buckets[0] == 4 and counter.buckets[-1] == 16
    printed = [counter.count(picture) for inputs in batches for picture in learning.pictures(inputs)]
    with attach(vlm, learned, counter=counter) as attached:
        counts = []
        for inputs in batches:
            vlm.model(**inputs)
            counts += [len(unit.reduction.anchor) for unit in attached.reduced_units]
    assert counts == printed


def test_unsupported_models_are_refused():
    vlm = wide("internvl")
    vlm.model.config.vision_feature_layer = -2
    try:
        with pytest.raises(
            UserError, match="leaves out encoder layers; use a method of stage 'projected', for example divprune"
        ):
            attach(vlm, "dymu", {"thresholds": THRESHOLDS})
    finally:
        vlm.model.config.vision_feature_layer = -1


def test_padding_within_a_picture_is_refused():
    vlm = tiny("idefics3")
    inputs = encode(vlm, ONE)
    inputs["pixel_attention_mask"][:, 0, :, -14:] = 0
    with attach(vlm, "dymu", {"thresholds": THRESHOLDS}), pytest.raises(UserError, match="padding within"):
        vlm.model(**inputs)
