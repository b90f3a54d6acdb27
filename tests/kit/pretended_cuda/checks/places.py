"""Phases run on the device, weights are where they are needed, and what has not changed is not copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit import tiny
from tests.kit.batched_samples import samples, wide
from tests.kit.pretended_cuda import kernels_launched
from tests.kit.pretended_cuda.checks import recipe
from vlmcompress import cli
from vlmcompress.models import decoder_blocks, devices, load
from vlmcompress.models.data import encode as encoded
from vlmcompress.quantization.calibration import block_inputs
from vlmcompress.quantization.calibration.capture import CaptureSpec, capture_blocks
from vlmcompress.quantization.calibration.gradient_pass import gradients
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.run import quantize
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import calibration_inputs
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import SCHEMES


@pytest.fixture(scope="module")
def tiny_run(world) -> SimpleNamespace:
    """A model, samples, and in `folder` a quantized checkpoint."""
    vlm = load(world / "llava")
    quantize(recipe(world, world / "rtn", scheme="rtn", calibrate={}))
    rows, blocks = encoded(samples()[:3], vlm), decoder_blocks(vlm.model, vlm.spec)
    return SimpleNamespace(folder=world, vlm=vlm, rows=rows, blocks=blocks)


def learn_thresholds(folder: Path) -> None:
    call = ["learn-reducer", str(folder / "llava"), "-o", str(folder / "thresholds.json")]
    assert cli.main([*call, "--calib", str(folder / "calib.jsonl")]) == 0


RTN = QuantMethod(SCHEMES.get("rtn"), SCHEMES.get("rtn").OPTIONS(group_size=32))
PHASES: dict[str, Callable[[SimpleNamespace], Any]] = {
    "after a reducer": lambda it: calibration_inputs.reduced(it.vlm, it.rows, parse_reducer("divprune:0.5")),
    "thresholds": lambda it: learn_thresholds(it.folder),
    "inputs of blocks": lambda it: block_inputs.capture_block_inputs(it.vlm, it.rows),
    "gradients": lambda it: gradients(it.vlm, it.rows),
}
COMPUTED: dict[str, Callable[[SimpleNamespace], Any]] = {
    "solving": lambda it: quantize(recipe(it.folder, it.folder / "gptq", scheme="gptq"), overwrite=True),
    "bits": lambda it: quantize(
        recipe(it.folder, it.folder / "bits", scheme="gptq", bits={"budget": 5}), overwrite=True
    ),
}


@pytest.mark.parametrize("phase", [*PHASES, *COMPUTED])
def test_phases_run_on_the_device(tiny_run, phase):
    """None stays on the CPU of a machine with an accelerator. No product is in TF32, also where the caller allows it."""
    before, launched = torch.get_float32_matmul_precision(), kernels_launched()
    torch.set_float32_matmul_precision("high")
    try:
        with Precisions() as precisions:
            (PHASES | COMPUTED)[phase](tiny_run)
    finally:
        torch.set_float32_matmul_precision(before)
    assert kernels_launched() > launched + 100
    assert phase in PHASES or precisions.reduced_units == {"highest"}


class Precisions(TorchDispatchMode):
    """The precisions in which products of float32 matrices are computed within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced_units: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm") and args[0].dtype == torch.float32:
            self.reduced_units.add(torch.get_float32_matmul_precision())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "family",
    [
        "llava",
        "qwen3-vl-moe",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4", "glm4v", "idefics3", "lfm2-vl")),
    ],
)
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
    """Weights that a pass reads go back without a copy."""
    vlm = load(world / "llava")
    before = {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()}
    rows = encoded(samples(), vlm)
    gradients(vlm, rows)
    list(capture_blocks(vlm, decoder_blocks(vlm.model, vlm.spec), rows, CaptureSpec(frozenset({"absmax"}))))
    assert {name: tensor.data_ptr() for name, tensor in vlm.model.state_dict().items()} == before


def test_more_workers_than_accelerators_are_refused(monkeypatch):
    """NCCL has no two workers on one GPU, and would say something else."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="there are 2 workers here and 1 accelerators"), distributed.process_group():
        pass
