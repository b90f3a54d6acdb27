"""FP8 files as DeepSeek, Qwen and transformers write them (`quant_method: fp8`): blocks of 128 x 128, rows or whole matrices.
They can only be read, to convert them to another format.

Stored per linear layer (`out` x `in`): `weight` e4m3 [out, in] and one of

| scales | tensor |
|---|---|
| per block of r x c | `weight_scale` f32 [out/r, in/c], both rounded up |
| per row | `weight_scale` [out, 1] |
| per matrix | `weight_scale` [], with static activation scales `input_scale` [], as in the published Ministral 3 |

Scales are factors, also under transformers' names `weight_scale_inv` and `activation_scale` and ComfyUI's `scale_weight` and
`scale_input` (`OTHER_NAMES`).
Sources: vLLM 0.32 `quantization/fp8.py` and `models/families/mistral3.py`, transformers 5.17 `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Reader
from vlmcompress.models.layer_names import Names
from vlmcompress.models.quantization_keys import require_known_keys
from vlmcompress.numerics import ActFormat, Format, QTensor, Scheme
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec


class Fp8(Reader):
    """Rows, blocks or whole matrices of e4m3."""

    METHOD = "fp8"
    OTHER_NAMES = {
        **{"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"},
        **{"scale_weight": "weight_scale", "scale_input": "input_scale"},
    }

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        weights = scheme.weights
        scale: tuple[int, ...] = (rows, 1) if weights.group < 0 else ()
        if weights.rows > 1:
            scale = math.ceil(rows / weights.rows), weights.n_groups(columns)
        layer = {"weight": Spec("F8_E4M3", (rows, columns)), "weight_scale": Spec(dtype, scale)}
        static = scheme.activations is not None and not scheme.activations.dynamic
        return layer | ({"input_scale": Spec(dtype, ())} if static else {})

    @override
    def require_supported(self, config: Mapping) -> None:
        only = {
            "activation_scheme": ("dynamic", "static"),
            "fmt": ("e4m3", "float8_e4m3fn"),
            "scale_fmt": ("float",),
            "is_checkpoint_fp8_serialized": (True,),
        }
        require_known_keys(
            config,
            {"weight_block_size", "modules_to_not_convert", "ignored_layers"},
            {"quant_method", "dequantize"},
            only,
        )

    @override
    def scheme_in(
        self, config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        if "weight_scale" not in stored:
            return None
        dynamic, block = config.get("activation_scheme", "dynamic") == "dynamic", config.get("weight_block_size")
        activations = ActFormat("float", 8, dynamic)
        if block is not None:
            if not (isinstance(block, list) and [type(side) for side in block] == [int, int] and dynamic):
                raise UserError(f"FP8 blocks need two sides and dynamic activations; weight_block_size is {block!r}")
            return Scheme(Format("float", 8, block[1], rows=block[0]), activations)
        scales = math.prod(stored["weight_scale"].shape)
        if scales not in (1, shape[0]):
            raise UserError(
                f"there are {scales} scales for {shape[0]} rows, but the config has no weight_block_size; add it"
            )
        return Scheme(Format("float", 8, -1 if scales == shape[0] > 1 else 0), activations)

    @override
    def quantizes(self, config: Mapping, name: str) -> bool:
        """Whether an engine takes the linear layer `name` for quantized: it is not in the list of exceptions."""
        return name not in (config.get("ignored_layers") or config.get("modules_to_not_convert") or ())

    @override
    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        weights, scale, input_scale = scheme.weights, stored["weight_scale"], stored.get("input_scale")
        if weights.rows == 1:
            scale = scale.reshape(-1, 1) if weights.group < 0 else scale.reshape(1)
        return QTensor(stored["weight"], scale, None, weights), None if input_scale is None else input_scale.reshape(1)


FORMAT = Fp8()
