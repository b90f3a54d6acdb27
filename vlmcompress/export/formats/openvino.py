"""OpenVINO's graphs, as `VLMPipeline` of OpenVINO GenAI loads them: decoder, word embeddings, tower, tokenizer.

| scheme | constants | decompressed as |
|---|---|---|
| symmetric 4 or 8 bits | i4, i8 | code * scale |
| asymmetric 4 or 8 bits | u4, u8 | (code - zero point) * scale |
| left as they are | bf16, f16, f32 | the source's type |

Codes and zero points are ours, scales are float16, so quantizers solve for such ones (`SCALES`). OpenVINO rounds activations to
8 bits where the processor has instructions for that, unless DYNAMIC_QUANTIZATION_GROUP_SIZE is 0.
The graphs are traced from transformers (`export.openvino`). Next to them stand the source's configuration, tokenizer and
processor. `preprocessor_config.json` is written even where the source has its settings elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress.export.formats import Parts
from vlmcompress.export.openvino import REGISTRY, OpenvinoFamily, Packed, pruning, write_openvino
from vlmcompress.export.openvino import token_ids as _token_ids
from vlmcompress.export.packing import pack_bits, to_float16
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import QTensor, Scheme
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_files import Spec

FORMAT = "openvino"
KV_SCALES = None
SCALES = torch.float16
ENGINE = "openvino"
TITLE = "OpenVINO"
PACKAGES = ("openvino", "openvino_tokenizers", "accelerate")
LANGUAGE = "openvino_language_model.xml"
PROCESSOR = "processor_config.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.language_model.embed_tokens.weight"


def storage(scheme: Scheme) -> str:
    """OpenVINO's type of a scheme's weights. Raises UserError where it has none."""
    weights = scheme.weights
    if scheme.activations is not None:
        raise UserError(
            "OpenVINO's files say nothing of activations, it rounds them as it likes; use a weight-only scheme"
        )
    if weights.kind != "int" or weights.bits not in (4, 8):
        raise UserError(
            "OpenVINO is written with integer weights of 4 or 8 bits; use rtn, awq, gptq, gptq-plus, qronos or w8a16"
        )
    return f"{'i' if weights.symmetric else 'u'}{weights.bits}"


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    return ["OpenVINO's files hold no scales of an FP8 KV cache; leave out kv_cache"] if layers.kv_cache else []


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """The bytes of a layer's codes, scales and zero points. Raises ValueError where the group size does not divide."""
    storage(scheme)
    fmt = scheme.weights
    scales = 1 if fmt.group == 0 else rows * fmt.n_groups(columns)
    tensors = {"weight": _bytes(rows * columns, fmt.bits), "weight_scale": Spec("F16", (scales,))}
    return tensors | ({} if fmt.symmetric else {"weight_zero_point": _bytes(scales, fmt.bits)})


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The bytes of one linear layer's codes and zero points, two of 4 bits in each, the first in its lower half; and scales."""
    storage(scheme)
    fmt = qt.format
    packed = {"weight": pack_bits(qt.q, fmt.bits, signed=fmt.symmetric)}
    packed["weight_scale"] = to_float16(qt.scale, "OpenVINO").flatten()
    if qt.zero_point is not None:
        packed["weight_zero_point"] = pack_bits(qt.zero_point, fmt.bits)
    return packed


