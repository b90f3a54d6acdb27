"""The compressed-tensors format, which can hold every scheme.

Stored per linear layer (`out` x `in`, b bits, g = number of scales per row):

| scheme | format | tensors |
|---|---|---|
| int, 16-bit activations; int 4 in groups, FP8 activations | pack-quantized | `weight_packed` i32 [out, in*b/32], \
`weight_scale` [out, g], `weight_shape` i64 [2], asymmetric: `weight_zero_point` i32 [out*b/32, g] |
| int 8 or 4, int 8 activations | int-quantized | `weight` i8 [out, in] (4 bits, too), `weight_scale` [out, 1] |
| FP8 | float-quantized | `weight` e4m3 [out, in], `weight_scale` [out, 1], [1] or, of blocks, [out/128, in/128], \
static activations: `input_scale` [1] |
| MXFP8 | mxfp8-quantized | `weight` e4m3 [out, in], `weight_scale` u8 [out, in/32], exponents of 2 plus 127 |
| MXFP4 | mxfp4-pack-quantized | `weight_packed` u8 [out, in/2], `weight_scale` u8 [out, in/32], exponents of 2 plus 127 |
| NVFP4 | nvfp4-pack-quantized | `weight_packed` u8 [out, in/2], `weight_scale` e4m3 [out, in/16], \
`weight_global_scale` f32 [1], NVFP4 activations: `input_global_scale` f32 [1] |

Packing is along `in`, least significant bits first, of the code plus 2^(b-1); zero points are packed the same way along `out`.
Of 4-bit floats two codes make a byte (`numerics.pack_fp4`). NVFP4's global scales are divisors: `weight = code * scale
/ global`. Sources: compressed_tensors 0.19 `compressors/*`, vLLM 0.32 `quantization/compressed_tensors` (which reads
`weights` of 8-bit weight-only layers from pack-quantized files only). The library is imported where it is used: what
reads names and shapes only, and every other format, does without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import Reader, Writer
from vlmcompress.export.packing import pack_words, unpack_words
from vlmcompress.models.layer_names import EMBEDDING, Kept, Layers, Names
from vlmcompress.models.quantization_keys import require_known_keys
from vlmcompress.numerics import MXFP4, NVFP4, ActFormat, Format, QTensor, Scheme, pack_fp4, unpack_fp4
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

_NVFP4, _MXFP4, _MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
# as in compressed-tensors' presets of microscaling
_EXPONENTS = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
# otherwise transformers computes scales of activations in float32
_FLOAT8_SCALES = {"scale_dtype": "torch.float8_e4m3fn"}
_OFFLINE = ("weight_input", "weight_output")  # transforms that are already applied to the stored weights
_ABOUT = (
    "quant_method",
    "version",
    "format",
    "quantization_status",
    "global_compression_ratio",
    "run_compressed",
    "provider",
)
_ARGUMENTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # types of scales are known from the tensors
_ORDERS = {"actorder": ("weight", "static", False)}  # orders in which the inputs of a group are contiguous
_KV_CACHE = {"num_bits": 8, "type": "float"}  # with one static scale
_OBSERVER = {"observer": "static_minmax"}  # as in compressed-tensors' preset


def quantization_config(
    groups: Sequence[tuple[Scheme, Sequence[str]]], ignore: Sequence[str], *, kv_cache: bool = False
) -> dict:
    """The `quantization_config` block of config.json.

    Only fields that all releases of the last year support are written: vLLM 0.32 pins an older compressed-tensors than
    llm-compressor does.

    Args:
        groups: schemes with their targets, e.g. `[(w4a16, ["Linear"]), (fp8, ["re:.*visual.*proj$"])]`. Patterns take
            precedence over class names in both transformers and vLLM.
        ignore: layers (or `re:` patterns) that are not quantized.
        kv_cache: whether the checkpoint has FP8 `k_scale` and `v_scale` per attention layer.

    Returns:
        The block; empty if nothing is quantized, as config.json then needs none.
    """
    if not groups and not kv_cache:
        return {}
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationConfig

    formats = sorted({FORMAT.storage(scheme) for scheme, _ in groups})
    config = {
        "quant_method": "compressed-tensors",
        "version": __version__,
        "format": "mixed-precision" if len(formats) > 1 else (*formats, "dense")[0],
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": list(targets),
                "format": FORMAT.storage(scheme),
                "weights": _weight_args(scheme.weights),
                "input_activations": _activation_args(scheme),
                "output_activations": None,
            }
            for i, (scheme, targets) in enumerate(groups)
        },
        "ignore": list(ignore),
        "kv_cache_scheme": _args("float", 8, "tensor", dynamic=False) if kv_cache else None,
        "global_compression_ratio": None,
    }
    QuantizationConfig.model_validate(config)  # the library's pydantic model, with which transformers and vLLM read it
    return config


def _args(
    kind: str, bits: int, strategy: str, *, dynamic: bool | str, symmetric: bool = True, group: int | None = None
) -> dict:
    args = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": dynamic}
    return args | ({"group_size": group} if group else {})


def _weight_args(fmt: Format) -> dict:
    if fmt.rows > 1:
        args = _args(fmt.kind, fmt.bits, "block", dynamic=False)
        return args | {"block_structure": [fmt.rows, fmt.group]}
    strategy = {-1: "channel", 0: "tensor"}.get(fmt.group, "tensor_group" if fmt.nvfp4 else "group")
    group = fmt.group if fmt.group > 0 else None
    args = _args(fmt.kind, fmt.bits, strategy, dynamic=False, symmetric=fmt.symmetric, group=group)
    return args | (_FLOAT8_SCALES if fmt.nvfp4 else _EXPONENTS if fmt.mx else {})


def _activation_args(scheme: Scheme) -> dict | None:
    fmt = scheme.activations
    if fmt is None:
        return None
    if scheme.weights.rows > 1:  # block kernels use groups of the same size for activations and weights
        return _args(fmt.kind, fmt.bits, "group", dynamic=True, group=scheme.weights.group)
    if fmt.mx:
        return _args("float", fmt.bits, "group", dynamic=True, group=MXFP4.group) | _EXPONENTS
    if fmt.nvfp4:  # `local`: per block, relative to the static global scale
        return _args("float", 4, "tensor_group", dynamic="local", group=NVFP4.group) | _FLOAT8_SCALES | _OBSERVER
    return _args(fmt.kind, fmt.bits, "token" if fmt.dynamic else "tensor", dynamic=fmt.dynamic)


def _meaning(args: Mapping) -> dict[str, Any]:
    """The number format in a config's arguments, with compressed-tensors' defaults."""
    group, defaults = args.get("group_size"), {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    strategy = args.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    return {key: args.get(key, value) for key, value in defaults.items()} | {
        "strategy": strategy,
        "group_size": group if strategy in ("group", "tensor_group") else None,
        "block_structure": args.get("block_structure"),
    }


def scheme_of(group: Mapping) -> Scheme:
    """The scheme of a config group, ours or another tool's. Raises `UserError` for an unsupported one."""
    weights, activations = _meaning(group["weights"]), group.get("input_activations")
    rows, columns = weights["block_structure"] or (1, weights["group_size"])
    group_size = {"channel": -1, "tensor": 0}.get(weights["strategy"], columns)
    fmt = Format(weights["type"], weights["num_bits"], group_size, weights["symmetric"], rows)
    if not activations:
        return Scheme(fmt)
    args = _meaning(activations)
    mx = (args["type"], args["strategy"], args["group_size"]) == ("float", "group", MXFP4.group)
    return Scheme(fmt, ActFormat(args["type"], args["num_bits"], args["dynamic"] in (True, "local"), mx))


