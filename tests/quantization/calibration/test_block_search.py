"""MBQ's search as published, against its formulas written out: every candidate on the modules themselves, token by token."""

from __future__ import annotations

import copy
import inspect
import json

import numpy as np
import pytest
import torch
from llmcompressor.modifiers.transform.awq import AWQModifier
from PIL import Image
from torch import Tensor, nn

from tests.kit.spread import uneven
from vlmcompress import models
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.quantization.calibration import block_search
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import mbq

RHO = {"qkv": 0.4, "o": 0.4, "gate_up": 3.0, "down": 3.0}
INSPECTED = {"qkv": "self_attn", "o": "self_attn.o_proj", "gate_up": "mlp", "down": "mlp.down_proj"}
PUBLISHED = {
    "w4-mae": {"group_size": 32, "objective": "mae"},
    "w3-mae": {"group_size": 64, "objective": "mae", "bits": 3},
    "w4a8-mae": {"activations": 8},
    "w8a8-mae": {"activations": 8, "bits": 8},
}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory) -> models.VLM:
    """One whose scales are worth searching."""
    return uneven(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batches(vlm, tmp_path_factory) -> list[dict[str, Tensor]]:
    """Three samples with images and one without."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    rows = []
    for i in range(4):
        Image.fromarray(random.integers(0, 256, (56, 56, 3), np.uint8)).save(folder / f"{i}.png")
        image = {"image": f"{i}.png"} if i else {}
        rows.append({"id": str(i), "question": "what is it" * (i + 1), "answer": "red or green", **image})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoded = encode(load_samples(str(folder / "data.jsonl"), samples=4, seed=0), vlm)
    return [{k: v.float() if v.is_floating_point() else v for k, v in batch.items()} for batch in encoded]


def sensitivities(blocks) -> dict[tuple[int, str], Sensitivity]:
    return {(g.layer, g.name): Sensitivity(RHO[g.name] * (1 + g.layer)) for groups in blocks for g in groups}


def calls(vlm, module: nn.Module, batches) -> list[tuple[tuple, dict]]:
    """With what a module is called in the float model, for each sample alone."""
    recorded: list[tuple[tuple, dict]] = []
    hook = module.register_forward_pre_hook(lambda _m, args, kwargs: recorded.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        for batch in batches:
            vlm.model(**{k: v for k, v in batch.items() if k != "modality"}, use_cache=False)
    hook.remove()
    return recorded


def per_row(x: Tensor, bits: int, offset: float = 0.0) -> Tensor:
    """Symmetric rounding with a scale per row, whose largest value is `more` above the largest code."""
    top = 2 ** (bits - 1) - 1
    scale = x.abs().amax(1, keepdim=True) / (top + offset)
    return (x / scale).round().clamp(-top - 1, top) * scale


def better_rows(w: Tensor, bits: int) -> Tensor:
    """Rows rounded with the largest value on the largest code or half a step above, whichever errs less."""
    above, on = (per_row(w, bits, offset) for offset in (0.5, 0.0))
    return torch.where(((on - w).square().sum(1) < (above - w).square().sum(1))[:, None], on, above)


class Candidate(nn.Module):
    """A linear layer as an engine would compute it after smoothing by `s`."""

    def __init__(self, linear: nn.Linear, s: Tensor, options: mbq.Options):
        super().__init__()
        self.s, self.bias, self.act = s, linear.bias, options.activations
        w = linear.weight * s
        if options.activations == 8:
            self.weight = better_rows(w, options.bits)
            return
        pieces = w.view(len(w), -1, options.group_size)
        low, high = pieces.amin(-1, keepdim=True).clamp(max=0), pieces.amax(-1, keepdim=True).clamp(min=0)
        scale = (high - low) / (2**options.bits - 1)
        zero = (-low / scale).round()
        self.weight = (((pieces / scale + zero).round().clamp(0, 2**options.bits - 1) - zero) * scale).view(w.shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x / self.s
        x = per_row(x.flatten(0, -2), 8).view(x.shape) if self.act == 8 else x
        return nn.functional.linear(x, self.weight, self.bias)


def published_losses(vlm, group, options, rho: float, batches) -> list[float]:
    """The loss of every candidate, from the paper's formulas."""
    block = group.linears[0].partition(".self_attn")[0].partition(".mlp")[0]
    module = vlm.model.get_submodule(f"{block}.{INSPECTED[group.name]}")
    module_calls = calls(vlm, module, batches)
    inputs = [args[0] for args, _ in calls(vlm, vlm.model.get_submodule(group.linears[0]), batches)]
    mean = torch.cat([x[b["modality"] > 0] for x, b in zip(inputs, batches, strict=True)]).abs().mean(0)
    losses = []
    for k in range(options.grid):
        s = mean.pow(k / options.grid).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        if isinstance(module, nn.Linear):
            changed = Candidate(module, s, options)
        else:
            changed = copy.deepcopy(module)
            for name in group.linears:
                child = name.split(".")[-1]
                setattr(changed, child, Candidate(getattr(module, child), s, options))
        answer, vision = [], []
        with torch.no_grad():
            for (args, kwargs), batch in zip(module_calls, batches, strict=True):
                before, after = module(*args, **kwargs), changed(*args, **kwargs)
                d = before[0] - after[0] if isinstance(before, tuple) else before - after
                d = d.double().abs()
                for token, kind in zip(d[0], batch["modality"][0].tolist(), strict=True):
                    (answer if kind == 3 else vision if kind == 2 else []).append(token)
        answer, vision = torch.stack(answer), torch.stack(vision)
        losses.append(((answer.sum() + rho * vision.sum()) / (answer.numel() + vision.numel())).item())
    return losses


@pytest.mark.parametrize(
    "case",
    [name if name in ("w4-mae", "w4a8-mae") else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED],
)  # of weights alone and of inputs too; the others are of other bits
def test_finds_what_the_published_formulas_find(vlm, batches, case, monkeypatch):
    """Oracle: every candidate of every group of both blocks. Samples of other lengths and without an image are among them."""
    searches = []
    kept = block_search.BlockSearch._compute_best_scale
    monkeypatch.setattr(
        block_search.BlockSearch,
        "_compute_best_scale",
        lambda self, *args: (searches.append(self), kept(self, *args))[1],
    )
    options, blocks = mbq.Options(**PUBLISHED[case]), decoder_blocks(vlm.model, vlm.spec)
    known_sensitivities = sensitivities(blocks)
    before = {name: tensor.clone() for name, tensor in vlm.model.state_dict().items()}
    searched = block_search.search_blocks(vlm, blocks, batches, QuantMethod(mbq.SCHEME, options), known_sensitivities)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vlm.model.state_dict().items()), (
        "model was changed"
    )
    losses, moved = searches[-1]._losses, 0
    for group in (group for groups in blocks for group in groups):
        expected = published_losses(vlm, group, options, known_sensitivities[group.layer, group.name].rho, batches)
        # Equal up to values on the edge between two codes, which 8-bit inputs have in every token: its largest.
        each, mean = (0.1, 0.02) if options.activations == 8 else (2e-3, 1e-3)
        ratios = [searched / reference for searched, reference in zip(losses[group.smooth], expected, strict=True)]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=each), group.name
        assert sum(ratios) / len(ratios) == pytest.approx(1, abs=mean), group.name
        best = expected.index(min(expected))
        chosen = losses[group.smooth].index(min(losses[group.smooth]))
        assert expected[chosen] <= min(expected) * (1 + each)
        moved += best > 0
        if best == 0:
            continue
        mean = torch.cat(
            [
                args[0][b["modality"] > 0]
                for (args, _), b in zip(
                    calls(vlm, vlm.model.get_submodule(group.linears[0]), batches), batches, strict=True
                )
            ]
        )
        torch.testing.assert_close(
            searched[group.layer, group.name],
            mbq.candidates(mean.abs().mean(0), options.grid)[chosen],
            rtol=1e-3,
            atol=1e-4,
        )
    assert moved >= 4, "the test needs groups on which scaling pays"


def test_private_parts_of_llmcompressor_exist():
    """llm-compressor's search still consists of the steps that `BlockSearch` replaces and calls."""
    arguments = list(inspect.signature(AWQModifier._compute_best_scale).parameters)
    assert arguments == ["self", "mapping", "fp16_outputs", "orig_layer_weights"]
    assert list(inspect.signature(AWQModifier._run_samples).parameters) == ["self", "module"]
    assert {"_smooth_activation_stats", "_error_metrics"} <= AWQModifier.__private_attributes__.keys()
    applied = inspect.getsource(AWQModifier._apply_smoothing)
    assert "self._compute_best_scale(" in applied and "self._run_samples(parent_module)" in applied
    hook = inspect.getsource(AWQModifier._setup_activation_cache_hooks)
    assert "flat_mask.bool()" in hook, "the mean is over tokens whose mask is not 0"
