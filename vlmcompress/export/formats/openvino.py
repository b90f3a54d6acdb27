"""OpenVINO's graphs, as `VLMPipeline` of OpenVINO GenAI loads them: decoder, word embeddings, tower, tokenizer.

| scheme | constants | decompressed as |
|---|---|---|
| symmetric 4 or 8 bits | i4, i8 | code * scale |
| asymmetric 4 or 8 bits | u4, u8 | (code - zero point) * scale |
| not quantized | bf16, f16, f32 | the source's type |

Codes and zero points are kept; scales are float16, and quantizers solve for such scales (`SCALES`). OpenVINO rounds activations
to 8 bits on processors with instructions for that, unless DYNAMIC_QUANTIZATION_GROUP_SIZE is 0.
The graphs are traced from transformers (`export.openvino`). The source's configuration, tokenizer and processor are copied next
to them; `preprocessor_config.json` is written even if the source has its settings in another file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from vlmcompress.export.formats._base import EngineFiles, Parts
from vlmcompress.export.openvino import REGISTRY, OpenvinoFamily, Packed, write_openvino
from vlmcompress.export.openvino import token_ids as _token_ids
from vlmcompress.export.packing import pack_bits, to_float16
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

LANGUAGE = "openvino_language_model.xml"
PROCESSOR = "processor_config.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.language_model.embed_tokens.weight"


def _bytes(count: int, bits: int) -> Spec:
    return Spec("U8", ((count * bits + 7) // 8,))


class _Parameters:
    """The tensors of a checkpoint as a `ParameterSource`. `sizes`: memory name -> bytes; `used`: names that were read."""

    def __init__(self, parts: Parts, progress: Callable[[int, int], None] | None):
        self.parts, self.progress = parts, progress
        self.used: set[str] = set()
        self.sizes = {name: spec.nbytes for name, spec in parts.specs.items()}
        for layer, (scheme, (rows, columns)) in parts.layers.items():
            stored = FORMAT.specs(scheme, rows, columns, "F16").values()
            self.sizes[f"{layer}.weight"] = sum(spec.nbytes for spec in stored)

    def read(self, name: str) -> Tensor:
        """The values of an unquantized parameter."""
        return self.parts.read(self._stored(name))

    def packed(self, name: str) -> Packed | None:
        """A quantized parameter; None if it is not quantized."""
        layer = name.removesuffix(".weight")
        if layer not in self.parts.quantized:
            return None
        weight, scheme, _ = self.parts.quantized[self._stored(name).removesuffix(".weight")]
        rows, columns = weight.q.shape
        try:
            return Packed(FORMAT.tensors(weight, scheme), scheme.weights, (rows, columns))
        except UserError as error:
            raise UserError(f"{layer}: {error}") from error

    def _stored(self, name: str) -> str:
        """The name under which a parameter is stored; marks it as used."""
        stored = EMBEDDINGS if name == HEAD and name not in self.sizes else name  # tied weights
        self.used.add(stored)
        if self.progress:
            self.progress(sum(self.sizes[name] for name in self.used), sum(self.sizes.values()))
        return stored


def _change_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Set entries in a JSON file, which is created if missing."""
    content = {**_read_json(path), **entries}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


class OpenVino(EngineFiles):
    """Graphs of packed integers."""

    METHOD = "openvino"
    SCALES = torch.float16
    ENGINE = "openvino"
    TITLE = "OpenVINO"
    PACKAGES, EXTRA = ("openvino", "openvino_tokenizers", "accelerate"), "openvino"
    FAMILIES = REGISTRY

    @override
    def storage(self, scheme: Scheme) -> str:
        weights = scheme.weights
        if scheme.activations is not None:
            raise UserError(
                "OpenVINO's files have no settings of activations, it chooses their rounding; use a weight-only scheme"
            )
        if weights.kind != "int" or weights.bits not in (4, 8):
            raise UserError(
                "OpenVINO's files hold integer weights of 4 or 8 bits only; use rtn, awq, gptq, gptq-plus or w8a16"
            )
        return f"{'i' if weights.symmetric else 'u'}{weights.bits}"

    @override
    def specs(self, scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
        self.storage(scheme)
        fmt = scheme.weights
        scales = 1 if fmt.group == 0 else rows * fmt.n_groups(columns)
        tensors = {"weight": _bytes(rows * columns, fmt.bits), "weight_scale": Spec("F16", (scales,))}
        return tensors | ({} if fmt.symmetric else {"weight_zero_point": _bytes(scales, fmt.bits)})

    @override
    def tensors(self, qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        """Codes and zero points as bytes (4-bit codes in pairs, the first in the lower half), and scales."""
        self.storage(scheme)
        fmt = qt.format
        packed = {"weight": pack_bits(qt.q, fmt.bits, signed=fmt.symmetric)}
        packed["weight_scale"] = to_float16(qt.scale, "OpenVINO").flatten()
        if qt.zero_point is not None:
            packed["weight_zero_point"] = pack_bits(qt.zero_point, fmt.bits)
        return packed

    @override
    def family_problems(self, folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
        """OpenVINO GenAI lacks a part of the family, or cuts images differently."""
        openvino_family: OpenvinoFamily = REGISTRY.get(family)
        # The image processor's settings in the files, without transformers' defaults.
        images = _read_json(folder / "preprocessor_config.json") | _read_json(folder / PROCESSOR).get(
            "image_processor", {}
        )
        return openvino_family.problems(config) + [
            f"OpenVINO GenAI cuts images by {name} = {value}, the processor by {images[name]}"
            for name, value in openvino_family.fixed_images.items()
            if images.get(name, value) != value
        ]

    @override
    def reducer_problem(self, family: str, reducer: Mapping[str, Any]) -> str | None:
        return (
            f"OpenVINO GenAI does not run the reducer {reducer['method']}; make images smaller with --reduce resize:SHARE, "
            "or write compressed-tensors"
        )

    @override
    def token_ids(self, folder: Path, config: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]] | None:
        return None if self.missing else _token_ids(folder, texts)

    @override
    def write_files(
        self, tree: Path, family: str, parts: Parts, progress: Callable[[int, int], None] | None = None
    ) -> int:
        openvino_family: OpenvinoFamily = REGISTRY.get(family)
        source = _Parameters(parts, progress)
        write_openvino(tree, family, source)
        # with transformers' defaults, which the pipeline does not have
        towers = {part: parts.config[part] for part in ("text_config", "vision_config")}
        _change_json(tree / "config.json", {**towers, **openvino_family.settings(source.read)})
        left = [
            name
            for name in source.sizes
            if name not in source.used and not name.startswith(openvino_family.unused or "\0")
        ]
        if left:
            raise UserError(f"OpenVINO has no name for the tensor {left[0]} in this family; write another format")
        images = openvino_family.images(parts.image)
        _change_json(tree / "preprocessor_config.json", images)
        if "image_processor" in _read_json(tree / PROCESSOR):  # which the pipeline may prefer
            _change_json(tree / PROCESSOR, {"image_processor": images})
        return sum(path.stat().st_size for path in tree.glob("openvino_*_model.bin"))


FORMAT = OpenVino()
