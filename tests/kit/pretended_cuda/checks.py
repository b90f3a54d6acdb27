"""What runs on the pretended device: `tests/test_pretended_cuda.py` hands this file to pytest in a process of its own.

To add a phase, call its function twice, within `hidden()` and without, and compare: the CPU is the oracle, up to the order of
sums. To keep a number of waits, call it within `counting()`; `Counts.places` then names the lines.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import calibration_rows, reducer_data, reduction_data, tiny
from tests.kit.attached_cases import given
from tests.kit.batched_samples import samples, wide
from tests.kit.places import ROOT
from tests.kit.pretended_cuda import OTHERS, WAITS, counting, hidden
from vlmcompress.calibration import block_inputs, devices, statistics_folder
from vlmcompress.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.calibration.gradient_pass import gradients
from vlmcompress.calibration.solve import QuantMethod, solve_block
from vlmcompress.common import distributed
from vlmcompress.common.registry import SCHEMES
from vlmcompress.data import encode as encoded
from vlmcompress.diagnosis import measured_errors
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks import attach, refusal
from vlmcompress.models import all_specs, decoder_blocks, load
from vlmcompress.recipe import resolve
from vlmcompress.reducers import REGISTRY, Signals
from vlmcompress.runs.calibrate import calibrate
from vlmcompress.runs.draft import DraftTraining, draft
from vlmcompress.runs.learn_reducer import ScorerTraining, learn_reducer
from vlmcompress.runs.quantize import quantize
from vlmcompress.runs.recover import TrainingOptions, recover
from vlmcompress.runs.recover_scales import recover_scales
from vlmcompress.statistics.balance import Sensitivity
from vlmcompress.statistics.inputs import CROSS, NEEDS

CUDA = torch.device("cuda", 0)
SLOW = pytest.mark.slow
FAMILIES = ("llava", "qwen2-5-vl", "qwen3-vl")
VARIANTS = {
    **{name: {"scheme": name} for name in SCHEMES.names() if name not in ("none", "qvlm")},
    "awq-by-blocks": {"scheme": "awq", "options": {"objective": "block", "grid": 4}},
    "mbq-by-mae": {"scheme": "mbq", "options": {"objective": "mae", "grid": 4}},
    "mbq-of-8-bits": {"scheme": "mbq", "options": {"activations": 8, "bits": 8, "grid": 4}},
    "qvlm": {"scheme": "qvlm", "options": {"grid": 2, "sweeps": 1}},
}


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models and calibration data."""
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 4, lambda i: [] if i == 0 else f"{i}.png")
    (folder / "train").mkdir()
    calibration_rows.write(folder / "train", 16, kinds=8)
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
        assert means[0] == pytest.approx(means[1], rel=0.1), modality


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


FEW: dict[str, Any] = {"steps": 2, "batch": 2, "every": 2, "lr": 1e-3}


def recovered(world: Path, folder: Path) -> Any:
    chosen = training_recipe(world, folder / "recovered", scheme="none", reduce="divprune:0.5")
    return recover(chosen, TrainingOptions(**FEW)).manifest["recovery"]["held_out_kl"]


def recovered_scales(world: Path, folder: Path) -> Any:
    quantize(recipe(world, folder / "rtn", scheme="rtn", calibrate={}))
    chosen = training_recipe(world, folder / "recovered", scheme="none", model=str(folder / "rtn"))
    training = TrainingOptions(train=("scales",), **FEW)
    return recover_scales(chosen, training, world / "llava").manifest["recovery"]["held_out_kl"]


def learnt(world: Path, folder: Path) -> Any:
    chosen = training_recipe(world, folder / "scorer.safetensors", scheme="none")
    return learn_reducer(chosen, ScorerTraining(keep=0.5, hidden=8, **FEW | {"steps": 4, "every": 4}))["held_out_kl"]


def drafted(world: Path, folder: Path) -> Any:
    chosen = training_recipe(world, folder / "draft", scheme="none", family="qwen2-5-vl")
    return draft(chosen, DraftTraining(answer_tokens=6, **FEW))["held_out_kl"]


def training_recipe(world: Path, out: Path, **keys: Any) -> Any:
    return recipe(world, out, calibrate={"data": str(world / "train" / "calib.jsonl"), "samples": 16}, **keys)


@pytest.mark.parametrize(
    "train", [recovered, drafted, *(pytest.param(run, marks=SLOW) for run in (learnt, recovered_scales))]
)
def test_training(world, tmp_path, train: Callable[[Path, Path], Any]):
    """What is held out is as far from the teacher as on the CPU, before and after some steps."""
    with hidden():
        expected = train(world, tmp_path / "cpu")
    divergences = train(world, tmp_path / "cuda")
    assert divergences.keys() == expected.keys() and len(expected) > 1
    for name, value in expected.items():
        assert divergences[name] == (value if name == "unit" else pytest.approx(value, rel=0.1)), name


