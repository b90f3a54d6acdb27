"""The search for ranges over runs of blocks, against trying everything with the whole model."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kit import calibration_rows, tiny
from vlmcompress import models
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode, load_samples
from vlmcompress.numerics import fake_quantize, find_params
from vlmcompress.quantization.calibration import block_clip, block_inputs
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.run import quantize
from vlmcompress.quantization.schemes import qvlm
from vlmcompress.recipe import resolve
from vlmcompress.utils.registry import SCHEMES

FAMILIES = (
    "llava",
    "qwen3-vl",
    "gemma3",
)  # plain; features added between blocks; masks that differ from block to block


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Tiny models and a few samples, one of them text alone."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 3, lambda i: f"{i}.png" if i else [])
    for name in FAMILIES:
        tiny.build(name, folder / name)
    return folder


def loaded(world, name):
    """The model in float32, its blocks and its samples."""
    vlm = models.load(world / name, dtype=torch.float32)
    modules = [vlm.model.get_submodule(block) for block in models.decoder_layers(vlm.model, vlm.spec)]
    return vlm, modules, encode(load_samples(world / "calib.jsonl", samples=3, seed=0), vlm)


@torch.no_grad()
def outputs(vlm, module, batches) -> list[torch.Tensor]:
    """What comes out of a block, `[tokens, width]`, when the whole model runs."""
    captured = []
    hook = module.register_forward_hook(lambda _m, _a, out: captured.append(out[0] if isinstance(out, tuple) else out))
    for batch in batches:
        vlm.model(**{name: value for name, value in batch.items() if name != "modality"})
    hook.remove()
    return [x[0] for x in captured]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_blocks_called_on_their_own_do_what_they_did_in_the_model(world, name):
    vlm, modules, batches = loaded(world, name)
    samples, entropies = block_inputs.capture_block_inputs(vlm, batches), block_clip.entropies(vlm, batches)
    xs, by_name = [sample.hidden for sample in samples], {}
    for block in range(len(modules)):
        xs = block_clip.call(modules, block, xs, samples)
    for batch, x in zip(samples, xs, strict=True):
        by_name |= {i: row[mask > 0].cpu() for i, row, mask in zip(batch.samples, x, batch.modality, strict=True)}
    for i, expected in enumerate(outputs(vlm, modules[-1], batches)):
        torch.testing.assert_close(by_name[i], expected[batches[i]["modality"][0] > 0], rtol=1e-4, atol=1e-4)
    assert len(entropies) == len(modules) and all(0 < bits < 4 for bits in entropies)
    added = [sum(part is not None for part in sample.added) for sample in samples]
    assert (max(added) > 0) == (name == "qwen3-vl")


@torch.no_grad()
def test_against_every_combination(world, monkeypatch):
    """Two blocks searched together, 2^8 combinations of ranges, each judged by the output of the whole model.

    The search's own choice has the error that it should, is better than full ranges and than each layer for itself, no
    single change improves on it, and few combinations do."""
    vlm, modules, batches = loaded(world, "llava")
    monkeypatch.setattr(qvlm, "partition", lambda entropies, depth: [list(range(len(entropies)))])
    options = qvlm.Options(bits=3, group_size=64, grid=2, lowest=0.9, sweeps=9)
    blocks = decoder_blocks(vlm.model, vlm.spec)
    assert len(blocks) == 2
    groups = [group for block_groups in blocks for group in block_groups]
    before = {name: value.clone() for name, value in vlm.model.state_dict().items()}
    searched = block_clip.search_ranges(vlm, blocks, batches, QuantMethod(qvlm.SCHEME, options))
    assert all(torch.equal(before[name], value) for name, value in vlm.model.state_dict().items())
    targets = outputs(vlm, modules[-1], batches)
    rounded = {}
    for group, percentile in itertools.product(groups, (1.0, 0.9)):
        for name in group.linears:
            w, fmt = before[f"{name}.weight"], qvlm.SCHEME.scheme(options).weights
            ratio = torch.quantile(w.abs().unflatten(1, (-1, 64)), percentile, dim=-1)
            ratio = ratio / w.abs().unflatten(1, (-1, 64)).amax(-1)
            rounded[name, percentile] = fake_quantize(w, *find_params(w, fmt, ratio=ratio), fmt)
    errors = {}
    for choice in itertools.product((1.0, 0.9), repeat=len(groups)):
        for group, percentile in zip(groups, choice, strict=True):
            for name in group.linears:
                vlm.model.get_parameter(f"{name}.weight").copy_(rounded[name, percentile])
        ours = outputs(vlm, modules[-1], batches)
        errors[choice] = sum(float((a - b).square().sum()) for a, b in zip(ours, targets, strict=True))
    chosen = tuple(searched.others[group.layer, group.name].options.percentile for group in groups)
    chosen = tuple(round(percentile, 6) for percentile in chosen)
    full = (1.0,) * len(groups)
    assert errors[chosen] < errors[full]
    for i, percentile in enumerate(chosen):
        other = (*chosen[:i], round(1.9 - percentile, 6), *chosen[i + 1 :])
        assert errors[chosen] <= errors[other] * (1 + 1e-5), "a single change would have been better"
    better = sum(error < errors[chosen] * (1 - 1e-5) for error in errors.values())
    assert better <= 0.02 * len(errors), f"{better} combinations are better"


def test_a_checkpoint_with_searched_ranges(world, tmp_path):
    """Through the whole pipeline: other weights than rounding to nearest, and the same again in a second run."""

    def recipe(out, scheme="qvlm", options=None, **calib):
        calib = calib or {"data": str(world / "calib.jsonl"), "samples": 3}
        keys = {"model": str(world / "llava"), "out": str(out), "scheme": scheme, "calibrate": calib}
        return resolve(keys | {"options": {"bits": 3, "group_size": 64} if options is None else options}).recipe

    quantize(recipe(tmp_path / "a"))
    quantize(recipe(tmp_path / "b"))
    quantize(recipe(tmp_path / "rtn", "rtn", {"bits": 3, "group_size": 64, "symmetric": False}))
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b", "rtn")]
    assert files[0] == files[1] and files[0] != files[2]
    assert not [check for check in doctor.diagnose(tmp_path / "a", source=world / "llava") if not check.ok]


@torch.no_grad()
def test_groups_with_a_width_of_their_own(world):
    """Ranges are searched in each group's own format, and groups that are quantized in another way keep theirs."""
    vlm, _, batches = loaded(world, "llava")
    options, other = qvlm.Options(bits=4, group_size=64), SCHEMES.get("int8")
    others = {
        (0, "qkv"): QuantMethod(qvlm.SCHEME, replace(options, bits=2)),
        (1, "down"): QuantMethod(other, other.OPTIONS()),
    }
    searched = block_clip.search_ranges(
        vlm, decoder_blocks(vlm.model, vlm.spec), batches[:1], QuantMethod(qvlm.SCHEME, options, others)
    )
    assert searched.others[1, "down"] == others[1, "down"]
    widths = {key: method.options.bits for key, method in searched.others.items() if key != (1, "down")}
    assert widths.pop((0, "qkv")) == 2 and set(widths.values()) == {4} and len(widths) == 6
