"""GGUF, llama.cpp's format: `model.gguf` with the language model and `mmproj.gguf` with the tower and projector.

| scheme | ggml type | stored as |
|---|---|---|
| symmetric 4 bits, groups of 32 or a multiple, or per channel | Q4_0 | the same codes and scales, bit for bit |
| asymmetric 4 bits | Q4_1 | the same; the minimum is rounded to float16, at most 0.7% of a step |
| symmetric 8 bits | Q8_0 | the same codes and scales, bit for bit |
| left as they are | BF16, F16, F32 | the source's type; norms and biases F32 |
| tower and projector | F16 | rounded to it; F32 of a float32 source; norms, biases and positions F32 |

Scales are float16, so quantizers solve for such ones (`SCALES`). Names and metadata are data (`vlmcompress.llamacpp`), the
files are written by the package `gguf`. Beside them stand the source's configuration, tokenizer and processor.
Source: llama.cpp's converter, `conversion/base.py`, and `gguf` 0.19.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.common.layer_names import Layers
from vlmcompress.common.tensor_files import DTYPES, Spec
from vlmcompress.errors import UserError
from vlmcompress.exporters import Parts
from vlmcompress.exporters._gguf_blocks import BYTES, block_type, pack, row_bytes
from vlmcompress.exporters._gguf_tokenizer import metadata
from vlmcompress.llamacpp import REGISTRY, Facts, Family, Model, Rule
from vlmcompress.numerics import QTensor, Scheme

FORMAT = "gguf"
KV_SCALES = None
SCALES = torch.float16
ENGINE = "llamacpp"
GROUP_SIZE = 32  # larger groups repeat their scale and save nothing
MODEL, MMPROJ = "model.gguf", "mmproj.gguf"
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
"""llama.cpp's number of what most of a file's weights are."""


def storage(scheme: Scheme) -> str:
    """The ggml type of a scheme's weights. Raises UserError where the format cannot hold it."""
    if scheme.activations is not None:
        raise UserError("GGUF says nothing of activations, llama.cpp rounds them as it likes; use a weight-only scheme")
    return block_type(scheme.weights)


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    return ["GGUF holds no scales of an FP8 KV cache; leave out kv_cache"] if layers.kv_cache else []


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """The bytes of a layer's rows. Raises ValueError where they are no whole blocks."""
    storage(scheme)
    return {"weight": Spec("U8", (rows, row_bytes(scheme.weights, columns)))}


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The blocks of one linear layer."""
    storage(scheme)
    return {"weight": pack(qt)}


def configs(layers: Layers) -> dict[str, dict]:
    """The block of config.json, which says that the weights are elsewhere, and the numbers of most layers."""
    block: dict[str, Any] = {"quant_method": FORMAT, "files": [MODEL, MMPROJ]}
    if layers.schemes:
        weights = layers.schemes[0].weights
        block |= {"bits": weights.bits, "group_size": weights.group, "type": storage(layers.schemes[0])}
    return {"config.json": block}


def source_problems(folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
    """Reasons why a model cannot be written: llama.cpp lacks its family or runs it otherwise, or the tokenizer is another one.

    Args:
        folder: the source's, for its tokenizer.
        config: transformers' configuration with all defaults.
    """
    if find_spec("gguf") is None:
        return ["the package gguf is not installed; pip install '.[gguf]' in the checkout of vlmcompress"]
    if family not in REGISTRY:
        return [f"GGUF is not written for the family {family}, only for {', '.join(REGISTRY.names())}"]
    reasons = REGISTRY.get(family).FAMILY.check(Facts(config, {}))
    try:
        metadata(folder, config["text_config"]["vocab_size"], config)
    except UserError as error:
        reasons.append(str(error))
    return reasons


def reducer_problem(family: str, reducer: Mapping[str, Any]) -> str:
    """Why llama.cpp runs no reducer."""
    return (
        f"llama.cpp has no place for a method that selects or merges visual tokens, such as {reducer['method']}; "
        "make images smaller by --resize, or write compressed-tensors"
    )


def write_files(tree: Path, family: str, parts: Parts, progress: Callable[[int, int], None] | None = None) -> int:
    """Write the two files into the folder `tree`, which has the source's other files already; return bytes of tensors.

    Args:
        family: name of the model's family.
        parts: tensors by memory name, configuration and image settings.
        progress: called with bytes written and bytes in all.

    Raises:
        UserError: llama.cpp has no such family or runs it otherwise, it has no place for a tensor, or `gguf` is missing.
    """
    if reasons := source_problems(tree, family, parts.config):
        raise UserError(reasons[0])
    facts = Facts(parts.config, parts.image)
    known_as: Family = REGISTRY.get(family).FAMILY
    arch = known_as.arch(facts)
    planned = {
        MODEL: (arch, known_as.language, _planned(known_as.language, parts, facts, "language")),
        MMPROJ: ("clip", known_as.vision, _planned(known_as.vision, parts, facts, "vision")),
    }
    _check_complete(known_as, parts, [plan for *_, plans in planned.values() for plan in plans])
    total, done = sum(plan.nbytes for *_, plans in planned.values() for plan in plans), 0
    for name, (architecture, model, plans) in planned.items():
        keys = {key.replace("{arch}", arch): value(facts) for key, value in model.keys.items()}
        keys |= _general(name, plans, parts)
        if name == MODEL:
            keys |= metadata(tree, facts.config["text_config"]["vocab_size"], facts.config)
        for written in _write_file(tree / name, architecture, keys, plans):
            done += written
            if progress:
                progress(done, total)
    return total


@dataclass(frozen=True)
class _Plan:
    """A tensor to write: its name, ggml type, shape as in memory, and what makes its bytes `[rows, bytes]`."""

    name: str
    source: str
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        if self.kind in BYTES:
            return math.prod(self.shape) // 32 * BYTES[self.kind]
        return math.prod(self.shape) * (4 if self.kind == "F32" else 2)


def _planned(model: Model, parts: Parts, facts: Facts, side: str) -> list[_Plan]:
    """The tensors of a file, in the order of the rules."""
    plans = []
    for rule in model.rules:
        pattern = re.compile(re.escape(rule.source).replace(r"\{\}", r"(\d+)"))
        for name in parts.names:
            if matched := pattern.fullmatch(name):
                numbers = [int(text) for text in matched.groups()]
                target = rule.target.format(*(rule.number(facts, n) if rule.number else n for n in numbers))
                plans.append(_plan(rule, name, target, parts, facts, side))
    return plans


def _plan(rule: Rule, source: str, target: str, parts: Parts, facts: Facts, side: str) -> _Plan:
    part, of = rule.part
    module = source.removesuffix(".weight")
    heads = rule.heads(facts) if rule.heads else 1

    def rows(matrix: Tensor) -> Tensor:
        chosen = matrix.chunk(of)[part]
        if rule.heads:  # halves of a head, one after the other -> neighbours
            order = torch.arange(len(chosen)).view(heads, 2, -1).transpose(1, 2).reshape(-1)
            chosen = chosen[order]
        return chosen

    if module in parts.quantized and source.endswith(".weight"):
        qt, scheme, _ = parts.quantized[module]
        layer = (qt.q.shape[0] // of, qt.q.shape[1])
        return _Plan(target, source, storage(scheme), layer, lambda: rows(pack(parts.quantized[module][0])))
    spec = parts.specs[source]

    def changed(value: Tensor) -> Tensor:
        return rule.change(value, facts) if rule.change else value

    shape = changed(torch.empty((spec.shape[0] // of, *spec.shape[1:]), device="meta")).shape
    kind = _float_type(target, shape, spec.dtype, side)

    def make() -> Tensor:
        value = changed(rows(parts.read(source)))
        return _as_type(value.float() + rule.add if rule.add else value, kind, source)

    return _Plan(target, source, kind, tuple(shape), make)


def _float_type(target: str, shape: Sequence[int], stored: str, side: str) -> str:
    """The ggml type of a tensor that is not quantized."""
    if len(shape) < 2 or "position_embd" in target or stored == "F32":
        return "F32"
    return "F16" if side == "vision" else stored


def _as_type(value: Tensor, kind: str, source: str) -> Tensor:
    dtype = DTYPES[kind]
    rounded = value.to(dtype).contiguous()
    if dtype == torch.float16 and not rounded.isfinite().all():
        raise UserError(
            f"{source} has values that no 16-bit float of GGUF's F16 holds; convert the source to float32 first"
        )
    return rounded


def _check_complete(family: Family, parts: Parts, plans: list[_Plan]) -> None:
    """Raise UserError for a tensor that has no place in the files."""
    taken = {plan.source for plan in plans}
    for name in parts.names:
        if name not in taken and not name.startswith(family.unused or ("\0",)):
            raise UserError(
                f"llama.cpp has no place for the tensor {name} in this family; it cannot be written to GGUF"
            )


def _general(name: str, plans: list[_Plan], parts: Parts) -> dict[str, Any]:
    """The metadata that every file has."""
    sizes: dict[str, int] = {}
    for plan in plans:
        sizes[plan.kind] = sizes.get(plan.kind, 0) + math.prod(plan.shape)
    return {
        "general.type": "model" if name == MODEL else "mmproj",
        "general.name": parts.title,
        "general.quantized_by": "vlmcompress",
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES[max(sizes, key=lambda kind: sizes[kind])],
    }


def _write_file(path: Path, architecture: str, keys: Mapping[str, Any], plans: list[_Plan]) -> Iterator[int]:
    """Write a file tensor by tensor and yield the bytes of each."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is not None:
            _add(writer, key, value)
    for plan in plans:
        kind = gguf.GGMLQuantizationType[plan.kind]
        writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for plan in plans:
            try:
                value = plan.make()
            except UserError as error:
                raise UserError(f"{plan.source}: {error}") from error
            writer.write_tensor_data(value.contiguous().view(torch.uint8).numpy())
            yield plan.nbytes
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Add one metadata entry under the type that llama.cpp reads: unsigned for ints, float32 for floats."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
