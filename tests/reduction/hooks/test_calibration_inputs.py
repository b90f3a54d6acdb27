"""Calibration after a reducer: the decoder gets what generation gives it, and every pass over its blocks works."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.kit import calibration_rows, tiny
from vlmcompress import models
from vlmcompress.models.data import encode, load_samples
from vlmcompress.models.data.encode import ANSWER, VISION
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.hooks.calibration_inputs import decoder, reduced


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reduced")
    calibration_rows.write(folder, 4, lambda i: [] if i == 0 else ["1.png", "0.png"] if i == 1 else f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def built(world):
    cache = {}

    def get(family):
        if family not in cache:
            cache[family] = tiny.build(family, world / family)
        return cache[family]

    return get


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name != "modality"}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("llava", "coverage:0.5,merge=nearest"),
        ("llava", "visionzip:0.5"),
        ("llava-next", "dart:0.5"),
        ("idefics3", "pool"),
        ("qwen2-5-vl", "dart:0.5"),
        ("qwen3-vl", "pool"),
        ("qwen3-5", "divprune:0.5"),
    ],
)
@torch.no_grad()
def test_the_decoder_computes_what_generation_computes(world, built, kind, text):
    """Logits of the answers, read after a reduced prefill of the prompt, are those of the decoder on its inputs."""
    vlm = models.load(built(kind))
    vlm.model.float()
    batches = encode(load_samples(world / "calib.jsonl", samples=4, seed=0), vlm)
    chosen = parse_reducer(text)
    shorter = reduced(vlm, batches, chosen)
    lost = 0
    for batch, got in zip(batches, shorter, strict=True):
        answered = (batch["modality"][0] == ANSWER).nonzero().flatten()
        cut, length = int(answered[0]) + 1, batch["input_ids"].shape[1]
        prompt = {n: v[:, :cut] if v.shape[:2] == (1, length) else v for n, v in inputs_of(batch).items()}
        with attach(vlm, chosen):
            parts, cache = [vlm.model(**prompt, use_cache=True)], None
            for at in range(cut, length) if "pixel_values" in batch else ():
                cache = parts[-1].past_key_values
                ids, mask = batch["input_ids"][:, at : at + 1], torch.ones(1, at + 1, dtype=torch.long)
                parts.append(vlm.model(input_ids=ids, attention_mask=mask, past_key_values=cache))
            if cache is None:
                parts = [vlm.model(**inputs_of(batch))]
        expected = torch.cat([part.logits for part in parts], 1)
        logits = decoder(vlm).model(**inputs_of(got)).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        before, after = (side["modality"][0].bincount(minlength=4) for side in (batch, got))
        assert after.sum() == logits.shape[1] and (after - before).abs()[[0, 1, 3]].sum() == 0
        assert torch.equal(got["input_ids"][got["modality"] != VISION], batch["input_ids"][batch["modality"] != VISION])
        lost += int(before[VISION] - after[VISION])
    assert lost > 0


def recipe(world, model, out, **keys):
    data = {"data": str(world / "calib.jsonl"), "samples": 4}
    return resolve({"model": str(model), "out": str(out), "calibrate": data, "scheme": "none"} | keys).recipe


SCHEMES: dict[str, dict[str, Any]] = {
    "gptq": {"scheme": "gptq", "options": {"group_size": 64}},
    "mbq": {"scheme": "mbq", "options": {"group_size": 32}},
    "mbq gram": {"scheme": "mbq", "options": {"group_size": 32, "objective": "gram"}},
    "fp8-static": {"scheme": "fp8-static", "kv_cache": "fp8"},
    "bits": {"scheme": "gptq", "options": {"group_size": 32}, "bits": {"budget": 4.6}},
}

FEW = ("gptq", "mbq", "mbq gram", "fp8-static")  # one of each way to calibrate


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SCHEMES]
)
def test_every_calibrating_scheme_runs_with_a_reducer(world, built, tmp_path, name):
    """The manifest tells the reducer and counts the tokens that were left; statistics are of other tokens than without."""
    model = built("qwen3-vl" if name in ("gptq", "mbq", "mbq gram") else "llava")
    done = quantize(recipe(world, model, tmp_path / "reduced", **SCHEMES[name], reduce="uniform:0.5"))
    plain = quantize(recipe(world, model, tmp_path / "plain", **SCHEMES[name]))
    now, before = (run.manifest["calibration"] for run in (done, plain))
    assert now["reduce"] == {"method": "uniform", "keep": 0.5} and "reduce" not in before
    assert now["tokens"] == before["tokens"] | {"vision": before["tokens"]["vision"] // 2}
    assert now["sha256"] == before["sha256"]
    assert done.manifest["errors"].keys() == plain.manifest["errors"].keys()
    assert done.manifest["errors"] != plain.manifest["errors"]


@pytest.mark.parametrize("kind", ["llava", "qwen3-vl"])
def test_a_reducer_that_keeps_everything_changes_nothing(world, built, tmp_path, kind):
    """Up to rounding: the encoder runs sample by sample instead of in batches."""
    collected = []
    for name, extra in (("plain", {}), ("whole", {"reduce": "uniform:1"})):
        keys = {"scheme": "gptq", "options": {"group_size": 64}}
        collected.append(quantize(recipe(world, built(kind), tmp_path / name, **keys, **extra)).manifest)
    plain, whole = collected
    assert whole["calibration"]["tokens"] == plain["calibration"]["tokens"]
    for modality in ("text", "vision", "answer"):
        mean, other = (sum(layer[modality] for layer in written["errors"].values()) for written in collected)
        assert mean == pytest.approx(other, rel=0.05)


def test_a_reducer_within_the_language_model_calibrates_on_all_tokens_with_a_warning(world, built, tmp_path):
    keys = {"scheme": "gptq", "options": {"group_size": 64}, "reduce": "fastv:0.5,layer=1", "engine": "transformers"}
    done = quantize(recipe(world, built("llava"), tmp_path / "out", **keys))
    assert any("calibrated on all visual tokens, as fastv:0.5,layer=1 drops" in w for w in done.manifest["warnings"])
    assert "reduce" not in done.manifest["calibration"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vlmcompress"]["reduce"]["layer"] == 1
