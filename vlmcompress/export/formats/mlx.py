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
scale times a power of two, and exact; with them it is rounded to the model's type, of BF16 and 4 bits by up to 1/32 of a step.

Tensors keep their names; mlx-vlm's classes rename them when they load (`sanitize`). Sources: mlx 0.32 `ops.cpp: quantize`,
`nn/layers/quantized.py`, mlx-vlm 0.7.10 `utils.py: load_model`, `quantization/nvfp4.py` (the global scale, a divisor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Reader, Writer
from vlmcompress.export.formats._mlx_config import memory_name, module_paths, published
from vlmcompress.export.packing import pack_words, unpack_words
from vlmcompress.export.readers import ENGINES
from vlmcompress.models import all_specs
from vlmcompress.models.layer_names import Layers, Names
from vlmcompress.models.quantization_keys import require_known_keys
from vlmcompress.numerics import FLOAT8, MXFP4, MXFP8, NVFP4, Format, QTensor, Scheme, pack_fp4, unpack_fp4
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Entry, Spec

_FLOATS = {"mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}
_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (128, 64, 32)


def _plain(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block without the entries that are not MLX's."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in block.items()
        if key not in ("quant_method", "symmetric")
    }


def numbers(scheme: Scheme) -> dict[str, Any]:
    """A scheme in MLX's words."""
    return {"group_size": _group(scheme), "bits": scheme.weights.bits, "mode": FORMAT.storage(scheme)}


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


class Mlx(Writer, Reader):
    """The three modes, and config.json with the names that mlx-vlm reads."""

    METHOD = "mlx"
    ENGINE = "mlx"
    VOCABULARY = True
    GROUP_SIZE = 64  # as mlx-vlm's own conversion

    @override
    def storage(self, scheme: Scheme) -> str:
        fmt = scheme.weights
        if scheme.activations is not None:
            raise UserError("MLX files have no settings of activations; use a weight-only scheme")
        if fmt.nvfp4 or fmt.mx:
            return fmt.name
        if fmt.kind == "float":
            raise UserError("MLX has no kernel for FP8 with a scale per row, block or matrix; use mxfp8")
        if fmt.bits not in _BITS:
            raise UserError(f"MLX has integers of 2, 3, 4, 5, 6 and 8 bits, not of {fmt.bits}")
        if fmt.bits == 8 and not fmt.symmetric:
            raise UserError(
                "of 8 bits MLX's biases would round zero points by up to half a step; leave these out (symmetric)"
            )
        _group(scheme)
        return "affine"

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        mode = self.storage(scheme)
        scheme.weights.n_groups(columns)
        if rows * columns % 64:
            raise ValueError(f"mlx-vlm quantizes no matrix of {rows} x {columns} weights, which are no multiple of 64")
        groups = columns // _group(scheme)
        layer = {"weight": Spec("U32", (rows, columns * scheme.weights.bits // 32))}
        if mode == "affine":
            return layer | dict.fromkeys(("scales", "biases"), Spec(dtype, (rows, groups)))
        layer["scales"] = Spec("U8", (rows, groups))
        return layer | ({"weight_global_scale": Spec("F32", ())} if mode == "nvfp4" else {})

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        fmt = scheme.weights
        if self.storage(scheme) != "affine":
            codes = pack_fp4(qt.q) if fmt.fp4 else qt.q
            layer = {
                "weight": codes.contiguous().view(torch.uint8).view(torch.uint32),
                "scales": qt.scale.contiguous().view(torch.uint8),
            }
            return layer | ({} if qt.global_scale is None else {"weight_global_scale": qt.global_scale.reshape(())})
        # w = scale * q + bias with codes from 0: bias = -scale * zero point, which is exact where the zero point is whole.
        repeats = fmt.group // _group(scheme)
        zero = torch.zeros_like(qt.scale) if qt.zero_point is None else qt.zero_point
        bias = (qt.scale.float() * -(zero.float() + 2 ** (fmt.bits - 1))).to(qt.scale.dtype)
        return {
            "weight": pack_words(qt.q, fmt.bits).view(torch.uint32),
            "scales": qt.scale.repeat_interleave(repeats, 1),
            "biases": bias.repeat_interleave(repeats, 1),
        }

    @override
    def configs(self, layers: Layers) -> dict[str, dict]:
        """The block of config.json: numbers of most layers, and those of others by their paths in mlx-vlm."""
        if not layers.schemes:
            return {}
        main, *_ = layers.schemes
        others = {
            path: {**numbers(scheme), "symmetric": scheme.weights.symmetric}
            for names, scheme in layers.quantized.items()
            if scheme != main
            for path in module_paths(names[0])
        }
        return {
            "config.json": {"quant_method": self.METHOD, **numbers(main), "symmetric": main.weights.symmetric, **others}
        }

    @override
    def model_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        config = published(config)
        block = config.get("quantization_config")
        return config | ({"quantization": _plain(block)} if block else {})

    @override
    def source_problems(self, folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
        """mlx-vlm lacks the family, or computes it differently."""
        engine, (architecture, *_) = ENGINES["mlx"], config.get("architectures") or [""]
        if architecture not in (engine.architectures or ()):
            return [f"mlx: family {family}: {engine.title}: {engine.absent.format(architecture)}; write another format"]
        try:
            published(config)
        except UserError as error:
            return [f"mlx: family {family}: {error}; write another format"]
        return []

    @override
    def reducer_problem(self, family: str, reducer: Mapping[str, Any]) -> str | None:
        """MLX runs those of `engines/mlx_reducers.py`."""
        methods, families = (
            ENGINES["mlx"].reducers,
            [spec.family for spec in all_specs() if spec.engine.mlx.fewer_tokens],
        )
        if family in families and reducer["method"] in methods and "merge" not in reducer:
            return None
        return (
            f"MLX runs {', '.join(methods)} alone, without merging, for {', '.join(families)}; "
            "make images smaller with --reduce resize:SHARE, or write compressed-tensors"
        )

    @override
    def require_supported(self, config: Mapping[str, Any]) -> None:
        read, layers = {"group_size", "bits", "mode", "symmetric"}, dict[str, Any]()
        for key, value in config.items():
            layers |= {key: value} if isinstance(value, (Mapping, bool)) and key not in read else {}
        require_known_keys(config, read | layers.keys(), {"quant_method"})
        for key, value in layers.items():
            require_known_keys(value if isinstance(value, Mapping) else {}, read, (), None, f"{key}.")

    @override
    def renamed(self, entries: Sequence[Entry], state: Mapping[str, Tensor]) -> list[Entry]:
        """Tensors that MLX's tools wrote, with memory names and convolutions' channels in torch's place.

        Raises:
            UserError: mlx-vlm changes the numbers of this family's tensors, not just their names.
        """
        # mlx-vlm's `sanitize` did that to the numbers; the names alone can be turned back.
        if any("switch_" in entry.name or "linear_attn." in entry.name for entry in entries):
            raise UserError(
                "mlx-vlm stacks experts and shifts the norms of Qwen3.5, which is not undone; give the original"
            )
        tensors = []
        for entry in entries:
            name, (first, *rest) = memory_name(entry.name, state), entry.spec.shape or (0,)
            shape = tuple(state[name].shape) if name in state else entry.spec.shape
            # MLX has channels last: torch's `[out, in, h, w]` is `[out, h, w, in]` there.
            last = len(rest) > 2 and shape != entry.spec.shape and shape == (first, rest[-1], *rest[:-1])
            tensors.append(
                replace(
                    entry,
                    name=name,
                    spec=Spec(entry.spec.dtype, shape if last else entry.spec.shape),
                    channels_last=last,
                )
            )
        return tensors

    @override
    def scheme_in(
        self, config: Mapping[str, Any], names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        if "scales" not in stored:
            return None
        paths = [*module_paths(names[0]), *names]
        paths += [path.removeprefix("language_model.") for path in paths]
        block = next((config[path] for path in paths if isinstance(config.get(path), Mapping)), config)
        bits, group, mode = block.get("bits"), block.get("group_size"), block.get("mode", "affine")
        if mode in _FLOATS and (group, bits) == (_FLOATS[mode].group, _FLOATS[mode].bits):
            if mode == "nvfp4" and "weight_global_scale" not in stored:
                raise UserError(
                    "NVFP4 of MLX's own tools has no global scale, which other formats have; quantize the original"
                )
            return Scheme(_FLOATS[mode])
        if mode != "affine" or bits not in _BITS or group not in _GROUPS:
            raise UserError(
                "MLX's modes are affine with 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, mxfp4, mxfp8 and nvfp4; "
                f"this is {mode!r} with {bits!r} bits, group_size {group!r}"
            )
        return Scheme(Format("int", bits, group, block.get("symmetric") is True))

    @override
    def quantizes(self, config: Mapping[str, Any], name: str) -> bool | None:
        """None, as mlx-vlm takes a layer with scales for quantized; False where the block says that of the layer."""
        return False if config.get(name) is False else None

    @override
    def read(self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> tuple[QTensor, None]:
        """The codes, scales and zero points of a layer. MLX's own tools write negative scales, too: their codes are mirrored.

        Zero points are biases over scales. The bias of `tensors` and of MLX's `quantize` is a multiple of the scale, rounded
        to its type: `tensors` is inverted exactly; weights of MLX's tools differ by that rounding, at most 1/16 of a step.

        Raises:
            UserError: a bias is no multiple of its scale, or beyond the codes.
        """
        fmt, columns = scheme.weights, shape[1]
        if fmt.kind == "float":
            codes = stored["weight"].contiguous().view(torch.uint8)
            q = unpack_fp4(codes) if fmt.fp4 else codes.view(FLOAT8)
            divisor = stored["weight_global_scale"].reshape(1) if fmt.nvfp4 else None
            return QTensor(
                q, stored["scales"].view(FLOAT8) if fmt.nvfp4 else stored["scales"], None, fmt, divisor
            ), None
        q = unpack_words(stored["weight"].view(torch.int32), fmt.bits, columns)
        scale, bias = stored["scales"], stored["biases"]
        ratio = -(bias.float() / scale.float())  # zero points of codes that begin at 0
        zero, top = ratio.round(), 2**fmt.bits - 1
        multiple = ((scale.float() * -zero).to(bias.dtype) == bias) | ((ratio - zero).abs() <= 1 / 16)
        mirrored = scale < 0
        if mirrored.any():
            q = torch.where(mirrored.repeat_interleave(fmt.group, 1), -1 - q, q)
            scale, zero = scale.abs(), torch.where(mirrored, top - zero, zero)
        if not multiple.all() or zero.min() < 0 or zero.max() > top:
            raise UserError("it has a bias that is no multiple of its scale within the codes; quantize the original")
        zero_point = (zero - 2 ** (fmt.bits - 1)).to(torch.int8)
        if fmt.symmetric and zero_point.any():
            raise UserError(
                "the config says symmetric weights, but not all zero points are in the middle; correct the config"
            )
        return QTensor(q, scale, None if fmt.symmetric else zero_point, fmt), None


FORMAT = Mlx()
