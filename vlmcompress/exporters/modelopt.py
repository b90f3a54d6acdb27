"""NVIDIA ModelOpt's format, for TensorRT-LLM, vLLM and SGLang: FP8, or several schemes layer by layer.

Stored per linear layer (`out` x `in`):

| algorithm | scheme | tensors |
|---|---|---|
| FP8 | one scale per matrix, fixed activation scales | `weight` e4m3 [out, in], `weight_scale` f32 [], `input_scale` f32 [] |
| FP8_PER_CHANNEL_PER_TOKEN | a scale per row, activations scaled by token | `weight` e4m3 [out, in], `weight_scale` f32 [out] |

Several algorithms in one checkpoint are MIXED_PRECISION, with each layer's by its exact name in `quantized_layers`. The
config stands in config.json (vLLM, SGLang) and, in other words, in hf_quant_config.json (TensorRT-LLM).
Sources: vLLM 0.32 `quantization/modelopt.py`, TensorRT-LLM `_torch/model_config.py`, ModelOpt `torch/export`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vlmcompress.common.layer_names import Layers, Names
from vlmcompress.common.tensor_files import Spec
from vlmcompress.errors import UserError
from vlmcompress.numerics import ActFormat, Format, QTensor, Scheme

FORMAT = "modelopt"
KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale")
_ALGORITHMS = {
    "FP8": Scheme(Format("float", 8, 0), ActFormat("float", 8, dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True)),
}
_NAMES = {scheme: name for name, scheme in _ALGORITHMS.items()}
# Readers know the format by this name and the release of its layout; who wrote the checkpoint is in its manifest.
_PRODUCER = {"name": "modelopt", "version": "0.46.0"}
_LEFT_BY_VLLM = ("vision_tower", "vision_model")  # vLLM leaves what has these in its name, whatever the config says


def storage(scheme: Scheme) -> str:
    """The name of ModelOpt's algorithm for a scheme.

    Raises:
        UserError: the format cannot hold it.
    """
    if scheme not in _NAMES:
        raise UserError(
            "ModelOpt files hold FP8 with a scale per row (scheme fp8) or fixed scales per matrix (scheme fp8-static) only; "
            "write compressed-tensors"
        )
    return _NAMES[scheme]


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    names = [name for own in layers.quantized for name in own if any(part in name for part in _LEFT_BY_VLLM)]
    if not names:
        return []
    return [
        f"vLLM leaves {names[0]} of a ModelOpt checkpoint unquantized; use --vision bf16 or write compressed-tensors"
    ]


def shapes(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Local names and shapes of the tensors stored for a layer of `rows` outputs and `columns` inputs."""
    if storage(scheme) == "FP8":
        return {"weight": (rows, columns), "weight_scale": (), "input_scale": ()}
    return {"weight": (rows, columns), "weight_scale": (rows,)}


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors stored for a layer; scales are float32 whatever `dtype` is asked."""
    found = shapes(scheme, rows, columns)
    return {name: Spec("F8_E4M3" if name == "weight" else "F32", shape) for name, shape in found.items()}


def layout(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors that `tensors` returns, without computing them."""
    return specs(scheme, qt.q.shape[0], qt.q.shape[1], "F32")


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Make the tensors that are stored for one linear layer.

    Args:
        qt: codes [out, in], scales [out, 1] or [1].
        scheme: how weights and activations are quantized.
        input_scale: the scale of static activations, one value.
    """
    found = {"weight": qt.q.contiguous(), "weight_scale": qt.scale.float()}
    if storage(scheme) != "FP8":
        return found | {"weight_scale": found["weight_scale"].reshape(-1)}
    if input_scale is None:
        raise ValueError("static activations need an input scale")
    return found | {
        "weight_scale": found["weight_scale"].reshape(()),
        "input_scale": input_scale.float().reshape(()),
    }


def config(layers: Layers) -> dict:
    """The `quantization_config` block of config.json."""
    if not layers.schemes:
        return {}
    return {
        "quant_method": FORMAT,
        "producer": _PRODUCER,
        **_algorithm(layers),
        "ignore": _ignored(layers),
        **({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}} if layers.kv_cache else {}),
    }


def files(layers: Layers) -> dict[str, dict]:
    """Further JSON files of the checkpoint: hf_quant_config.json, which TensorRT-LLM reads."""
    if not layers.schemes:
        return {}
    quantization = {
        **_algorithm(layers),
        "kv_cache_quant_algo": "FP8" if layers.kv_cache else None,
        "exclude_modules": _ignored(layers),
    }
    return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}


def _algorithm(layers: Layers) -> dict[str, Any]:
    if len(layers.schemes) == 1:
        return {"quant_algo": storage(layers.schemes[0])}
    quantized = {name: {"quant_algo": storage(scheme)} for names, scheme in layers.quantized.items() for name in names}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": quantized}


def _ignored(layers: Layers) -> list[str]:
    """What stays as it is: a layer by its name, a part with all below it by a wildcard."""
    return list(dict.fromkeys(f"{name}*" if kept.whole else name for kept in layers.kept for name in kept.names))


def scheme_in(config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]) -> Scheme | None:
    """The scheme of a linear layer `[out, in]`; None: it is not quantized. `names`: those in memory, on disk, in vLLM.

    Raises:
        UserError: the algorithm is none of those that are read.
    """
    if "weight_scale" not in stored:
        return None
    quantization = config.get("quantization") or config
    algorithm = str(quantization.get("quant_algo")).upper()
    if algorithm == "MIXED_PRECISION":
        named = quantization.get("quantized_layers") or {}
        algorithm = next((str(named[name].get("quant_algo")).upper() for name in names if name in named), "none")
    if algorithm not in _ALGORITHMS:
        raise UserError(f"of ModelOpt's algorithms {', '.join(_ALGORITHMS)} are read, this is {algorithm}")
    return _ALGORITHMS[algorithm]


def takes(config: Mapping, name: str) -> bool:
    """Whether an engine takes the linear layer called `name` for quantized: vLLM's rules for `ignore`, and for several
    algorithms those for `quantized_layers`."""
    entries = config.get("ignore") or ()
    if any(part in name for part in _LEFT_BY_VLLM) or any(fnmatch.fnmatch(name, entry) for entry in entries):
        return False
    if any(entry.removesuffix("*") in name for entry in entries):
        return False
    return "quantized_layers" not in config or name in config["quantized_layers"]


def read(stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> tuple[QTensor, Tensor | None]:
    """The codes and scales of a layer, and the scale of its inputs where that is fixed: the inverse of `tensors`."""
    per_row = scheme.weights.group < 0
    scale = stored["weight_scale"].reshape(-1, 1) if per_row else stored["weight_scale"].reshape(1)
    return QTensor(stored["weight"], scale, None, scheme.weights), None if per_row else stored["input_scale"].reshape(1)
