"""LUQ's entropy of a block's input against sizes of clusters that are known, and as an allocation of bits collects it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit import calibration_rows, tiny
from vlmcompress import models
from vlmcompress.models import decoder_blocks
from vlmcompress.models.data import encode, load_samples
from vlmcompress.models.devices import float_products
from vlmcompress.quantization import allocate
from vlmcompress.quantization.calibration.entropy import cluster_entropy
from vlmcompress.quantization.inputs import Inputs
from vlmcompress.quantization.plan import make_plan
from vlmcompress.recipe import resolve
from vlmcompress.utils.progress import silent

SAMPLES = 12
"""Enough for more tokens that differ than there are clusters: with fewer, how equal tokens are shared out is chance."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model and a few samples, one of them text alone."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, SAMPLES, lambda i: f"{i}.png" if i else [])
    tiny.build("llava", folder / "llava")
    return folder


def recipe(world, out):
    calib = {"data": str(world / "calib.jsonl"), "samples": SAMPLES}
    return resolve(
        {
            "model": str(world / "llava"),
            "out": str(out),
            "scheme": "gptq",
            "calibrate": calib,
            "options": {"group_size": 32},
            "bits": {"budget": 3.9, "by": "luq"},
        }
    ).recipe


def entropy(counts) -> float:
    """`-sum p log2 p` as it is written down."""
    total = sum(counts)
    return -sum(count / total * math.log2(count / total) for count in counts if count)


def test_entropy_of_clusters_that_are_known():
    """Far apart clouds of 1, 2, 5 and 8 hundred points: k-means finds them, and their sizes give the entropy."""
    torch.manual_seed(0)
    sizes = (100, 200, 500, 800)
    points = torch.cat([torch.randn(size, 6) + 1000 * k for k, size in enumerate(sizes)])
    assert cluster_entropy(points, clusters=4) == pytest.approx(entropy(sizes), abs=1e-12)
    assert cluster_entropy(points[torch.randperm(len(points))], clusters=4) == pytest.approx(entropy(sizes), abs=1e-12)


def test_k_means_is_started_ten_times():
    """As in the authors' code; oracle: scikit-learn. In a cloud without clusters one start gives other sizes."""
    from sklearn.cluster import KMeans

    torch.manual_seed(0)
    points = torch.randn(600, 8)
    kept = KMeans(n_clusters=20, n_init=10, random_state=42).fit_predict(points.numpy())
    sizes = torch.from_numpy(kept).long().bincount().tolist()
    assert cluster_entropy(points, clusters=20) == pytest.approx(entropy(sizes), abs=1e-12)
    once = KMeans(n_clusters=20, n_init=1, random_state=42).fit_predict(points.numpy())
    assert abs(entropy(torch.from_numpy(once).bincount().tolist()) - entropy(sizes)) > 1e-4


def test_no_more_clusters_than_tokens():
    assert cluster_entropy(torch.eye(5) * 100) == pytest.approx(math.log2(5))


def test_an_allocation_measures_the_plain_model(world, tmp_path):
    """The values are those of inputs that hooks catch while the whole model runs, sample by sample, padding left out."""
    planned = make_plan(recipe(world, tmp_path / "out"))
    vlm = models.load(world / "llava")
    batches = encode(load_samples(world / "calib.jsonl", samples=SAMPLES, seed=0), vlm)
    facts = allocate._predicted(planned, Inputs(vlm, batches, {}), None, 0, silent)
    vlm.model.set_attn_implementation("eager")
    captured: list[list[torch.Tensor]] = [[] for _ in decoder_blocks(vlm.model, vlm.spec)]
    for rows, groups in zip(captured, decoder_blocks(vlm.model, vlm.spec), strict=True):
        norm = vlm.model.get_submodule(groups[0].smooth)
        assert groups[0].smooth.endswith("input_layernorm")
        norm.register_forward_hook(lambda _module, _args, out, rows=rows: rows.append(out[0].float()))
    for batch in batches:
        with torch.no_grad(), float_products(vlm.model):  # as calibration does on a processor without BF16: see there
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"})
        for rows in captured:
            rows[-1] = rows[-1][batch["modality"][0] > 0]
    inputs = [torch.cat(rows) for rows in captured]
    torch.manual_seed(3)
    for value, x in zip(facts["entropy"], inputs, strict=True):
        other = [
            cluster_entropy(x[torch.randperm(len(x))]) for _ in range(4)
        ]  # where k-means starts from decides a little
        assert min(other) - 0.03 <= value <= max(other) + 0.03
