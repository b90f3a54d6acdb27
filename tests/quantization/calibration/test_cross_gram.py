"""Two streams of hidden states: what layers are given after changed blocks, and in the model as it was, token by token."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kit.batched_samples import samples, wide
from vlmcompress.models import VLM, decoder_blocks
from vlmcompress.models.data import encode
from vlmcompress.numerics.statistics.inputs import MODALITIES
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks.calibration_inputs import decoder, reduced

STATISTICS = frozenset({"gram", "cross"})


def layer_inputs(vlm: VLM, batches, names: list[str]) -> list[dict[str, torch.Tensor]]:
    """The oracle: the whole model runs over one sample after another. For each layer, modality -> its inputs, float64
    `[tokens, in]`."""
    recorded, hooks = [[] for _ in names], []
    for name, rows in zip(names, recorded, strict=True):
        keep = lambda _module, args, rows=rows: rows.append(args[0].flatten(0, -2))  # noqa: E731
        hooks.append(vlm.model.get_submodule(name).register_forward_pre_hook(keep))
    for batch in batches:
        with torch.no_grad():
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"}, use_cache=False)
    for hook in hooks:
        hook.remove()
    mask = torch.cat([batch["modality"].flatten() for batch in batches])
    return [
        {kind: torch.cat(rows).double()[mask == code] for code, kind in enumerate(MODALITIES, start=1)}
        for rows in recorded
    ]


@pytest.mark.parametrize(
    ("model_name", "prefix", "reducer"),
    [
        ("llava", "groups", "uniform:0.5"),
        ("qwen3_vl", "blocks", None),
        ("gemma4", "blocks", None),
        pytest.param("gemma4", "groups", None, marks=pytest.mark.slow),
    ],
)
def test_cross_grams_are_those_of_two_whole_models(model_name, prefix, reducer, loaded):
    """Padding, several sizes, deepstack features and shared keys and values included; also past a block finished already, and
    after a reducer."""
    vlm = wide(loaded(model_name))
    batches = encode(samples(), vlm)
    if reducer:
        batches, vlm = reduced(vlm, batches, parse_reducer(reducer)), decoder(vlm)
    blocks = decoder_blocks(vlm.model, vlm.spec)
    original = VLM(copy.deepcopy(vlm.model), vlm.processor, vlm.spec, vlm.path)
    changed = VLM(copy.deepcopy(vlm.model), vlm.processor, vlm.spec, vlm.path)
    first, moved = next(layer for layer, groups in enumerate(blocks) if groups), 0
    captured_groups: list[str] = []
    spec = CaptureSpec(STATISTICS, prefix)
    for layer, captured in capture_blocks(vlm, blocks, batches, spec, finished=lambda layer: layer == first):
        groups = [group for group in blocks[layer] if captured is None or group.name in captured.stats]
        names = [] if captured is None else [group.linears[0] for group in groups]
        captured_groups += names
        both = (
            zip(groups, *(layer_inputs(which, batches, names) for which in (changed, original)), strict=True)
            if names
            else ()
        )
        for group, xs, ys in both:
            for kind, x in xs.items():
                expected = x.T @ (ys[kind] - x)
                cross = captured.stats[group.name].cross({kind: 1.0}).cpu().double()
                scale = x.norm() * (ys[kind] - x).norm()
                assert scale > 0 and (cross - expected).norm() <= 1e-4 * scale, (group.linears[0], kind)
                moved += float(expected.norm() > 0.01 * (x.T @ x).norm())
        for model in (vlm.model, changed.model):
            for group in groups:
                for name in group.linears:
                    model.get_submodule(name).weight.data.mul_(1.25)
    assert moved
    assert captured_groups == [group.linears[0] for groups in blocks[first + 1 :] for group in groups]


def test_unchanged_blocks_give_no_difference(loaded):
    vlm = wide(loaded("qwen2_vl"))
    batches, blocks = encode(samples(), vlm), decoder_blocks(vlm.model, vlm.spec)
    captures = [
        captured for _, captured in capture_blocks(vlm, blocks, batches, CaptureSpec(STATISTICS, "blocks")) if captured
    ]
    assert len(captures) == len(blocks)
    assert not any(stats.cross().any() for captured in captures for stats in captured.stats.values())
