"""The tensors of a GGUF file: a family's rules applied to a checkpoint's parameters."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcompress.export.formats import Parts
from vlmcompress.export.gguf import GgufFamily, GgufFile, ModelFacts, TensorRule
from vlmcompress.export.gguf.blocks import BLOCK, BYTES, block_size, block_type, in_order, matrix_scale, pack
from vlmcompress.numerics import Format, round_to_nearest
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_files import DTYPES, all_finite, read_tensor
from vlmcompress.utils.tensor_headers import Entry

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per value of unquantized types."""
ALWAYS_F32 = ("position_embd", "class_embd", "shortconv.conv", "ssm_conv1d", "ffn_gate_inp")
"""Name parts of tensors that ggml only supports in float32."""
NEVER_Q8_0 = ("patch_embd", "patch_merger", "mm.input_projection")
"""Name parts of the tower's matrices that are not rounded to 8 bits: `llama-quantize` leaves the first two as they are
(llama.cpp, `src/llama-quant.cpp`), and Gemma 3's graph transposes the third, which ggml can't do with blocks."""


@dataclass(frozen=True)
class TensorWrite:
    """A tensor to write.

    Attributes:
        name: in the GGUF file.
        sources: memory names of its parameters.
        kind: its ggml type.
        shape: as in memory.
        make: yields its bytes or numbers, a piece at a time; an entry of a file: those that stand there.
    """

    name: str
    sources: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor | Entry]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = math.prod(self.shape)
        return count * FLOATS[self.kind] if self.kind in FLOATS else count // block_size(self.kind) * BYTES[self.kind]


def tensors_to_write(model: GgufFile, parts: Parts, facts: ModelFacts, side: str) -> list[TensorWrite]:
    """The tensors of a file, by block and then in the order of the rules; `side`: "language" or "vision"."""
    tensors, scales = [], dict[str, Tensor]()
    for rule in model.rules:
        pattern = re.compile(re.escape(rule.source).replace(r"\{\}", r"(\d+)"))
        experts: dict[str, dict[int, str]] = {}  # target -> number of the expert -> parameter
        for name in parts.names:
            if matched := pattern.fullmatch(name):
                numbers = [int(text) for text in matched.groups()]
                expert = numbers.pop() if rule.stacked else 0
                numbers = [rule.number(facts, n) for n in numbers or [0]] if rule.number else numbers
                target = rule.target.format(*numbers)
                experts.setdefault(target, {})[expert] = name
        for target, names in experts.items():
            sources = [names[number] for number in sorted(names)]
            each = [_plan(rule, source, target, parts, facts, side, scales) for source in sources]
            tensors.append(_stacked(each) if rule.stacked else each[0])
            if each[0].kind == "NVFP4":  # the numbers of the matrices, one for each source, known once these are packed
                name, count = target.removesuffix("weight") + "scale", (len(sources),)
                tensors.append(TensorWrite(name, (), "F32", count, functools.partial(map, scales.pop, sources)))
    named = dict[str, TensorWrite]()
    for tensor in tensors:
        named[tensor.name] = _product(named[tensor.name], tensor) if tensor.name in named else tensor
    # layers of a group are rounded together, and held until they are written
    return sorted(
        named.values(), key=lambda tensor: int(block[1]) if (block := re.search(r"\.(\d+)\.", tensor.name)) else -1
    )


def read_by_engine(family: GgufFamily, parts: Parts) -> Parts:
    """A checkpoint without the parameters that llama.cpp does not read."""
    text = parts.config["text_config"]
    unused = tuple(prefix.format(blocks=text["num_hidden_layers"]) for prefix in family.unused)
    return replace(parts, specs={name: spec for name, spec in parts.specs.items() if not name.startswith(unused)})


def require_complete(parts: Parts, tensors: list[TensorWrite]) -> None:
    """Raise `UserError` for a parameter that no rule covers."""
    used = {source for tensor in tensors for source in tensor.sources}
    for name in parts.names:
        if name not in used:
            raise UserError(f"llama.cpp has no tensor for {name} in this family; it cannot be written to GGUF")


