"""What runs on the pretended device: `tests/test_pretended_cuda.py` hands this file to pytest in a process of its own.

The oracle is the CPU: with the device hidden the same call gives the same numbers, up to the order of sums.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.kit import calibration_rows, reduction_data, tiny
from tests.kit.attached_cases import given
from tests.kit.batched_samples import samples, wide
from tests.kit.pretended_cuda import OTHERS, counting
from vlmcompress.calibration import block_inputs, devices, statistics_folder
from vlmcompress.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.calibration.gradient_pass import gradients
from vlmcompress.calibration.solve import QuantMethod, solve_block
from vlmcompress.common.registry import SCHEMES
from vlmcompress.data import encode as encoded
from vlmcompress.diagnosis import measured_errors
from vlmcompress.hf_hooks import attach, refusal
from vlmcompress.models import all_specs, decoder_blocks, load
from vlmcompress.recipe import resolve
from vlmcompress.reducers import REGISTRY
from vlmcompress.runs.calibrate import calibrate
from vlmcompress.runs.quantize import quantize
from vlmcompress.statistics.inputs import NEEDS

CUDA = torch.device("cuda", 0)
FAMILIES = ("llava", "qwen2-5-vl", "qwen3-vl")
VARIANTS = {
    **{name: {"scheme": name} for name in SCHEMES.names() if name != "none"},
    "awq-by-blocks": {"scheme": "awq", "options": {"objective": "block"}},
    "mbq-by-mae": {"scheme": "mbq", "options": {"objective": "mae"}},
    "mbq-by-mse": {"scheme": "mbq", "options": {"objective": "mse"}},
    "mbq-of-8-bits": {"scheme": "mbq", "options": {"activations": 8, "bits": 8}},
}


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Within the context there seems to be no accelerator, and 16-bit products are computed as on one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "emulated", lambda _dtype: False)
        for module in (torch.accelerator, torch.cuda):
            patch.setattr(module, "is_available", lambda: False)
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models and calibration data."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 4, lambda i: [] if i == 0 else f"{i}.png")
    for family in FAMILIES:
        tiny.build(family, folder / family)
    return folder


def recipe(world: Path, out: Path, family: str = "llava", **keys):
    data = {"data": str(world / "calib.jsonl"), "samples": 4}
    return resolve({"model": str(world / family), "out": str(out), "calibrate": data} | keys).recipe


def near(ours: Mapping[str, Mapping[str, float]], theirs: Mapping[str, Mapping[str, float]]) -> None:
    """Errors by layer and modality agree, each modality's mean: sums in another order round single weights the other way."""
    assert ours.keys() == theirs.keys() and ours
    for modality in next(iter(theirs.values())):
        means = [statistics.fmean(errors[modality] for errors in side.values()) for side in (ours, theirs)]
        assert means[0] == pytest.approx(means[1], rel=0.05), modality


