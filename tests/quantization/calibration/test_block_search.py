"""MBQ's search as published, against its formulas written out: every candidate on the modules themselves, token by token."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from PIL import Image
from torch import Tensor, nn

from tests.kit.batched_samples import samples, wide
from tests.kit.places import ROOT
from tests.kit.spread import uneven
from vlmcompress import models
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics.statistics.balance import Sensitivity
from vlmcompress.quantization.calibration.block_search import search_blocks
from vlmcompress.quantization.calibration.routed import mixtures
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import mbq

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import stock_methods

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
    return {
        (g.layer, g.name): Sensitivity(RHO[g.name.rpartition(".")[2]] * (1 + g.layer))
        for groups in blocks
        for g in groups
    }


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


def published(
    run: Callable, mean: Tensor, codes: list[Tensor], grid: int, rho: float
) -> tuple[list[Tensor], list[float]]:
    """Every candidate and its loss, from the paper's formulas.

    Args:
        run: scale, or None -> each sample's output with the layers as they are quantized with this scale, or as they are.
        mean: mean magnitudes of the layers' input.
        codes: modality of each sample's tokens.
    """
    scales, losses, before = [], [], run(None)
    for k in range(grid):
        s = mean.pow(k / grid).clamp(min=1e-4)
        s = s / (s.max() * s.min()).sqrt()
        answer, vision = [], []
        for x, y, kinds in zip(before, run(s), codes, strict=True):
            for token, kind in zip((x - y).double().abs(), kinds.tolist(), strict=True):
                (answer if kind == 3 else vision if kind == 2 else []).append(token)
        sums = (float(torch.stack(tokens).sum()) if tokens else 0.0 for tokens in (answer, vision))
        scales.append(s)
        losses.append((next(sums) + rho * next(sums)) / sum(map(len, answer + vision)))
    return scales, losses


def published_of_group(vlm, group, options, rho: float, batches) -> tuple[list[Tensor], list[float]]:
    """`published` for a group whose module sees every token."""
    block = group.linears[0].partition(".self_attn")[0].partition(".mlp")[0]
    module = vlm.model.get_submodule(f"{block}.{INSPECTED[group.name]}")
    module_calls = calls(vlm, module, batches)
    codes = [batch["modality"][0] for batch in batches]
    inputs = [args[0][0] for args, _ in calls(vlm, vlm.model.get_submodule(group.linears[0]), batches)]
    mean = torch.cat([x[kinds > 0] for x, kinds in zip(inputs, codes, strict=True)]).abs().mean(0)

    @torch.no_grad()
    def run(s: Tensor | None) -> list[Tensor]:
        changed = copy.deepcopy(module)
        if s is not None and isinstance(module, nn.Linear):
            changed = Candidate(module, s, options)
        elif s is not None:
            for name in group.linears:
                child = name.split(".")[-1]
                setattr(changed, child, Candidate(getattr(module, child), s, options))
        outputs = [changed(*args, **kwargs) for args, kwargs in module_calls]
        return [output[0][0] if isinstance(output, tuple) else output[0] for output in outputs]

    return published(run, mean, codes, options.grid, rho)


@pytest.mark.parametrize(
    "case",
    [name if name in ("w4-mae", "w4a8-mae") else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED],
)  # of weights alone and of inputs too; the others are of other bits
def test_finds_what_the_published_formulas_find(vlm, batches, case):
    """Oracle: every candidate of every group of both blocks. Samples of other lengths and without an image are among them."""
    options, blocks = mbq.Options(**PUBLISHED[case]), decoder_blocks(vlm.model, vlm.spec)
    known_sensitivities = sensitivities(blocks)
    before = {name: tensor.clone() for name, tensor in vlm.model.state_dict().items()}
    searched = search_blocks(vlm, blocks, batches, QuantMethod(mbq.SCHEME, options), known_sensitivities)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vlm.model.state_dict().items()), (
        "model was changed"
    )
    moved = 0
    for group in (group for groups in blocks for group in groups):
        key = group.layer, group.name
        scales, expected = published_of_group(vlm, group, options, known_sensitivities[key].rho, batches)
        # Equal up to values on the edge between two codes, which 8-bit inputs have in every token: its largest.
        each, mean = (0.1, 0.02) if options.activations == 8 else (2e-3, 1e-3)
        ratios = [loss / reference for loss, reference in zip(searched[key].losses, expected, strict=True)]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=each), group.name
        assert sum(ratios) / len(ratios) == pytest.approx(1, abs=mean), group.name
        chosen = searched[key].losses.index(min(searched[key].losses))
        assert expected[chosen] <= min(expected) * (1 + each)
        torch.testing.assert_close(searched[key].best, scales[chosen], rtol=1e-3, atol=1e-4)
        moved += expected.index(min(expected)) > 0
    assert moved >= 4, "the test needs groups on which scaling pays"


@pytest.mark.parametrize("all_experts", [False, True], ids=["routed", "all tokens"])
def test_an_experts_scale_is_searched_on_the_tokens_routed_to_it(loaded, all_experts):
    """Oracle: the formulas on these tokens. Expert 0, whose tokens are made the prompt's, has no scale; expert 1, whose answers
    get no gradient, weights all tokens alike. `--all-experts` shows each of them all tokens."""
    vlm, options = wide(loaded("qwen3-vl-moe")), mbq.Options(group_size=64, grid=4)
    blocks, batches = decoder_blocks(vlm.model, vlm.spec), encode(samples(), vlm)
    (mixture,) = mixtures(vlm.model)
    routed = [args[:2] for args, _ in calls(vlm, mixture, batches)]
    for batch, (_, chosen) in zip(batches, routed, strict=True):
        batch["modality"][(batch["modality"] > 0) & (chosen == 0).any(1)] = 1
    x, chosen = (torch.cat([call[place] for call in routed]) for place in (0, 1))
    codes, weights = torch.cat([batch["modality"][0] for batch in batches]), sensitivities(blocks)
    weights[1, "experts.1.down"] = Sensitivity(math.inf)
    searched = search_blocks(vlm, blocks, batches, QuantMethod(mbq.SCHEME, options), weights, all_experts=all_experts)
    assert ((1, "experts.0.down") in searched) == all_experts
    for number, expert in enumerate(mixture):
        if number == 0 and not all_experts:
            continue
        routed_rows = torch.ones_like(codes, dtype=torch.bool) if all_experts else (chosen == number).any(1)
        with torch.no_grad():
            inner = expert.act_fn(expert.gate_proj(x[routed_rows])) * expert.up_proj(x[routed_rows])

        @torch.no_grad()
        def run(s: Tensor | None, down: nn.Linear = expert.down_proj, inner: Tensor = inner) -> list[Tensor]:
            return [(down if s is None else Candidate(down, s, options))(inner)]

        mean = inner[codes[routed_rows] > 0].abs().mean(0)
        rho = 1.0 if number == 1 else weights[1, f"experts.{number}.down"].rho
        scales, expected = published(run, mean, [codes[routed_rows]], options.grid, rho)
        result = searched[1, f"experts.{number}.down"]
        assert result.losses == pytest.approx(expected, rel=2e-3)
        torch.testing.assert_close(result.best, scales[expected.index(min(expected))], rtol=1e-3, atol=1e-4)


def test_losses_are_those_of_llmcompressors_search(vlm, batches):
    """Its own grid loop, observers and runs of modules sample by sample, with MBQ's loss in the place of the squared error.

    Equal up to values on the edge between two codes: it folds each scale into the model before it searches the next.
    """
    batches = [batch for batch in batches if "pixel_values" in batch]  # its pipeline traces the model once
    options, rho, losses = mbq.Options(group_size=32, grid=8), 0.7, list[float]()

    class ByAbsoluteError(AWQModifier):
        def _get_grid_search_params(self) -> list[tuple[float, bool]]:
            return [(k / self.n_grid, False) for k in range(self.n_grid)]

        def _compute_loss(self, fp16_outputs: list[Tensor], int_w_outputs: list[Tensor]) -> float:
            total, count = 0.0, 0
            for batch, x, y in zip(batches, fp16_outputs, int_w_outputs, strict=True):
                for code, weight in ((2, rho), (3, 1.0)):
                    d = (x - y)[batch["modality"] == code].abs()
                    total, count = total + weight * d.sum(dtype=torch.float64).item(), count + d.numel()
            losses.append(total / count)
            return losses[-1]

    blocks = decoder_blocks(vlm.model, vlm.spec)
    groups = [group for groups in blocks for group in groups]
    searched = search_blocks(
        vlm,
        blocks,
        batches,
        QuantMethod(mbq.SCHEME, options),
        {(group.layer, group.name): Sensitivity(rho) for group in groups},
    )
    linears = [stock_methods.exactly(linear) for group in groups for linear in group.linears]
    config = compressed_tensors.quantization_config([(mbq.SCHEME.scheme(options), linears)], ignore=[])
    theirs = ByAbsoluteError(mappings=stock_methods.mappings_of(groups), n_grid=options.grid, duo_scaling=False)
    recipe = [theirs, QuantizationModifier(config_groups=config["config_groups"])]
    stock_methods.run_oneshot(replace(vlm, model=copy.deepcopy(vlm.model)), batches, recipe)
    assert len(losses) == len(groups) * options.grid
    for number, group in enumerate(groups):  # in the order of the mappings
        expected, result = losses[number * options.grid :][: options.grid], searched[group.layer, group.name].losses
        assert result == pytest.approx(expected, rel=2e-3), group.name
        assert expected[result.index(min(result))] <= min(expected) * (1 + 2e-3)
