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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.export.formats import Parts
from vlmcompress.export.gguf import REGISTRY, GgufFamily, ModelFacts, tokens
from vlmcompress.export.gguf.blocks import block_type, pack, row_bytes
from vlmcompress.export.gguf.tensors import TensorWrite, require_complete, tensors_to_write
from vlmcompress.export.gguf.tokenizer import added_tokens, metadata
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Entry, Spec

FORMAT = "gguf"
KV_SCALES = None
SCALES = torch.float16
ENGINE = "llamacpp"
TITLE = "llama.cpp"
GROUP_SIZE = 32  # larger groups repeat their scale and save nothing
MODEL, MMPROJ = "model.gguf", "mmproj.gguf"
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32, "NVFP4": 39}
"""llama.cpp's code for the type of most weights in a file (`general.file_type`)."""


def storage(scheme: Scheme) -> str:
    """The ggml type of a scheme's weights. Raises `UserError` for an unsupported scheme."""
    if scheme.activations is not None:
        raise UserError(
            "GGUF has no settings of activations, llama.cpp chooses their rounding; use a weight-only scheme"
        )
    return block_type(scheme.weights)


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    return ["GGUF holds no scales of an FP8 KV cache; leave out kv_cache"] if layers.kv_cache else []


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """Type and shape of a layer's bytes. Raises ValueError if its rows are not whole blocks."""
    storage(scheme)
    return {"weight": Spec("U8", (rows, row_bytes(scheme.weights, columns)))}


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The blocks of one linear layer."""
    storage(scheme)
    return {"weight": pack(qt)}


def configs(layers: Layers) -> dict[str, dict]:
    """The block of config.json, which marks the weights as stored elsewhere and has the number format of most layers."""
    block: dict[str, Any] = {"quant_method": FORMAT, "files": [MODEL, MMPROJ]}
    if layers.schemes:
        weights = layers.schemes[0].weights
        block |= {"bits": weights.bits, "group_size": weights.group, "type": storage(layers.schemes[0])}
        block["modules_to_not_convert"] = [kept.names[0] for kept in layers.kept]
    return {"config.json": block}


def source_problems(folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
    """Reasons why a model cannot be written: llama.cpp has no such family or computes it differently, or the tokenizer differs.

    Args:
        folder: the source's folder, for its tokenizer.
        config: transformers' configuration with all defaults.
    """
    if find_spec("gguf") is None:
        return ["the package gguf is not installed; pip install '.[gguf]' in the checkout of vlmcompress"]
    if family not in REGISTRY:
        return [f"GGUF does not support the family {family}, only {', '.join(REGISTRY.names())}; write another format"]
    reasons = REGISTRY.get(family).FAMILY.problems(ModelFacts(config, {}))
    try:
        metadata(folder, config["text_config"]["vocab_size"], config)
    except UserError as error:
        reasons.append(str(error))
    return reasons


def reducer_problem(family: str, reducer: Mapping[str, Any]) -> str:
    """The message that llama.cpp runs no reducer."""
    return (
        f"llama.cpp does not support methods that select or merge visual tokens, such as {reducer['method']}; "
        "make images smaller with --reduce resize:SHARE, or write compressed-tensors"
    )


def token_ids(folder: Path, config: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]] | None:
    """llama.cpp's tokens of each text, from the file in a folder or as it would be written; None: it is not installed.

    Raises:
        UserError: llama.cpp refuses the tokenizer, or it cannot be written.
    """
    if find_spec("gguf") is None:
        return None
    if (folder / MODEL).is_file():
        import gguf

        fields = gguf.GGUFReader(folder / MODEL).fields.items()
        keys = {name: field.contents() for name, field in fields if name.startswith("tokenizer.")}
    else:
        keys = metadata(folder, config["text_config"]["vocab_size"], config)
    return tokens.gguf_token_ids(keys, texts, _add)


def write_files(tree: Path, family: str, parts: Parts, progress: Callable[[int, int], None] | None = None) -> int:
    """Write the two files to the folder `tree`, which already has the source's other files; return bytes of tensors.

    Args:
        family: name of the model's family.
        parts: tensors by memory name, configuration and image settings.
        progress: called with (bytes written, total bytes).

    Raises:
        UserError: llama.cpp has no such family, computes it differently or has no name for a tensor, or `gguf` is missing.
    """
    if reasons := source_problems(tree, family, parts.config):
        raise UserError(reasons[0])
    facts = ModelFacts(parts.config, parts.image, added_tokens(tree))
    gguf_family: GgufFamily = REGISTRY.get(family).FAMILY
    arch = gguf_family.arch(facts)
    files = {
        MODEL: (arch, gguf_family.language, tensors_to_write(gguf_family.language, parts, facts, "language")),
        MMPROJ: ("clip", gguf_family.vision, tensors_to_write(gguf_family.vision, parts, facts, "vision")),
    }
    tensors = [plan for *_, plans in files.values() for plan in plans]
    require_complete(gguf_family, parts, tensors)
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
            keys |= metadata(tree, facts.config["text_config"]["vocab_size"], facts.config)
        for written in _write_file(tree / name, architecture, keys, plans):
            done += written
            if progress:
                progress(done, total)
    return total


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