def _product(*scales: TensorWrite) -> TensorWrite:
    """The product of scales of the same matrices: those of NVFP4 and the model's own."""

    def numbers(scale: TensorWrite) -> Tensor:
        return torch.cat([read_tensor(piece) if isinstance(piece, Entry) else piece for piece in scale.make()])

    sources = tuple(source for scale in scales for source in scale.sources)
    return replace(scales[0], sources=sources, make=lambda: iter([torch.stack([*map(numbers, scales)]).prod(0)]))


def _stacked(tensors: list[TensorWrite]) -> TensorWrite:
    """The tensor of all experts, concatenated."""
    first = tensors[0]
    for tensor in tensors:
        if (tensor.kind, tensor.shape) != (first.kind, first.shape):
            raise UserError(
                f"{tensor.sources[0]} is {tensor.kind}, {first.sources[0]} {first.kind}: GGUF has one type for all experts of "
                "a block; give them the same width"
            )
    return TensorWrite(
        first.name,
        tuple(source for tensor in tensors for source in tensor.sources),
        first.kind,
        (len(tensors), *first.shape),
        lambda: itertools.chain.from_iterable(tensor.make() for tensor in tensors),
    )


def _plan(
    rule: TensorRule,
    source: str,
    target: str,
    parts: Parts,
    facts: ModelFacts,
    side: str,
    scales: MutableMapping[str, Tensor],
) -> TensorWrite:
    """The tensor of one parameter; once it is made, `scales` has the number of its matrix, if its type has one."""
    part, of = rule.part
    rows, columns = (list(order(facts)) if order else None for order in (rule.rows, rule.columns))

    def chosen(matrix: Tensor) -> Tensor:
        matrix = matrix.chunk(of)[part] if of > 1 else matrix
        return matrix if rows is None else matrix[rows]

    module = source.removesuffix(".weight")
    if module in parts.layers and source.endswith(".weight"):
        scheme, (height, width) = parts.layers[module]
        kind = block_type(scheme.weights)

        def packed() -> Iterator[Tensor]:
            weight = parts.quantized[module][0]
            if kind == "NVFP4":
                scales[source] = matrix_scale(weight)
            yield in_order(chosen(pack(weight)), columns, kind)

        return TensorWrite(target, (source,), kind, (height // of, width), packed)

    def changed(value: Tensor) -> Tensor:
        value = value if columns is None else value[:, columns]
        return rule.change(value, facts) if rule.change else value

    spec = parts.specs[source]
    # The shape after a rule's change is found with a meta tensor.
    shape = tuple(changed(chosen(torch.empty(spec.shape, device="meta"))).shape)
    kind = spec.dtype
    if side == "vision":
        kind = parts.mmproj or ("F32" if kind == "F32" else "Q8_0" if parts.layers else "F16")
        matrix = len(shape) == 2 and target.endswith(".weight") and not any(part in target for part in NEVER_Q8_0)
        if kind == "Q8_0" and (not matrix or shape[1] % BLOCK):
            kind = "F16"
    if len(shape) < 2 or any(part in target for part in ALWAYS_F32):
        kind = "F32"

    def make() -> Iterator[Tensor | Entry]:
        changes = kind != spec.dtype or kind == "F16" or of > 1 or rows or columns or rule.change or rule.add
        if not changes and source in parts.entries:
            yield parts.entries[source]
            return
        value = changed(chosen(parts.read(source)))
        value = value.float() + rule.add if rule.add else value
        if kind == "Q8_0":
            yield pack(round_to_nearest(value, Format("int", 8, BLOCK), scale_dtype=torch.float16))
            return
        rounded = value.to(DTYPES[kind]).contiguous()
        if kind == "F16" and not all_finite(rounded):
            raise UserError(
                f"{source} has values that no 16-bit float of GGUF's F16 holds; convert the source to float32 first"
            )
        yield rounded

    return TensorWrite(target, (source,), kind, shape, make)