def same_twice(world: Path, folder: Path, **keys) -> None:
    with hidden():
        expected = quantize(recipe(world, folder / "cpu", **keys)).manifest["errors"]
    near(quantize(recipe(world, folder / "cuda", **keys)).manifest["errors"], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_scheme(world, tmp_path, variant):
    same_twice(world, tmp_path, **VARIANTS[variant])


def test_a_mixture_of_methods(world, tmp_path):
    """Behind a reducer, with the tower's attention, ranges of the cache, and a rotation."""
    same_twice(
        world, tmp_path, scheme="gptq", family="qwen2-5-vl", reduce="divprune:0.5", kv_cache="fp8", rotate="hadamard"
    )


def test_statistics_and_what_reads_them(world, tmp_path):
    """Calibration with gradients; blocks from statistics; bits shared out; errors measured from files."""
    calibrate(recipe(world, tmp_path / "stats", scheme="gptq"), needs={*NEEDS, "gradient"})
    keys = {"scheme": "gptq", "calibrate": {"stats": str(tmp_path / "stats")}}
    result = quantize(recipe(world, tmp_path / "out", **keys))
    with hidden():
        near(result.manifest["errors"], quantize(recipe(world, tmp_path / "cpu", **keys)).manifest["errors"])
        expected = measured_errors.measure(
            tmp_path / "out", statistics_folder.read(tmp_path / "stats"), world / "llava"
        )
    errors = measured_errors.measure(tmp_path / "out", statistics_folder.read(tmp_path / "stats"), world / "llava")
    near(errors.errors, expected.errors)
    quantize(recipe(world, tmp_path / "mixed", bits={"budget": 5}, **keys))


@pytest.mark.parametrize("family", sorted({"gemma4", "glm4v", "idefics3", "lfm2-vl", "llava", "qwen3-vl-moe"}))
def test_a_model_that_does_not_fit(family, tmp_path, monkeypatch):
    """All but the decoder's blocks is on the device and these are streamed; gradients are those of the model as a whole."""
    vlm = wide(load(tiny.build(family, tmp_path / family)))
    rows = encoded(samples()[:3], vlm)
    before = {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()}
    expected = gradients(vlm, rows)
    monkeypatch.setattr(devices, "_ROOM", 1e-9)
    places: set[str] = set()
    linear = vlm.model.get_submodule(decoder_blocks(vlm.model, vlm.spec)[-1][0].linears[0])
    hook = vlm.model.register_forward_pre_hook(lambda *_: places.add(linear.weight.device.type))
    streamed = gradients(vlm, rows)
    hook.remove()
    assert places == {"cpu"} and streamed == expected
    assert {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()} == before


def test_weights_stay_where_they_were(world):
    """Weights that a pass reads go back without a copy; a block that is freed on the device is not copied back."""
    vlm = load(world / "llava")
    before = {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()}
    rows = encoded(samples(), vlm)
    with counting() as counts:
        gradients(vlm, rows)
        list(capture_blocks(vlm, decoder_blocks(vlm.model, vlm.spec), rows, CaptureSpec(frozenset({"absmax"}))))
    assert {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()} == before
    assert not [place for place in counts.places if place[0] == "awaited download" and "devices.py" in place[2]]


def test_quantized_blocks_are_not_copied_back(world, tmp_path):
    with counting() as counts:
        quantize(
            recipe(world, tmp_path / "out", scheme="rtn", calibrate={"data": str(world / "calib.jsonl"), "samples": 2})
        )
    assert not [place for place in counts.places if place[0] == "awaited download" and "devices.py" in place[2]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reducer_attached(family):
    """The logits behind a reducer are those of the CPU, for every method that the family can have."""
    spec = next(spec for spec in all_specs() if spec.family == family)
    vlm = reduction_data.tiny(family)
    inputs = reduction_data.encode(vlm, reduction_data.ONE)
    for method in REGISTRY.names():
        options = REGISTRY.get(method).Options()
        if (
            options.keep is None
            or refusal(spec, method) is not None
            or method.startswith("learned")
            or method == "litevlm"
        ):
            continue
        logits = {}
        for device in ("cpu", CUDA):
            vlm.model.to(device)
            with torch.no_grad(), attach(vlm, method, given(method)):
                logits[device] = vlm.model(**{name: value.to(device) for name, value in inputs.items()}).logits.cpu()
        assert logits["cpu"].shape == logits[CUDA].shape, method
        torch.testing.assert_close(logits[CUDA], logits["cpu"], rtol=1e-6, atol=1e-6, msg=method)
    vlm.model.to("cpu")


def test_no_wait_for_a_sample_or_a_token(world, monkeypatch):
    """Twice the batches, or twice the tokens, cost no wait more, from the blocks' inputs to the statistics of their layers."""
    vlm = load(world / "llava")
    blocks = decoder_blocks(vlm.model, vlm.spec)

    def waits(rows) -> int:
        with counting() as counts:
            captures = list(capture_blocks(vlm, blocks, rows, CaptureSpec(frozenset({"gram", "absmax"}))))
        assert all(captured for _, captured in captures)
        return sum(
            times for (kind, _, place), times in counts.places.items() if kind != "upload" and OTHERS not in place
        )

    rows = encoded(samples(), vlm)
    few = waits(rows)
    assert few <= 1 + sum(map(len, blocks))  # is all of it finite: once for each group
    monkeypatch.setattr(block_inputs, "bucket_by_length", lambda rows: [[index] for index in range(len(rows))])
    assert waits(rows) == waits(rows + rows) == few


def test_waits_of_solving(world):
    """Waits of one block do not depend on how many samples its statistics are of, nor on the width of its layers."""
    vlm = load(world / "llava")
    groups = decoder_blocks(vlm.model, vlm.spec)[0]
    for name, most in (("rtn", 8), ("gptq", 15), ("awq", 60)):
        module, figures = SCHEMES.get(name), []
        method = QuantMethod(module, module.Options())
        for rows in (encoded(samples()[:2], vlm), encoded(samples(), vlm)):
            spec = CaptureSpec(method.needs.statistics | {"gram"})
            _, captured = next(capture_blocks(vlm, decoder_blocks(vlm.model, vlm.spec), rows, spec))
            assert captured is not None
            weights = {n: vlm.model.get_parameter(f"{n}.weight").detach().to(CUDA) for g in groups for n in g.linears}
            norms = {
                g.smooth: vlm.model.get_parameter(f"{g.smooth}.weight").detach().to(CUDA)
                for g in groups
                if g.smooth_kind == "norm"
            }
            with counting() as counts:
                solve_block(groups, weights, captured.stats, method, torch.bfloat16, {}, norms, 0.0)
            figures.append(counts.waits)
        assert abs(figures[0] - figures[1]) <= 2 and figures[0] <= most * len(groups), (
            name,
            figures,
            counts.places.most_common(9),
        )