def _bytes(count: int, bits: int) -> Spec:
    return Spec("U8", ((count * bits + 7) // 8,))


def configs(layers: Layers) -> dict[str, dict]:
    """The block of config.json, which says that the weights are elsewhere, and the numbers of most layers."""
    block: dict[str, Any] = {"quant_method": FORMAT}
    if layers.schemes:
        weights = layers.schemes[0].weights
        block |= {"bits": weights.bits, "group_size": weights.group, "type": storage(layers.schemes[0])}
        block["modules_to_not_convert"] = [kept.names[0] for kept in layers.kept]
    return {"config.json": block}


def source_problems(folder: Path, family: str, config: Mapping[str, Any]) -> list[str]:
    """Reasons why a model cannot be written: a package is missing, or OpenVINO GenAI lacks its family or a part of it.

    Args:
        folder: the source's.
        config: transformers' configuration with all defaults.
    """
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        return [f"the package {missing[0]} is not installed; pip install '.[openvino]' in the checkout of vlmcompress"]
    if family not in REGISTRY:
        return [f"OpenVINO is not written for the family {family}, only for {', '.join(REGISTRY.names())}"]
    openvino_family = _family(family)
    # What the files say of the image processor, without transformers' defaults.
    images = _read_json(folder / "preprocessor_config.json") | _read_json(folder / PROCESSOR).get("image_processor", {})
    return openvino_family.check(config) + [
        f"OpenVINO GenAI cuts images by {name} = {value}, the processor by {images[name]}"
        for name, value in openvino_family.fixed_images.items()
        if images.get(name, value) != value
    ]


def reducer_problem(family: str, reducer: Mapping[str, Any]) -> str | None:
    """Why OpenVINO GenAI does not run a reducer; None where it does."""
    try:
        pruning(reducer, family)
    except UserError as error:
        return str(error)
    return None


def token_ids(folder: Path, config: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]] | None:
    """OpenVINO's tokens of each text, by the tokenizer that was written into a folder, or that would be; None: it is not
    installed."""
    installed = all(find_spec(package) for package in PACKAGES)
    return _token_ids(folder, texts) if installed else None


def write_files(tree: Path, family: str, parts: Parts, progress: Callable[[int, int], None] | None = None) -> int:
    """Write the graphs into the folder `tree`, which has the source's other files already; return bytes of weights.

    Args:
        family: name of the model's family.
        parts: tensors by memory name, configuration and image settings.
        progress: called with bytes of weights that were packed and bytes in all.

    Raises:
        UserError: a package is missing, OpenVINO GenAI has no such family, or the format cannot hold a layer.
    """
    if reasons := source_problems(tree, family, parts.config):
        raise UserError(reasons[0])
    openvino_family, source = _family(family), _Parameters(parts, progress)
    write_openvino(tree, family, source)
    # with transformers' defaults, which the pipeline does not know
    towers = {part: parts.config[part] for part in ("text_config", "vision_config")}
    _change_json(tree / "config.json", {**towers, **openvino_family.settings(source.read)})
    left = [
        name for name in source.sizes if name not in source.used and not name.startswith(openvino_family.unused or "\0")
    ]
    if left:
        raise UserError(f"OpenVINO has no place for the tensor {left[0]} in this family; it cannot be written")
    images = openvino_family.images(parts.image)
    _change_json(tree / "preprocessor_config.json", images)
    if "image_processor" in _read_json(tree / PROCESSOR):  # which the pipeline may prefer
        _change_json(tree / PROCESSOR, {"image_processor": images})
    if reduce := parts.config.get("vlmcompress", {}).get("reduce"):
        _change_json(tree / "generation_config.json", pruning(reduce))
    return sum(path.stat().st_size for path in tree.glob("openvino_*_model.bin"))


class _Parameters:
    """The tensors of a checkpoint, a `Source`. `sizes`: bytes by memory name; `used`: names of those that were read."""

    def __init__(self, parts: Parts, progress: Callable[[int, int], None] | None):
        self.parts, self.progress = parts, progress
        self.used: set[str] = set()
        self.sizes = {name: spec.nbytes for name, spec in parts.specs.items()}
        for layer, (scheme, (rows, columns)) in parts.layers.items():
            stored = specs(scheme, rows, columns, "F16").values()
            self.sizes[f"{layer}.weight"] = sum(spec.nbytes for spec in stored)

    def read(self, name: str) -> Tensor:
        """A parameter that is not quantized."""
        return self.parts.read(self._stored(name))

    def packed(self, name: str) -> Packed | None:
        """A quantized parameter; None: it is not."""
        layer = name.removesuffix(".weight")
        if layer not in self.parts.quantized:
            return None
        weight, scheme, _ = self.parts.quantized[self._stored(name).removesuffix(".weight")]
        rows, columns = weight.q.shape
        try:
            return Packed(tensors(weight, scheme), scheme.weights, (rows, columns))
        except UserError as error:
            raise UserError(f"{layer}: {error}") from error

    def _stored(self, name: str) -> str:
        """The name under which a parameter is stored, which is used from now on."""
        stored = EMBEDDINGS if name == HEAD and name not in self.sizes else name  # which it is tied to
        self.used.add(stored)
        if self.progress:
            self.progress(sum(self.sizes[name] for name in self.used), sum(self.sizes.values()))
        return stored


def _change_json(path: Path, entries: Mapping[str, Any]) -> None:
    """Write entries into a JSON file, which need not be there."""
    content = {**_read_json(path), **entries}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _family(name: str) -> OpenvinoFamily:
    return REGISTRY.get(name).FAMILY
