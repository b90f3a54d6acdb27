"""MLX's format, which mlx-vlm, LM Studio and other programs on Apple's machines read.

Stored per linear layer (`out` x `in`, b bits, g = number of scales per row):

| scheme | mode | tensors |
|---|---|---|
| int, 2 to 6 and 8 bits, groups of 32, 64, 128 or a multiple of that | affine | `weight` u32 [out, in*b/32], `scales` \
[out, g], `biases` [out, g] |
| MXFP4, MXFP8 | mxfp4, mxfp8 | `weight` u32 [out, in*b/32], `scales` u8 [out, in/32], exponents of 2 plus 127 |
| NVFP4 | nvfp4 | `weight` u32 [out, in/8], `scales` u8 [out, in/16], bytes of float8, `weight_global_scale` f32 [] |

Packing is along `in`, least significant bits first. An affine weight is `scale * code + bias` with codes from 0, so the bias is
`-scale * (zero point + 2^(b-1))`. Scales and biases have the type of the model: MLX computes in the widest type of a product's
parts, so that one float32 scale would make every later layer, and the KV cache, float32. Without zero points the bias is a
scale times a power of two, and exact; with them it is rounded to the model's type (of BF16: by at most 1/32 of a step).

Tensors keep their names; mlx-vlm's classes rename them when they load (`sanitize`). Sources: mlx 0.32 `ops.cpp: quantize`,
`nn/layers/quantized.py`, mlx-vlm 0.7.10 `utils.py: load_model`, `quantization/nvfp4.py` (the global scale, a divisor).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.export.formats._mlx_config import module_paths, published
from vlmcompress.export.packing import pack_words
from vlmcompress.export.readers import ENGINES
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import QTensor, Scheme, pack_fp4
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_files import Spec

FORMAT = "mlx"
KV_SCALES = None
VOCABULARY = True
GROUP_SIZE = 64  # as mlx-vlm's own conversion
REDUCED = ("qwen2-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3-5", "qwen3-5-moe")
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (128, 64, 32)


def storage(scheme: Scheme) -> str:
    """MLX's mode for a scheme's weights. Raises `UserError` for an unsupported scheme."""
    fmt = scheme.weights
    if scheme.activations is not None:
        raise UserError("MLX files have no settings of activations; use a weight-only scheme")
    if fmt.nvfp4 or fmt.mx:
        return fmt.name
    if fmt.kind == "float":
        raise UserError("MLX has no kernel for FP8 with a scale per row, block or matrix; use mxfp8")
    if fmt.bits not in _BITS:
        raise UserError(f"MLX has integers of 2, 3, 4, 5, 6 and 8 bits, not of {fmt.bits}")
    _group(scheme)
    return "affine"


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    return ["MLX files hold no scales of an FP8 KV cache; leave out kv_cache"] if layers.kv_cache else []


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors stored for a layer.

    Raises:
        ValueError: the group size does not divide the columns, or the matrix is too small for mlx-vlm.
    """
    mode = storage(scheme)
    scheme.weights.n_groups(columns)
    if rows * columns % 64:
        raise ValueError(f"mlx-vlm quantizes no matrix of {rows} x {columns} weights, which are no multiple of 64")
    groups = columns // _group(scheme)
    layer = {"weight": Spec("U32", (rows, columns * scheme.weights.bits // 32))}
    if mode == "affine":
        return layer | dict.fromkeys(("scales", "biases"), Spec(dtype, (rows, groups)))
    layer["scales"] = Spec("U8", (rows, groups))
    return layer | ({"weight_global_scale": Spec("F32", ())} if mode == "nvfp4" else {})


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors stored for one linear layer."""
    fmt = scheme.weights
    if storage(scheme) != "affine":
        codes = pack_fp4(qt.q) if fmt.fp4 else qt.q
        layer = {
            "weight": codes.contiguous().view(torch.uint8).view(torch.uint32),
            "scales": qt.scale.contiguous().view(torch.uint8),
        }
        return layer | ({} if qt.global_scale is None else {"weight_global_scale": qt.global_scale.reshape(())})
    repeats = fmt.group // _group(scheme)
    zero = torch.zeros_like(qt.scale) if qt.zero_point is None else qt.zero_point
    bias = (qt.scale.float() * -(zero.float() + 2 ** (fmt.bits - 1))).to(qt.scale.dtype)
    return {
        "weight": pack_words(qt.q, fmt.bits).view(torch.uint32),
        "scales": qt.scale.repeat_interleave(repeats, 1),
        "biases": bias.repeat_interleave(repeats, 1),
    }


def configs(layers: Layers) -> dict[str, dict]:
    """The block of config.json: numbers of most layers, and those of others by their paths in mlx-vlm."""
    if not layers.schemes:
        return {}
    main, *_ = layers.schemes
    others = {
        path: numbers(scheme)
        for names, scheme in layers.quantized.items()
        if scheme != main
        for path in module_paths(names[0])
    }
    return {"config.json": {"quant_method": FORMAT, **numbers(main), **others}}


def model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json with the names that mlx-vlm reads, and its block where mlx-vlm looks for it."""
    config = published(config)
    block = config.get("quantization_config")
    return config | ({"quantization": {k: v for k, v in block.items() if k != "quant_method"}} if block else {})


def source_problems(folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
    """Reasons why a model cannot be written: mlx-vlm lacks its family, or computes it differently.

    Args:
        folder: the source's folder.
        config: transformers' configuration with all defaults.
    """
    engine, (architecture, *_) = ENGINES["mlx"], config.get("architectures") or [""]
    if architecture not in (engine.architectures or ()):
        return [f"mlx: family {family}: {engine.title} has no class for {architecture}; write another format"]
    try:
        published(config)
    except UserError as error:
        return [f"mlx: family {family}: {error}; write another format"]
    return []


def reducer_problem(family: str, reducer: Mapping[str, Any]) -> str | None:
    """The message that a reducer does not run in MLX (`engines/mlx_reducers.py`); None if it does."""
    methods = ENGINES["mlx"].reducers
    if family in REDUCED and reducer["method"] in methods and not {"merge", "similar"} & reducer.keys():
        return None
    return (
        f"MLX runs {', '.join(methods)} alone, without merging, for {', '.join(REDUCED)}; "
        "make images smaller with --reduce resize:SHARE, or write compressed-tensors"
    )


def numbers(scheme: Scheme) -> dict[str, Any]:
    """A scheme in MLX's words."""
    return {"group_size": _group(scheme), "bits": scheme.weights.bits, "mode": storage(scheme)}


def _group(scheme: Scheme) -> int:
    """Columns that share a scale in MLX: larger groups repeat theirs."""
    fmt = scheme.weights
    if fmt.kind == "float":
        return fmt.group
    size = next((size for size in _GROUPS if fmt.group > 0 and fmt.group % size == 0), None)
    if size is None:
        raise UserError(
            f"MLX has a scale for each 32, 64 or 128 inputs, not for group_size {fmt.group}; set group_size"
        )
    return size
