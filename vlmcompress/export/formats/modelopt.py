"""NVIDIA ModelOpt's format: FP8, NVFP4, or several schemes layer by layer.

Stored per linear layer (`out` x `in`):

| algorithm | scheme | tensors |
|---|---|---|
| FP8 | one scale per matrix, fixed activation scales | `weight` e4m3 [out, in], `weight_scale` f32 [], `input_scale` f32 [] |
| FP8_PER_CHANNEL_PER_TOKEN | a scale per row, activations scaled by token | `weight` e4m3 [out, in], `weight_scale` f32 [out] |
| NVFP4, W4A16_NVFP4 | NVFP4 weights; activations in NVFP4, in 16 bits | `weight` u8 [out, in/2], `weight_scale` e4m3 \
[out, in/16], `weight_scale_2` f32 [], for NVFP4 activations `input_scale` f32 [] |

The last two of NVFP4 are the reciprocals of compressed-tensors' global scales, which engines take before they compute: what
they compute with is the same bit for bit, whichever format it comes from.

Several algorithms in one checkpoint are MIXED_PRECISION, with each layer's by its exact name in `quantized_layers`. The
config stands in config.json (vLLM, SGLang) and, in other words, in hf_quant_config.json (TensorRT-LLM).
Sources: vLLM 0.32 `quantization/modelopt.py`, TensorRT-LLM `_torch/model_config.py`, ModelOpt `torch/export`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Reader, Writer
from vlmcompress.models.layer_names import Layers, Names
from vlmcompress.models.quantization_keys import require_known_keys
from vlmcompress.numerics import NVFP4, ActFormat, Format, QTensor, Scheme, pack_fp4, unpack_fp4
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

_ALGORITHMS = {
    "FP8": Scheme(Format("float", 8, 0), ActFormat("float", 8, dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True)),
    "NVFP4": Scheme(NVFP4, ActFormat("float", 4, dynamic=True)),
    "W4A16_NVFP4": Scheme(NVFP4),
}
_NAMES = {scheme: name for name, scheme in _ALGORITHMS.items()}
# Readers recognize the format by this name and version; the manifest has the tool that wrote the checkpoint.
_PRODUCER = {"name": "modelopt", "version": "0.46.0"}
_LEFT_BY_VLLM = ("vision_tower", "vision_model")  # vLLM never quantizes modules with these names


def _reciprocal(x: Tensor) -> Tensor:
    """A float32 number `[1]` whose reciprocal is exactly x: the first such number among the neighbours of `1 / x`."""
    near = 1 / x.float()
    up, down = torch.full_like(near, torch.inf), torch.zeros_like(near)
    for candidate in (near, torch.nextafter(near, up), torch.nextafter(near, down)):
        if torch.equal(1 / candidate, x.float()):
            return candidate
    return near


class ModelOpt(Writer, Reader):
    """The algorithms that engines read."""

    METHOD = "modelopt"
    KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale")

    @override
    def storage(self, scheme: Scheme) -> str:
        if scheme not in _NAMES:
            raise UserError(
                "ModelOpt files hold FP8 with a scale per row (scheme fp8) or fixed scales per matrix (scheme fp8-static), and "
                "NVFP4; write compressed-tensors"
            )
        return _NAMES[scheme]

    @override
    def problems(self, layers: Layers) -> list[str]:
        names = [name for names in layers.quantized for name in names if any(part in name for part in _LEFT_BY_VLLM)]
        if not names:
            return []
        return [
            f"vLLM leaves {names[0]} of a ModelOpt checkpoint unquantized; use --vision bf16 or write compressed-tensors"
        ]

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        if scheme.weights.nvfp4:
            groups = scheme.weights.n_groups(columns)
            layer = {
                "weight": Spec("U8", (rows, columns // 2)),
                "weight_scale": Spec("F8_E4M3", (rows, groups)),
                "weight_scale_2": Spec("F32", ()),
            }
            return layer | ({"input_scale": Spec("F32", ())} if scheme.activations else {})
        weight = Spec("F8_E4M3", (rows, columns))
        if self.storage(scheme) == "FP8":
            return {"weight": weight, "weight_scale": Spec("F32", ()), "input_scale": Spec("F32", ())}
        return {"weight": weight, "weight_scale": Spec("F32", (rows,))}

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if qt.global_scale is not None:
            # compressed-tensors' g divides, ModelOpt's number multiplies: weight = code * scale * weight_scale_2.
            layer = {
                "weight": pack_fp4(qt.q),
                "weight_scale": qt.scale,
                "weight_scale_2": (1 / qt.global_scale).reshape(()),
            }
            return layer | ({} if input_scale is None else {"input_scale": (1 / input_scale.float()).reshape(())})
        weight, scale = qt.q.contiguous(), qt.scale.float()
        if self.storage(scheme) != "FP8":
            return {"weight": weight, "weight_scale": scale.reshape(-1)}
        if input_scale is None:
            raise ValueError("static activations need an input scale")
        return {"weight": weight, "weight_scale": scale.reshape(()), "input_scale": input_scale.float().reshape(())}

    @override
    def configs(self, layers: Layers) -> dict[str, dict]:
        """The `quantization_config` block of config.json, and hf_quant_config.json, which TensorRT-LLM reads."""
        if not layers.schemes:
            return {}
        # A layer is listed by name, a part of the model by a wildcard for everything below it.
        ignored = list(dict.fromkeys(f"{name}*" if kept.whole else name for kept in layers.kept for name in kept.names))
        kv_scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}} if layers.kv_cache else {}

        def of(scheme: Scheme) -> dict[str, Any]:
            return {"quant_algo": self.storage(scheme)} | ({"group_size": NVFP4.group} if scheme.weights.nvfp4 else {})

        algorithm = of(layers.schemes[0])
        if len(layers.schemes) > 1:
            quantized = {name: of(scheme) for names, scheme in layers.quantized.items() for name in names}
            algorithm = {"quant_algo": "MIXED_PRECISION", "quantized_layers": quantized}
        quantization = {
            **algorithm,
            "kv_cache_quant_algo": "FP8" if layers.kv_cache else None,
            "exclude_modules": ignored,
        }
        return {
            "config.json": {
                "quant_method": self.METHOD,
                "producer": _PRODUCER,
                **algorithm,
                "ignore": ignored,
                **kv_scheme,
            },
            "hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization},
        }

    @override
    def require_supported(self, config: Mapping) -> None:
        """Raise `UserError` for unsupported settings of the config block or of a layer in it.

        `config_groups` repeat the meaning of `quant_algo` (ModelOpt's `convert_hf_quant_config_format`).
        """
        kv = [{"num_bits": 8, "type": "float", "dynamic": False}, "FP8"]
        layer: dict[str, Any] = {"group_size": (0, 16), "has_zero_point": (False,), "pre_quant_scale": (False,)}
        only = {**layer, "kv_cache_scheme": kv, "kv_cache_quant_algo": kv}
        read = {"quant_algo", "quantized_layers", "ignore", "exclude_modules"}
        require_known_keys(
            config, read | {"quantization"}, {"quant_method", "producer", "config_groups", "version"}, only
        )
        quantization = config.get("quantization") or {}
        require_known_keys(quantization, read, (), only, "quantization.")
        for name, of_layer in ((quantization or config).get("quantized_layers") or {}).items():
            require_known_keys(of_layer, {"quant_algo"}, (), layer, f"quantized_layers.{name}.")

    @override
    def scheme_in(
        self, config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        if "weight_scale" not in stored:
            return None
        quantization = config.get("quantization") or config
        algorithm = str(quantization.get("quant_algo")).upper()
        if algorithm == "MIXED_PRECISION":
            by_layer = quantization.get("quantized_layers") or {}
            algorithm = next(
                (str(by_layer[name].get("quant_algo")).upper() for name in names if name in by_layer), "none"
            )
        if algorithm not in _ALGORITHMS:
            raise UserError(f"of ModelOpt's algorithms, only {', '.join(_ALGORITHMS)} are read; this is {algorithm}")
        return _ALGORITHMS[algorithm]

    @override
    def quantizes(self, config: Mapping, name: str) -> bool:
        """Whether an engine takes the linear layer `name` for quantized, by vLLM's rules for `ignore` and, for mixed precision,
        for `quantized_layers`."""
        entries = config.get("ignore") or ()
        if any(part in name for part in _LEFT_BY_VLLM) or any(fnmatch.fnmatch(name, entry) for entry in entries):
            return False
        if any(entry.removesuffix("*") in name for entry in entries):
            return False
        return "quantized_layers" not in config or name in config["quantized_layers"]

    @override
    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        if scheme.weights.nvfp4:
            input_scale = stored.get("input_scale")
            codes, divisor = unpack_fp4(stored["weight"]), _reciprocal(stored["weight_scale_2"].reshape(1))
            weight = QTensor(codes, stored["weight_scale"], None, scheme.weights, divisor)
            return weight, None if input_scale is None else _reciprocal(input_scale.reshape(1))
        per_row = scheme.weights.group < 0
        scale = stored["weight_scale"].reshape(-1, 1) if per_row else stored["weight_scale"].reshape(1)
        return QTensor(stored["weight"], scale, None, scheme.weights), None if per_row else stored[
            "input_scale"
        ].reshape(1)


FORMAT = ModelOpt()