def test_more_workers_than_accelerators_are_refused(monkeypatch):
    """NCCL has no two workers on one GPU, and would say something else."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="there are 2 workers here and 1 accelerators"), distributed.process_group():
        pass


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


def moved(image: Signals) -> Signals:
    fields = {field.name: getattr(image, field.name) for field in dataclasses.fields(image)}
    tensors = {name: value.to(CUDA) for name, value in fields.items() if isinstance(value, torch.Tensor)}
    return Signals(**fields | tensors | {"ahead": image.ahead and moved(image.ahead)}, finite=True)


@pytest.mark.parametrize(("method", "options"), reducer_data.SERVED)
def test_served_reducers_do_not_wait(method, options):
    """They leave the CPU's rows. That no value is looked at, `tests/reducers/test_waits.py` shows; here uploads count, too."""
    image = reducer_data.signals((3, 4, 5) if method == "evs" else (1, 6, 8))
    expected, there = reducer_data.served(method, image, **options), moved(image)
    reducer_data.served(method, there, **options)  # tables are sent once
    with counting() as counts:
        rows = reducer_data.served(method, there, **options)
    torch.testing.assert_close(rows.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert counts.waits == 0, counts.places


def documented() -> dict[str, int]:
    """Waits of a block's solving by scheme, as the docs have them."""
    text = (ROOT / "docs" / "quantization.md").read_text()
    (table,) = re.findall(r"<!-- waits -->\n(.*?)<!-- /waits -->", text, re.DOTALL)
    rows = (row.strip("| ").split(" | ") for row in table.splitlines()[2:])
    return {name.strip("`"): int(waits) for names, waits in rows for name in names.split(", ")}


def captured(vlm, rows, needs=frozenset({"gram", "absmax"})) -> list[Any]:
    return list(capture_blocks(vlm, decoder_blocks(vlm.model, vlm.spec), rows, CaptureSpec(needs)))


def test_waits_of_capture(world, monkeypatch):
    """Twice the batches, or twice the tokens, cost no wait more, from the blocks' inputs to the statistics of their layers."""
    vlm = load(world / "llava")

    def waits(rows) -> int:
        with counting() as counts:
            assert all(block for _, block in captured(vlm, rows))
        return sum(times for (kind, _, place), times in counts.places.items() if kind in WAITS and OTHERS not in place)

    rows = encoded(samples(), vlm)
    few = waits(rows)
    assert few <= 1 + sum(map(len, decoder_blocks(vlm.model, vlm.spec)))  # is all of it finite: once for each group
    monkeypatch.setattr(block_inputs, "bucket_by_length", lambda rows: [[index] for index in range(len(rows))])
    assert waits(rows) == waits(rows + rows) <= few


@pytest.fixture(scope="module")
def observed(world) -> Callable[[int, frozenset[str]], tuple[Any, ...]]:
    """Number of samples and names of statistics -> groups, weights, norms and statistics of a block."""
    vlm = load(world / "llava")
    groups = decoder_blocks(vlm.model, vlm.spec)[0]
    smoothed = {group.smooth for group in groups if group.smooth_kind == "norm"}
    weights, norms = (
        {name: vlm.model.get_parameter(f"{name}.weight").detach().to(CUDA) for name in names}
        for names in ([name for group in groups for name in group.linears], smoothed)
    )

    @functools.cache
    def statistics_of(count: int, needs: frozenset[str]) -> Any:
        (_, block), *_ = captured(vlm, encoded(samples()[:count], vlm), needs)
        for stats in block.stats.values():
            stats.sensitivity = Sensitivity({"text": 1.0, "vision": 0.5, "answer": 2.0}, rho=0.5)
        return block.stats

    return lambda count, needs: (groups, weights, norms, copy.deepcopy(statistics_of(count, needs)))


@pytest.mark.parametrize(("scheme", "count"), [*((name, 2) for name in SCHEMES.names() if name != "none"), ("gptq", 7)])
def test_waits_of_solving(observed, scheme, count):
    """Those of one block, of seven layers in four groups, are no more than the docs say, of more samples as well."""
    module = SCHEMES.get(scheme)
    method = QuantMethod(module, module.Options())
    needs = (method.needs.statistics | {"gram"}) & {*NEEDS, CROSS}
    groups, weights, norms, stats = observed(count, frozenset(needs))
    with counting() as counts:
        solve_block(groups, dict(weights), stats, method, torch.bfloat16, {}, norms, 0.0)
    print(f"| `{scheme}` | {counts.waits} |")
    assert counts.waits <= documented()[scheme], counts.places.most_common(9)
