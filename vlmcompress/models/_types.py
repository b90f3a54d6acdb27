"""The dtype of a checkpoint's floating tensors: one decision for loading a model, for the scales of its layers, and for
writing.

Quantized checkpoints need this: transformers 5.17 casts plain checkpoints to one dtype at load, but in quantized ones only the
tensors that it does not rename (`convert_and_load_state_dict_in_model` in `core_model_loading.py`), so that a bfloat16 layer
after a float32 norm raises an error. vLLM casts everything that it loads.
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
from vlmcompress.utils.tensor_files import DTYPES
from vlmcompress.utils.tensor_headers import FLOATS, Spec

Choice = Literal["auto", "bfloat16", "float16", "float32"]
"""Values of a recipe's `dtype`; `auto`: see `FloatType.of`."""
_KEYS = ("dtype", "torch_dtype")
_CODES = {str(DTYPES[code]).removeprefix("torch."): code for code in FLOATS}
_CAST = (*FLOATS, "F64")


@dataclass(frozen=True)
class FloatType:
    """The dtype in which a model is loaded, and in which its floating tensors and the scales of its layers are written.

    Attributes:
        name: its name in torch.
        float32: patterns of names of parameters that stay in float32 if they are stored in it.
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
            choice: the requested dtype. `auto`: the dtype in config.json, as in transformers; or that of most weights if
                config.json has none, or says float32 while no matrix is stored in it.
            spec, model: the family and the model, which determine parameters that stay in float32; None: none do.
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
        """Type and shape in which a tensor is written. `name`: memory name of the parameter; `stored`: its spec in the
        source."""
        stays = stored.dtype == "F32" and any(
            re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in self.float32
        )
        return stored if stays or stored.dtype not in _CAST else Spec(_CODES[self.name], stored.shape)

    def config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """The content of config.json with this dtype, also in sub-configs that have one."""
        changed = {
            key: {**part, **self._said(part)} if isinstance(part, Mapping) else part for key, part in content.items()
        }
        return changed | (self._said(content) or {"dtype": self.name})

    def _said(self, content: Mapping[str, Any]) -> dict[str, str]:
        """This dtype under the dtype keys of a config or sub-config."""
        return {key: self.name for key in _KEYS if _name(content.get(key))}


def _decided(config: Mapping[str, Any], stored: list[Spec]) -> str:
    """The dtype of config.json or, without one, of most weights."""
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
    """The name of a config's dtype, if it is a floating dtype of weights."""
    name = str(value).removeprefix("torch.")
    return name if name in _CODES else None
