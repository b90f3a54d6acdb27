"""The type of a checkpoint's floating tensors: one answer for loading a model, for the scales of its layers, for writing it.

A quantized checkpoint needs it: transformers 5.17 casts plain ones to one type as it loads them, but of a quantized one only
the tensors whose names it does not change (`convert_and_load_state_dict_in_model` in `core_model_loading.py`), so that a layer
in bfloat16 after a norm in float32 ends in an error. vLLM casts everything that it loads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from vlmcompress.models._spec import ModelSpec
from vlmcompress.utils.tensor_files import DTYPES, FLOATS, Spec

Choice = Literal["auto", "bfloat16", "float16", "float32"]
"""What a recipe asks for; `auto`: see `FloatType.of`."""
_KEYS = ("dtype", "torch_dtype")
_CODES = {str(DTYPES[code]).removeprefix("torch."): code for code in FLOATS}
_CAST = (*FLOATS, "F64")


@dataclass(frozen=True)
class FloatType:
    """The type in which a model is loaded, and its floating tensors and the scales of its layers are written.

    Attributes:
        name: its name in torch.
        float32: patterns of the names of parameters that stay in float32 where they are stored so.
    """

    name: str
    float32: tuple[str, ...] = ()

    @staticmethod
    def of(
        config: Mapping[str, Any],
        stored: Iterable[Spec],
        choice: Choice = "auto",
        spec: ModelSpec | None = None,
        model: PreTrainedModel | None = None,
    ) -> FloatType:
        """Decide the type.

        Args:
            config: content of config.json.
            stored: type and shape of the stored tensors.
            choice: a type that is asked for. `auto`: the one that config.json says, as in transformers, or else that of most
                weights; of most weights, too, where config.json says float32 and there is no matrix in it.
            spec, model: the family, and the model, whose parameters stay in float32; None: none does.
        """
        name = choice if choice != "auto" else _decided(config, list(stored))
        patterns = list(spec.float32) if spec else []
        if model is not None:  # as of `_get_dtype_plan` in `modeling_utils.py`
            kept = [model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules if name == "float16" else None]
            patterns += [str(part) for parts in kept for part in parts or ()]
        return FloatType(name, tuple(sorted(patterns)))

    @property
    def dtype(self) -> torch.dtype:
        """The type."""
        return DTYPES[_CODES[self.name]]

    def spec(self, name: str, stored: Spec) -> Spec:
        """Type and shape in which a tensor is written. `name`: of the parameter, in memory; `stored`: as the source has it."""
        stays = stored.dtype == "F32" and any(
            re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in self.float32
        )
        return stored if stays or stored.dtype not in _CAST else Spec(_CODES[self.name], stored.shape)

    def config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The content of config.json with this type, in its parts, too, where these say one."""
        changed = {
            key: {**part, **self._said(part)} if isinstance(part, Mapping) else part for key, part in content.items()
        }
        return changed | (self._said(content) or {"dtype": self.name})

    def _said(self, content: Mapping[str, Any]) -> dict[str, str]:
        """This type under the keys by which a config or a part of it says a type."""
        return {key: self.name for key in _KEYS if _name(content.get(key))}


def _decided(config: Mapping[str, Any], stored: list[Spec]) -> str:
    """The type that config.json or else most weights say."""
    text = config.get("text_config")
    sources = [config, text if isinstance(text, Mapping) else {}]
    said = next((name for part in sources for key in _KEYS if (name := _name(part.get(key)))), None)
    sizes = Counter[str]()
    for spec in stored:
        sizes[spec.dtype] += spec.nbytes if spec.dtype in FLOATS else 0
    most = next((name for name, code in _CODES.items() if sizes and code == max(sizes, key=sizes.__getitem__)), None)
    matrices = any(spec.dtype == "F32" and len(spec.shape) > 1 for spec in stored)
    if said and not (said == "float32" and most and not matrices):
        return said
    return most or said or "bfloat16"


def _name(value: Any) -> str | None:
    """The name of a type that a config gives, if it is one of those of weights."""
    name = str(value).removeprefix("torch.")
    return name if name in _CODES else None
