"""AWQ's finalists, against every candidate on a copy of the module, token by token, and against llm-compressor's search."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.kit.pictures import picture
from tests.kit.spread import uneven
from vlmcompress import models
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import Sample, encode
from vlmcompress.numerics import fake_quantize, find_params
from vlmcompress.quantization.calibration import block_search, finalists
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import awq

ALL = {"group_size": 32, "bits": 3, "clip": False, "objective": "both", "finalists": 100}
WEIGHTS = {"text": 0.0, "vision": 1.0, "answer": 4.0}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory) -> models.VLM:
    """One whose scales are worth searching."""
    return uneven(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def batches(vlm) -> list[dict[str, Tensor]]:
    """Three samples with images and one without, of different lengths."""
    samples = [
        Sample(f"{i}", (picture(56, 56, seed=i),) if i else (), "what is it" * (i + 1), "red or green")
        for i in range(4)
    ]
    encoded = encode(samples, vlm)
    return [{k: v.float() if v.is_floating_point() else v for k, v in batch.items()} for batch in encoded]


def chosen(vlm, batches, options) -> dict[tuple[int, str], Tensor | None]:
    """What `choose` finds for every block of the unquantized model."""
    blocks, method, by_name = decoder_blocks(vlm.model, vlm.spec), QuantMethod(awq, options), {}
    spec = CaptureSpec(frozenset({"gram", "absmean"}), "blocks")
    for layer, captured in capture_blocks(vlm, blocks, batches, spec):
        scales = finalists.choose(vlm, layer, blocks[layer], captured.batches, captured.stats, method)
        by_name |= {(layer, name): scale for name, scale in scales.items()}
    return by_name


def least(vlm, batches, group, options, weights) -> Tensor:
    """Of 1 and all candidates the one of least weighted squared error of the module's output, each tried on a copy."""
    module = vlm.model.get_submodule(group.linears[0].rpartition(".")[0])
    calls: list[tuple[tuple, dict]] = []
    rows: list[Tensor] = []
    first = vlm.model.get_submodule(group.linears[0])
    hooks = [
        module.register_forward_pre_hook(lambda _m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True),
        first.register_forward_pre_hook(lambda _m, args: rows.append(args[0])),
    ]
    with torch.no_grad():
        for batch in batches:
            vlm.model(**{k: v for k, v in batch.items() if k != "modality"}, use_cache=False)
    for hook in hooks:
        hook.remove()
    codes = torch.cat([batch["modality"][0] for batch in batches]).long()
    counts = codes.bincount(minlength=4).double()
    per_token = torch.tensor([0.0, *weights])[codes].double() / (1 if len(set(weights)) == 1 else counts[codes])
    x = torch.cat([call[0] for call in rows])
    shares = per_token / per_token.sum()
    mean = (shares[:, None] * x.abs()).sum(0).float()
    originals = [vlm.model.get_parameter(f"{name}.weight").detach() for name in group.linears]

    class Stats:
        def absmean(self) -> Tensor:
            return mean

    fmt, losses = awq.scheme(options).weights, []
    scales = [torch.ones_like(mean), *awq.candidates(originals, Stats(), options)]  # type: ignore[arg-type]
    for s in scales:
        changed = copy.deepcopy(module)
        for name, weight in zip(group.linears, originals, strict=True):
            params = find_params(weight * s, fmt, scale_dtype=torch.float32)
            rounded = fake_quantize(weight * s, *params, fmt) / s
            changed.get_submodule(name.rpartition(".")[2]).weight = nn.Parameter(rounded)
        errors = []
        with torch.no_grad():
            for args, kwargs in calls:
                before, after = module(*args, **kwargs), changed(*args, **kwargs)
                d = before[0] - after[0] if isinstance(before, tuple) else before - after
                errors.append(d.double().square().view(-1, d.shape[-1]).sum(1))
        losses.append(float((torch.cat(errors) * per_token).sum()))
    return scales[int(np.argmin(losses))]


@pytest.mark.parametrize("balance", ["off", WEIGHTS])
def test_all_as_finalists_are_the_search_by_output(vlm, batches, balance):
    """Oracle: all candidates, with tokens alike and with modalities weighed; some choices are not the Gram matrix's."""
    options = awq.Options(**ALL, balance=balance)
    before = {name: tensor.clone() for name, tensor in vlm.model.state_dict().items()}
    scales = chosen(vlm, batches, options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in vlm.model.state_dict().items())
    assert scales.keys() == {(layer, name) for layer in (0, 1) for name in ("qkv", "gate_up")}
    weights = [1.0] * 3 if balance == "off" else list(WEIGHTS.values())
    groups = [group for block in decoder_blocks(vlm.model, vlm.spec) for group in block]
    for group in groups:
        if (group.layer, group.name) in scales:
            scale = scales[group.layer, group.name]
            scale = torch.ones(64) if scale is None else scale.cpu()
            torch.testing.assert_close(scale, least(vlm, batches, group, options, weights), rtol=1e-4, atol=1e-6)
    single = chosen(vlm, batches, awq.Options(**ALL | {"finalists": 1}, balance=balance))
    assert any(
        not torch.equal(torch.ones(64) if a is None else a, torch.ones(64) if b is None else b)
        for a, b in ((single[key], scales[key]) for key in scales)
    )


def test_llm_compressors_search_agrees(vlm, batches):
    """`objective: block` on the same candidates (`duo: false`), for the first block, whose inputs are the same."""
    blocks = decoder_blocks(vlm.model, vlm.spec)
    scales = chosen(vlm, batches, awq.Options(**ALL, duo=False))
    stock = block_search.search_blocks(
        vlm, blocks, batches, QuantMethod(awq, awq.Options(**ALL | {"objective": "block"}, duo=False)), {}
    )
    for name in ("qkv", "gate_up"):
        scale = torch.ones(64) if scales[0, name] is None else scales[0, name]
        torch.testing.assert_close(scale, stock[0, name], rtol=1e-3, atol=1e-4, check_device=False)