def group_of(config: Mapping, name: str) -> str | None:
    """The config group of the linear layer `name`; None: not quantized.

    This is the rule of transformers and vLLM: ignored names first, then names, then patterns, then the class `Linear`, to which
    the token embedding does not belong.
    """
    kind = "Embedding" if name.endswith(EMBEDDING) else "Linear"
    if any(_matches(name, entry) or entry == kind for entry in config.get("ignore") or ()):
        return None
    targets = [(target, key) for key, group in config["config_groups"].items() for target in group["targets"]]
    targets.sort(key=lambda item: item[0].startswith("re:"))
    by_name = [key for target, key in targets if _matches(name, target)]
    return next(iter(by_name + [key for target, key in targets if target == kind]), None)


def _matches(name: str, entry: str) -> bool:
    return bool(re.match(entry[3:], name)) if entry.startswith("re:") else name == entry


def ignore_entries(modules: Iterable[Kept]) -> list[str]:
    """Entries of `ignore` for unquantized modules, valid for the names of all readers.

    transformers compares them with memory names, vLLM with its own names (it maps plain entries from names on disk, but not
    regular expressions), other readers with tensor names. So a single layer is listed by each of its names, a part of the
    model as one regular expression over them. An MTP head is listed in both common forms: SGLang searches for the first one
    literally.
    """
    entries: list[str] = []
    for kept in modules:
        if kept.mtp:
            entries += mtp_entries(kept.names[0])
        elif kept.whole:
            entries.append(f"re:(?:{'|'.join(map(re.escape, kept.names))})\\..*")
        else:
            entries += kept.names
    return list(dict.fromkeys(entries))


