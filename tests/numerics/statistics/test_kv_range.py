"""Ranges of keys and values: histograms against the values themselves, and FP8 as torch rounds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli, models
from vlmcompress.cli import _process as terminal
from vlmcompress.models.data import bundled_data, encode, load_samples
from vlmcompress.numerics.statistics import kv_range
from vlmcompress.numerics.statistics.balance import MODALITIES
from vlmcompress.numerics.statistics.kv_range import BINS, KVRange
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve


def seen(*batches: tuple[Tensor, Tensor]) -> KVRange:
    """Keys of these batches; their values are the negative double."""
    kv_range = KVRange()
    for x, mask in batches:
        kv_range.update(0, x, mask)
        kv_range.update(1, -2 * x, mask)
    return kv_range


def batches(count: int = 3, large: float = 4.0) -> list[tuple[Tensor, Tensor]]:
    """Random keys `[1, 2, 50, 16]` with the modality of each token; the visual ones are `large` times larger."""
    random = torch.Generator().manual_seed(0)
    collected = []
    for _ in range(count):
        mask = torch.randint(0, 4, (1, 50), generator=random, dtype=torch.uint8)
        x = torch.randn(1, 2, 50, 16, generator=random) * torch.where(mask == 2, large, 1.0)[:, None, :, None]
        collected.append((x.bfloat16(), mask))
    return collected


def of(collected: list[tuple[Tensor, Tensor]], name: str) -> Tensor:
    """All numbers of a modality, picked token by token."""
    code = 1 + MODALITIES.index(name)
    return torch.cat([x[0, :, t].flatten().float() for x, mask in collected for t in range(50) if mask[0, t] == code])


def test_maxima_counts_and_scales():
    data = batches()
    ranges = seen(*data).ranges
    for i, name in enumerate(MODALITIES):
        values = of(data, name)
        assert ranges[0, i, 0] == values.abs().max() and ranges[1, i, 0] == 2 * values.abs().max()
        assert ranges[0, i, 1:].sum() == values.numel()
        bins = ((values.abs().double().log2() + 32) * 8).floor()
        share = (ranges[0, i, 1:] - torch.bincount(bins.long(), minlength=BINS)).abs().sum() / values.numel()
        assert share < 0.01  # what lies on an edge may fall to either side
    biggest = max(of(data, name).abs().max() for name in MODALITIES)
    torch.testing.assert_close(kv_range.kv_scales(ranges), torch.stack([biggest, 2 * biggest]) / 448)


def test_text_alone_would_clip_image_tokens():
    """Against counting, to within a bin of an eighth of an octave; and nothing the other way round."""
    data = batches(count=40)
    report = kv_range.report(seen(*data).ranges)
    limit = max(of(data, name).abs().max() for name in ("text", "answer"))
    expected = (of(data, "vision").abs() > limit).float().mean().item()
    assert 0.2 < expected < 0.4
    for part in ("k", "v"):
        assert report[part]["clipped"]["vision"] == pytest.approx(expected, abs=0.01)
        assert report[part]["clipped"]["text"] == 0.0
    smaller = kv_range.report(seen(*batches(count=40, large=0.25)).ranges)
    assert smaller["k"]["clipped"]["vision"] == 0.0 and smaller["k"]["clipped"]["text"] > 0.2


@pytest.mark.parametrize("spread", [1.0, 1e-4, 3.0])
def test_rounding_error_is_that_of_torch(spread):
    """Normal and subnormal numbers: the histogram's estimate against rounding each number, within a twentieth."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(1, 4, 5000, 16, generator=random).exp() * spread  # five orders of magnitude
    mask = torch.ones(1, 5000, dtype=torch.uint8)
    report = kv_range.report(seen((x, mask)).ranges)["k"]
    for key, scale in (("error", report["scale"]), ("error_unscaled", 1.0)):
        rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
        expected = ((rounded - x).square().sum() / x.square().sum()).item()
        assert report[key]["text"] == pytest.approx(expected, rel=0.05)
    assert list(report["error"]) == ["text"] and report["clipped"] == {"vision": None, "text": None}


def given(out: Path, scheme: str) -> dict:
    """A recipe with an FP8 cache."""
    base = {"model": str(DEMO_LLAVA), "out": str(out), "scheme": scheme, "kv_cache": "fp8"}
    return base | {"calibrate": {"samples": 6}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kv") / "out"
    quantize(resolve(given(out, "rtn")).recipe)
    return out


def test_the_demo_models_first_block(checkpoint):
    """The manifest's maxima are those of the first attention's projections of the plain model, keys after RoPE."""
    vlm = models.load(DEMO_LLAVA)
    vlm.model.set_attn_implementation("eager")
    samples = load_samples(str(bundled_data(DEMO_LLAVA, "calibration")), samples=6, seed=0)
    name = f"{models.decoder_layers(vlm.model, vlm.spec)[0]}.self_attn"
    attention, observed, mask = vlm.model.get_submodule(name), KVRange(), torch.zeros(1)
    from transformers.models.llama import modeling_llama

    def look(_module, _args, kwargs):
        x, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        shape = (*x.shape[:-1], -1, attention.head_dim)
        keys, values = (p(x).view(shape).transpose(1, 2) for p in (attention.k_proj, attention.v_proj))
        observed.update(0, modeling_llama.apply_rotary_pos_emb(keys, keys, cos, sin)[1], mask)
        observed.update(1, values, mask)

    attention.register_forward_pre_hook(look, with_kwargs=True)
    for batch in encode(samples, vlm):
        mask = batch.pop("modality")
        with torch.no_grad():
            vlm.model(**batch)
    recorded = json.loads((checkpoint / "vlmcompress.json").read_text())["kv_cache"][name]
    expected = kv_range.report(observed.ranges)
    for part in ("k", "v"):
        assert recorded[part]["maximum"] == pytest.approx(expected[part]["maximum"], rel=1e-2)
        assert recorded[part]["error"] == pytest.approx(expected[part]["error"], rel=5e-2)  # the oracle's are rounded


def test_errors_of_the_cache_are_reported(checkpoint, capfd, monkeypatch):
    """A second table on the terminal, and everything as JSON."""
    monkeypatch.setattr(terminal, "quiet_libraries", lambda: None)
    recorded = json.loads((checkpoint / "vlmcompress.json").read_text())["kv_cache"]
    assert cli.main(["report", "--errors", str(checkpoint), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["checkpoints"][0]["kv_cache"] == recorded
    assert cli.main(["report", "--errors", str(checkpoint)]) == 0
    table = capfd.readouterr().out.partition("FP8 cache")[2].splitlines()
    largest = {
        f"{name}, {part}": max(entry[key]["error"].values())
        for name, entry in recorded.items()
        for key, part in (("k", "keys"), ("v", "values"))
    }
    rows = [re.split(r"\s{2,}", line.strip())[0] for line in table[1 : 1 + min(len(largest), 12)]]
    assert rows == sorted(largest, key=lambda name: (-largest[name], name))[:12]
