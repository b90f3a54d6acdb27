"""GGUF, llama.cpp's format: `model.gguf` with the language model and `mmproj.gguf` with the tower and projector.

| scheme | ggml type | stored as |
|---|---|---|
| symmetric 4 bits, groups of 32 or a multiple, or per channel | Q4_0 | the same codes and scales, bit for bit |
| asymmetric 4 bits | Q4_1 | the same; the minimum is rounded to float16, at most 0.7% of a step |
| symmetric 8 bits | Q8_0 | the same codes and scales, bit for bit |
| NVFP4 without rounded inputs | NVFP4 | the same codes and scales, bit for bit |
| not quantized | BF16, F16, F32 | the source's type; norms and biases F32 |
| tower and projector | Q8_0 | rounded to nearest; F16 on demand and where llama.cpp needs floats; F32 for a float32 source |

Scales are float16, and quantizers solve for such scales (`SCALES`). Names and metadata are data (`vlmcompress.export.gguf`);
the package `gguf` writes the files. The source's configuration, tokenizer and processor are copied next to them.
Source: llama.cpp's converter, `conversion/base.py`, and `gguf` 0.19.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress import models
from vlmcompress.export.formats._base import EngineFiles, Parts
from vlmcompress.export.gguf import REGISTRY, GgufFamily, ModelFacts, tokens
from vlmcompress.export.gguf.blocks import block_type, pack, row_bytes
from vlmcompress.export.gguf.tensors import TensorWrite, read_by_engine, require_complete, tensors_to_write
from vlmcompress.export.gguf.tokenizer import added_tokens, metadata
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Entry, Spec

MODEL, MMPROJ = "model.gguf", "mmproj.gguf"
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32, "NVFP4": 39}
"""llama.cpp's code for the type of most weights in a file (`general.file_type`)."""


def _write_file(path: Path, architecture: str, keys: Mapping[str, Any], plans: list[TensorWrite]) -> Iterator[int]:
    """Write a file tensor by tensor, yielding the number of bytes of each."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        _add(writer, key, value)
    for plan in plans:
        # With `raw_dtype` the writer takes raw bytes, and computes offsets from `nbytes` before any tensor is in memory.
        kind = gguf.GGMLQuantizationType[plan.kind]
        writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        for plan in plans:
            start = end = writer.ggml_pad(end, writer.data_alignment)
            try:
                for piece in plan.make():
                    if isinstance(piece, Entry):
                        tensor_files.copy_at(piece, file.fileno(), end)
                        end += piece.spec.nbytes
                    else:
                        tensor_files.write_at(file.fileno(), tensor_files.to_bytes(piece), end)
                        end += piece.nbytes
            except UserError as error:
                raise UserError(f"{plan.name}: {error}") from error
            if end - start != plan.nbytes:
                raise ValueError(f"{plan.name}: planned as {plan.nbytes} bytes, made as {end - start}")
            yield plan.nbytes
        file.truncate(writer.ggml_pad(end, writer.data_alignment))


def _add(writer: Any, key: str, value: Any) -> None:
    """Add a metadata entry with the type that llama.cpp reads: unsigned for ints, float32 for floats; None is left out."""
    if value is None:
        return
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


def _tokenizer(folder: Path, family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a family's tokenizer, see `metadata`."""
    kind: GgufFamily = REGISTRY.get(family)
    return metadata(folder, config["text_config"]["vocab_size"], config, kind.pieces, kind.visible)


class Gguf(EngineFiles):
    """Two files; `block_type` names the type of a scheme."""

    METHOD = "gguf"
    SCALES = torch.float16
    ENGINE = "llamacpp"
    TITLE = "llama.cpp"
    PACKAGES, EXTRA, FAMILIES, FILES = ("gguf",), "gguf", REGISTRY, (MODEL, MMPROJ)
    GROUP_SIZE = 32  # larger groups repeat their scale and save nothing

    @override
    def storage(self, scheme: Scheme) -> str:
        if scheme.activations is not None:
            raise UserError(
                "GGUF has no settings of activations, llama.cpp chooses their rounding; use a weight-only scheme"
            )
        return block_type(scheme.weights)

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        self.storage(scheme)
        return {"weight": Spec("U8", (rows, row_bytes(scheme.weights, columns)))}

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        self.storage(scheme)
        return {"weight": pack(qt)}

    @override
    def family_problems(self, folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
        """llama.cpp computes the family differently, or the tokenizer differs."""
        reasons = REGISTRY.get(family).problems(ModelFacts(config, {}))
        try:
            _tokenizer(folder, family, config)
        except UserError as error:
            reasons.append(str(error))
        return reasons

    @override
    def reducer_problem(self, family: str, reducer: Mapping[str, Any]) -> str | None:
        return (
            f"llama.cpp does not support methods that select or merge visual tokens, such as {reducer['method']}; "
            "make images smaller with --reduce resize:SHARE, or write compressed-tensors"
        )

    @override
    def token_ids(self, folder: Path, config: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]] | None:
        if self.missing:
            return None
        if (folder / MODEL).is_file():
            import gguf

            fields = gguf.GGUFReader(folder / MODEL).fields.items()
            keys = {name: field.contents() for name, field in fields if name.startswith("tokenizer.")}
        else:
            keys = _tokenizer(folder, models.spec_for(dict(config)).family, config)
        return tokens.gguf_token_ids(keys, texts, _add)

    @override
    def write_files(
        self, tree: Path, family: str, parts: Parts, progress: Callable[[int, int], None] | None = None
    ) -> int:
        facts = ModelFacts(parts.config, parts.image, added_tokens(tree))
        gguf_family: GgufFamily = REGISTRY.get(family)
        parts = read_by_engine(gguf_family, parts)
        arch = gguf_family.arch(facts)
        files = {
            MODEL: (arch, gguf_family.language, tensors_to_write(gguf_family.language, parts, facts, "language")),
            MMPROJ: ("clip", gguf_family.vision, tensors_to_write(gguf_family.vision, parts, facts, "vision")),
        }
        tensors = [plan for *_, plans in files.values() for plan in plans]
        require_complete(parts, tensors)
        total, done = sum(plan.nbytes for plan in tensors), 0
        for name, (architecture, model, plans) in files.items():
            keys = {key.replace("{arch}", arch): value(facts) for key, value in model.keys.items()}
            sizes: dict[str, int] = {}
            for plan in plans:
                sizes[plan.kind] = sizes.get(plan.kind, 0) + math.prod(plan.shape)
            keys |= {
                "general.type": "model" if name == MODEL else "mmproj",
                "general.name": parts.title,
                "general.quantized_by": "vlmcompress",
                "general.quantization_version": 2,  # `GGML_QNT_VERSION`, without which llama.cpp refuses quantized tensors
                "general.file_type": FILE_TYPES[max(sizes, key=lambda kind: sizes[kind])],
            }
            if name == MODEL:
                keys |= _tokenizer(tree, family, facts.config)
            for written in _write_file(tree / name, architecture, keys, plans):
                done += written
                if progress:
                    progress(done, total)
        return total


FORMAT = Gguf()