def mtp_entries(prefix: str) -> list[str]:
    """Entries of `ignore` for an MTP head whose modules' names begin with `prefix` in vLLM."""
    return [f"re:^{prefix}.*", f"re:.*{prefix}.*"]


class CompressedTensors(Writer, Reader):
    """All schemes, each with its `format` in the table above."""

    METHOD = "compressed-tensors"
    KV_SCALES = ("k_scale", "v_scale")
    VOCABULARY = True

    @override
    def storage(self, scheme: Scheme) -> str:
        weights, activations = scheme.weights, scheme.activations
        if weights.nvfp4:
            if activations is not None and not activations.nvfp4:
                raise UserError("NVFP4 weights are stored with NVFP4 or 16-bit activations only")
            return _NVFP4
        if activations is not None and activations.nvfp4:
            raise UserError("NVFP4 activations are stored next to NVFP4 weights only")
        if weights.mx:
            if activations is not None and not activations.mx:
                raise UserError(
                    "MXFP4 and MXFP8 weights are stored with activations of such a format or in 16 bits only"
                )
            return _MXFP4 if weights.bits == 4 else _MXFP8
        if activations is not None and activations.mx:
            raise UserError("MXFP4 and MXFP8 activations are stored next to weights of such a format only")
        if weights.kind == "float":
            if weights.group > 0 and weights.rows == 1:
                raise UserError(
                    "FP8 weights are stored with a scale per channel, tensor or block only; use group -1 or 0"
                )
            return "float-quantized"
        if activations is None:
            if weights.group == 0:
                raise UserError("weight-only int needs one scale per group or channel; use a group size or -1")
            return "pack-quantized"
        if activations.kind == "float" and activations.bits == 8 and (weights.bits, weights.symmetric) == (4, True):
            if weights.group != 128 or not activations.dynamic:
                raise UserError(
                    "int 4 weights with FP8 activations are stored in groups of 128 and with dynamic scales only"
                )
            return "pack-quantized"
        if weights.bits not in (4, 8) or activations.bits != 8 or activations.kind != "int" or weights.group > 0:
            raise UserError(
                "int weights with quantized activations are stored as W8A8 or W4A8 with a scale per channel only"
            )
        if not weights.symmetric:
            raise UserError("W8A8 and W4A8 int need symmetric weights; no engine reads asymmetric ones")
        return "int-quantized"

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        kind, weights = self.storage(scheme), scheme.weights
        scale: tuple[int, ...] = (
            (1,) if weights.group == 0 else (math.ceil(rows / weights.rows), weights.n_groups(columns))
        )
        if kind == _NVFP4:
            layer = {
                "weight_packed": Spec("U8", (rows, columns // 2)),
                "weight_scale": Spec("F8_E4M3", scale),
                "weight_global_scale": Spec("F32", (1,)),
            }
            return layer | ({"input_global_scale": Spec("F32", (1,))} if scheme.activations else {})
        if kind == _MXFP4:
            return {"weight_packed": Spec("U8", (rows, columns // 2)), "weight_scale": Spec("U8", scale)}
        if kind == _MXFP8:
            dtype = "U8"
        if kind != "pack-quantized":
            code = "F8_E4M3" if weights.kind == "float" else "I8"
            layer = {"weight": Spec(code, (rows, columns)), "weight_scale": Spec(dtype, scale)}
            static = scheme.activations is not None and not scheme.activations.dynamic
            return layer | ({"input_scale": Spec(dtype, (1,))} if static else {})
        layer = {
            "weight_packed": Spec("I32", (rows, math.ceil(columns * weights.bits / 32))),
            "weight_scale": Spec(dtype, scale),
            "weight_shape": Spec("I64", (2,)),
        }
        if not weights.symmetric:
            if rows * weights.bits % 32:
                raise ValueError(
                    f"{rows} outputs do not fill whole words with {weights.bits}-bit zero points; use symmetric"
                )
            layer["weight_zero_point"] = Spec("I32", (rows * weights.bits // 32, scale[1]))
        return layer

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        calibrated = scheme.activations is not None and scheme.activations.calibrated
        if calibrated != (input_scale is not None):
            raise ValueError("only static or NVFP4 activations have an input scale")
        kind = self.storage(scheme)
        if kind == _MXFP4:
            return {"weight_packed": pack_fp4(qt.q), "weight_scale": qt.scale.contiguous()}
        if kind == _NVFP4:
            assert qt.global_scale is not None
            stored = {"weight_packed": pack_fp4(qt.q), "weight_scale": qt.scale.contiguous()}
            stored["weight_global_scale"] = qt.global_scale.reshape(1)
            return stored | ({} if input_scale is None else {"input_global_scale": input_scale.reshape(1).float()})
        if kind != "pack-quantized":
            stored = {"weight": qt.q.contiguous(), "weight_scale": qt.scale.contiguous()}
            if input_scale is not None:  # transformers computes in the stored type
                stored["input_scale"] = input_scale.reshape(1).to(qt.scale.dtype)
            return stored
        bits = scheme.weights.bits
        stored = {
            "weight_packed": pack_words(qt.q, bits),
            "weight_scale": qt.scale.contiguous(),
            "weight_shape": torch.tensor(qt.q.shape, dtype=torch.int64),
        }
        if qt.zero_point is not None:
            stored["weight_zero_point"] = pack_words(qt.zero_point.T, bits).T.contiguous()
        return stored

    @override
    def require_supported(self, config: Mapping) -> None:
        """Raise `UserError` for unsupported settings of the config block: rotations at run time, rounded outputs, ...

        The arguments of a config group must equal those that we would write for its scheme.
        """
        places = [
            args.get("location")
            for transform in ((config.get("transform_config") or {}).get("config_groups") or {}).values()
            for args in transform.get("apply", ())
        ]
        plain = {
            "transform_config": all(place in _OFFLINE for place in places),
            "sparsity_config": (config.get("sparsity_config") or {}).get("format") in (None, "dense"),
            "kv_cache_scheme": _meaning(config.get("kv_cache_scheme") or {}) == _meaning(_KV_CACHE),
        }
        require_known_keys(config, {"config_groups", "ignore", *(key for key, right in plain.items() if right)}, _ABOUT)
        for name, group in (config.get("config_groups") or {}).items():
            at = f"config_groups.{name}."
            require_known_keys(group, {"targets", "weights", "input_activations"}, {"format"}, at=at)
            scheme = scheme_of(group)
            written = {"weights": _weight_args(scheme.weights), "input_activations": _activation_args(scheme)}
            for part, args in written.items():
                if args is not None:
                    require_known_keys(group[part], _ARGUMENTS, _OBSERVED, _ORDERS, f"{at}{part}.")
                    same = {key: (value,) for key, value in _meaning(args).items()}
                    require_known_keys(_meaning(group[part]), (), (), same, f"{at}{part}.")

    @override
    def configs(self, layers: Layers) -> dict[str, dict]:
        block = quantization_config(layers.groups, ignore_entries(layers.kept), kv_cache=layers.kv_cache)
        return {"config.json": block} if block else {}

    @override
    def scheme_in(
        self, config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]
    ) -> Scheme | None:
        keys = [group_of(config, name) for name in names]
        if "weight_scale" not in stored and None in keys:
            return None
        key = next((key for key in keys if key), None)
        return None if key is None else scheme_of(config["config_groups"][key])

    @override
    def quantizes(self, config: Mapping, name: str) -> bool:
        return group_of(config, name) is not None

    @override
    def read(
        self, stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]
    ) -> tuple[QTensor, Tensor | None]:
        kind = self.storage(scheme)
        if kind == _NVFP4:
            scales = stored["weight_scale"], None, scheme.weights, stored["weight_global_scale"]
            return QTensor(unpack_fp4(stored["weight_packed"]), *scales), stored.get("input_global_scale")
        if kind == _MXFP4:
            return QTensor(unpack_fp4(stored["weight_packed"]), stored["weight_scale"], None, scheme.weights), None
        if kind != "pack-quantized":
            return QTensor(stored["weight"], stored["weight_scale"], None, scheme.weights), stored.get("input_scale")
        bits, zero = scheme.weights.bits, stored.get("weight_zero_point")
        if zero is not None:
            zero = unpack_words(zero.T, bits, shape[0]).T.contiguous()
        q = unpack_words(stored["weight_packed"], bits, shape[1])
        return QTensor(q, stored["weight_scale"], zero, scheme.weights), None


FORMAT = CompressedTensors()
