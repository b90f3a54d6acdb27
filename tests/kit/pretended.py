"""Ask vLLM which kernels it would pick on machines that are not there; see `pretended_worker.py`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tests.kit.engine import SETTINGS
from tests.kit.places import ROOT
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.numerics import MXFP4, MXFP8, ActFormat, Format, Scheme
from vlmcompress.recipe.targets import Target

sys.path.insert(0, str(ROOT / "scripts"))
from gpu.engine import CLASSES

Layer = dict[str, Any]
Answers = dict[str, dict[str, dict[str, dict[str, str]]]]
WORKAROUND = "CutlassInt8ScaledMMLinearKernel"  # named in recipe/targets.py
MACHINES = ("cpu", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", f"10.0 without {WORKAROUND}", "11.0", "12.0", "gfx942")
SHAPE = (4608, 3584)  # the fused q, k and v of Qwen2.5-VL-7B
INT8, FP8, FP8_FIXED = ActFormat("int", 8, True), ActFormat("float", 8, True), ActFormat("float", 8, False)


def _group(format_: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> Layer:
    """A checkpoint that we don't write, described as compressed-tensors does."""
    group = {"targets": ["Linear"], "format": format_, "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group}, "ignore": []}


def _args(kind: str, bits: int, strategy: str, **extra: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False} | extra


def _ours(weights: Format, activations: ActFormat | None = None) -> Layer:
    return compressed_tensors.quantization_config([(Scheme(weights, activations), ["Linear"])], [])


_NVFP4 = _args("float", 4, "tensor_group", group_size=16)
_BLOCK = _args("float", 8, "block", block_structure=[128, 128])
_PER_GROUP = _args("float", 8, "group", group_size=128, dynamic=True)
# format -> what there is of it -> its config. Shapes are `SHAPE` unless `SHAPES` has another.
FORMATS: dict[str, dict[str, Layer]] = {
    "w4a16": {
        **{f"g{group}": _ours(Format("int", 4, group)) for group in (128, 64, 32, 16)},
        "asymmetric g128": _ours(Format("int", 4, 128, symmetric=False)),
        "rows": _ours(Format("int", 4, -1)),
        "rows of 1280 x 3420": _ours(Format("int", 4, -1)),
    },
    "w8a16": {
        "g128": _ours(Format("int", 8, 128)),
        "rows": _ours(Format("int", 8, -1)),
        "asymmetric g128": _ours(Format("int", 8, 128, symmetric=False)),
        "rows of 1280 x 3420": _ours(Format("int", 8, -1)),
    },
    "wNa16": {
        **{f"{bits} bits g128": _ours(Format("int", bits, 128)) for bits in (2, 3, 5, 6, 7)},
        "3 bits asymmetric g128": _ours(Format("int", 3, 128, symmetric=False)),
    },
    "w8a8-int": {"rows": _ours(Format("int", 8, -1), INT8)},
    "w8a8-fp": {"rows": _ours(Format("float", 8, -1), FP8)},
    "w8a8-fp-static": {
        "rows": _ours(Format("float", 8, -1), FP8_FIXED),
        "matrix": _ours(Format("float", 8, 0), FP8_FIXED),
    },
    "w8a8-fp-block": {"128 x 128": _group("float-quantized", _BLOCK, _PER_GROUP)},
    "w4a8-int": {
        "rows": _ours(Format("int", 4, -1), INT8),
        "packed g128": _group(
            "pack-quantized", _args("int", 4, "group", group_size=128), _args("int", 8, "token", dynamic=True)
        ),
    },
    "w4a4-fp": {"g16": _group("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"})},
    "w4a16-fp": {"g16": _group("nvfp4-pack-quantized", _NVFP4, None)},
    "w4a4-mx": {"g32": _ours(MXFP4, ActFormat("float", 4, True, mx=True))},
    "w4a16-mx": {"g32": _ours(MXFP4)},
    "w8a8-mx": {"g32": _ours(MXFP8, ActFormat("float", 8, True, mx=True))},
    "w4a8-fp": {"g128": _ours(Format("int", 4, 128), FP8)},
}
SHAPES = {"rows of 1280 x 3420": (1280, 3420)}  # the second linear layer of its vision tower


def asked(machines: Iterable[str]) -> Answers:
    """Machine -> format -> what there is of it -> `{"scheme", "kernel"}` or `{"error"}`, all in one process of vLLM.

    Args:
        machines: "cpu", the machine as it is but without AMX, can be the first; then CUDA capabilities ("9.0"), then one of
            AMD's architectures ("gfx942"). "9.0 without KERNEL" leaves a kernel out, as `VLLM_DISABLED_KERNELS` does.
    """
    layers = {
        f"{key}/{name}": {"config": config, "shape": SHAPES.get(name, SHAPE)}
        for key, kinds in FORMATS.items()
        for name, config in kinds.items()
    }
    order = {"machines": list(machines), "layers": layers}
    environment = os.environ | SETTINGS | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.pretended_worker"],
        cwd=ROOT, env=environment, input=json.dumps(order) + "\n", capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for answer in (answer for kinds in answers.values() for answer in kinds.values() if "error" in answer):
        answer["error"] = answer["error"].splitlines()[0]
    return {
        machine: {key: {name: kinds[f"{key}/{name}"] for name in names} for key, names in FORMATS.items()}
        for machine, kinds in answers.items()
    }


def machine_of(target: Target) -> str:
    """What a target is called here."""
    return ".".join(map(str, target.capability)) if target.capability else target.architecture or "cpu"


def in_16_bits(kernel: str, key: str) -> bool:
    """Whether a format rounds activations and the kernel computes in 16 bits all the same, as vLLM calls it for that format."""
    return "a16" not in key and bool(re.match("Marlin|Machete|Humming|Emulation|TritonW4A16|CPUWNA16", kernel))


def word(answer: Mapping[str, str], key: str) -> str | None:
    """The word that `recipe.targets` has for the kernel picked, with "(16 bits)" by `in_16_bits`; None without a kernel."""
    if "error" in answer:
        return None
    (names,) = {name for name, pattern in CLASSES.items() if re.fullmatch(pattern, answer["kernel"])}
    return f"{names} (16 bits)" if in_16_bits(answer["kernel"], key) else names
