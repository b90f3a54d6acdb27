"""The harness that compares methods of quantizing weights: its measures, its intervals and its rows."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.places import DEMOS, ROOT
from vlmcompress import models
from vlmcompress.models.data import data_hash, load_samples
from vlmcompress.models.data.provenance import token_counts
from vlmcompress.quantization.inputs import read_inputs
from vlmcompress.recipe import resolve

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
import text_probe
import weight_methods
import weights_table
from weights_bench import Bench


def test_texts_are_measured_by_the_models_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the whole models' logits in float64; the first position counts for the loss, not for the divergence."""
    torch.manual_seed(0)
    monkeypatch.setattr(text_probe, "ROWS", 4)  # several pieces a text
    vlm = models.load(DEMOS / "demo-llava", dtype=torch.float32)
    ids = [torch.randint(8, 60, (length,)) for length in (9, 5)]
    original = text_probe.reference(vlm, ids)
    with torch.no_grad():
        before = [vlm.model(input_ids=text_ids[None]).logits[0].double().log_softmax(-1) for text_ids in ids]
        for parameter in vlm.model.model.language_model.layers.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape))
        after = [vlm.model(input_ids=text_ids[None]).logits[0].double().log_softmax(-1) for text_ids in ids]
    measured = text_probe.compare(vlm, original)
    for k, text_ids in enumerate(ids):
        nll = -sum(float(after[k][t, text_ids[t + 1]]) for t in range(len(text_ids) - 1))
        kl = sum(float((before[k][t].exp() * (before[k][t] - after[k][t])).sum()) for t in range(1, len(text_ids)))
        assert kl > 1e-3
        assert float(measured["nll"][k]) == pytest.approx(nll, rel=1e-4)
        assert float(measured["kl"][k]) == pytest.approx(kl, rel=1e-3)
        assert float(measured["tokens"][k]) == len(text_ids) - 1
    means = weights_table.means({f"text/{name}": values for name, values in measured.items()})
    assert means["perplexity"] == pytest.approx(math.exp(float(measured["nll"].sum()) / 12))


def test_a_ratio_counts_clusters_and_seeds() -> None:
    """The textbook's estimator of a ratio, by Student's t on a log scale; every text twice in a cluster tells no more than
    once; the same method is at 1; of two calibrations alone, with one degree of freedom, 12.7 standard errors."""
    torch.manual_seed(0)
    b = torch.rand(1, 60, dtype=torch.float64) + 0.5
    a = b * (0.5 + 0.2 * torch.rand(1, 60, dtype=torch.float64))
    alone = weights_table.ratio(a, b, torch.arange(60))
    r = float(a.mean() / b.mean())
    half = 2.001 * math.sqrt(float((a - r * b).square().mean()) / 60) / float(a.mean())
    assert [alone["low"], alone["ratio"], alone["high"]] == pytest.approx(
        [r * math.exp(-half), r, r * math.exp(half)], rel=1e-5
    )
    twice = weights_table.ratio(a.repeat(1, 2), b.repeat(1, 2), torch.arange(60).repeat(2))
    assert twice == pytest.approx(alone)
    assert weights_table.ratio(b, b, torch.arange(60)) == {"ratio": 1, "low": 1, "high": 1}
    seeds = weights_table.ratio(torch.cat([b, 3 * b]), torch.cat([b, b]), torch.arange(60))
    assert seeds["ratio"] == pytest.approx(2)
    assert math.log(seeds["high"] / 2) == pytest.approx(12.706 * math.log(3) / 2, rel=1e-4)


@pytest.mark.parametrize("method", [name for name, row in weight_methods.METHODS.items() if row.scheme])
def test_rows_are_recipes(method: str, tmp_path: Path) -> None:
    row = weight_methods.METHODS[method]
    if row.kind == "stock":
        assert method in weight_methods.STOCK and not row.options
        return
    for form in row.formats:
        keys = {"model": str(DEMOS / "demo-llava"), "out": str(tmp_path / "out")}
        grid = weight_methods.FORMATS[form]
        recipe = resolve(keys | row.recipe_in(grid)).recipe
        assert grid is None or recipe.options.bits == grid.bits
        assert recipe.head or row.data_free != bool(recipe.quantizer.needs(recipe.options).statistics)


@pytest.mark.parametrize("english", [False, True], ids=["images", "images and texts"])
def test_both_sides_are_calibrated_on_the_same_tokens(tmp_path: Path, english: bool) -> None:
    """What llm-compressor gets, and what statistics were collected of: samples with the same keys, images in all."""
    bench = Bench(DEMOS / "demo-llava", "validation", argparse.Namespace(work=tmp_path, samples=3, questions=1))
    bench.english = english
    batches = bench.samples(seed=1)
    assert len({frozenset(batch) for batch in batches}) == 1 and "pixel_values" in batches[0]
    read = read_inputs(resolve(bench.recipe_keys(tmp_path / "out", 1) | {"scheme": "gptq"}).recipe, bench.plain, "gptq")
    facts = read.origin
    assert facts["tokens"] == token_counts(batches)["tokens"] and facts["samples"] == 3
    assert facts["sha256"] == data_hash(load_samples(bench.data, samples=3, seed=1))
    assert (facts["tokens"]["text"] + facts["tokens"]["answer"] > 300) == english


@pytest.mark.slow
def test_autoround_leaves_rounded_weights_that_run_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With zero points, which llm-compressor's wrappers of it don't have: at most 8 values a group, and a plain product."""
    import stock_methods

    monkeypatch.setitem(stock_methods.AUTOROUND, "autoround light", {"iters": 2})
    bench = Bench(DEMOS / "demo-llava", "validation", argparse.Namespace(work=tmp_path, samples=2, questions=1))
    vlm = models.load(bench.folder, dtype=torch.float32)
    decoder = vlm.model.model.language_model
    decoder.layers, decoder.config.num_hidden_layers = decoder.layers[:1], 1
    before = decoder.layers[0].mlp.down_proj.weight.clone()
    stock_methods.run_stock(vlm, bench.samples(seed=0), "autoround light", bits=3, group_size=64, symmetric=False)
    linear = decoder.layers[0].mlp.down_proj
    groups = linear.weight.detach().view(-1, 64)
    assert 4 < max(len(group.unique()) for group in groups) <= 8
    assert all((group < 0).any() and (group > 0).any() for group in groups)
    assert float((linear.weight - before).norm() / before.norm()) < 0.3
    x = torch.randn(3, linear.in_features)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight))


def test_unknown_names_are_refused() -> None:
    assert weight_methods.chosen(["rtn", "int8"], ["W8A8", "FP8"]) == [("W8A8", "int8")]
    with pytest.raises(ValueError, match="there is no 'gtpq'; choose from rtn, "):
        weight_methods.chosen(["gtpq"], ["FP8"])
    with pytest.raises(ValueError, match="there is no 'W5'; choose from W4 g128, "):
        weight_methods.chosen(["gptq"], ["W5"])
