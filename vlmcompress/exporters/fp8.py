"""FP8 files as DeepSeek, Qwen and transformers write them (`quant_method: fp8`): blocks of 128 x 128, rows or whole matrices.
They are read, to become another format, and not written.

Stored per linear layer (`out` x `in`): `weight` e4m3 [out, in] and one of

| scales | tensor |
|---|---|
| of blocks of r x c | `weight_scale_inv` f32 [out/r, in/c], both rounded up; it multiplies, whatever its name says |
| of rows | `weight_scale` [out, 1] |
| of the matrix | `weight_scale` [], and with fixed activation scales `input_scale` [] |

Sources: vLLM 0.32 `quantization/fp8.py`, transformers 5.17 `integrations/finegrained_fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from vlmcompress.common.layer_names import Names
from vlmcompress.common.tensor_files import Spec
from vlmcompress.errors import UserError
from vlmcompress.numerics import ActFormat, Format, QTensor, Scheme

FORMAT = "fp8"
KV_SCALES = None


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors that a layer has; `dtype`: that of scales."""
    weights = scheme.weights
    shapes: dict[str, tuple[int, ...]]
    if weights.rows > 1:
        shapes = {"weight_scale_inv": (math.ceil(rows / weights.rows), weights.n_groups(columns))}
    else:
        shapes = {"weight_scale": (rows, 1) if weights.group < 0 else ()}
        if scheme.activations is not None and not scheme.activations.dynamic:
            shapes["input_scale"] = ()
    return {"weight": Spec("F8_E4M3", (rows, columns))} | {name: Spec(dtype, shape) for name, shape in shapes.items()}


def scheme_in(config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]) -> Scheme | None:
    """The scheme of a linear layer `[out, in]`; None: it is not quantized. `names`: those in memory, on disk, in vLLM.

    Raises:
        UserError: the config's block is none, or activation scales are fixed where they can't be.
    """
    scales = [name for name in ("weight_scale_inv", "weight_scale") if name in stored]
    if not scales:
        return None
    dynamic = config.get("activation_scheme", "dynamic") == "dynamic"
    if scales == ["weight_scale_inv"]:
        block = config.get("weight_block_size")
        if not (isinstance(block, list) and [type(side) for side in block] == [int, int] and dynamic):
            raise UserError(f"FP8 blocks are read with dynamic activations and a weight_block_size, this is {block!r}")
        return Scheme(Format("float", 8, block[1], rows=block[0]), ActFormat("float", 8, dynamic=True))
    per_row = math.prod(stored["weight_scale"].shape) == shape[0] > 1
    return Scheme(Format("float", 8, -1 if per_row else 0), ActFormat("float", 8, dynamic))


def quantizes(config: Mapping, name: str) -> bool:
    """Whether an engine reads the linear layer called `name` as quantized: it is not in the list of exceptions."""
    return name not in (config.get("ignored_layers") or config.get("modules_to_not_convert") or ())


def read(stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> tuple[QTensor, Tensor | None]:
    """The codes and scales of a layer, and the scale of its inputs where that is fixed."""
    weights = scheme.weights
    if weights.rows > 1:
        return QTensor(stored["weight"], stored["weight_scale_inv"], None, weights), None
    scale = stored["weight_scale"].reshape(-1, 1) if weights.group < 0 else stored["weight_scale"].reshape(1)
    input_scale = stored.get("input_scale")
    return QTensor(stored["weight"], scale, None, weights), None if input_scale is None else input_scale.reshape(1)
