"""AutoGPTQ's format (v1): symmetric weights of 4 or 8 bits for vLLM, SGLang, LMDeploy, TensorRT-LLM's loaders, llama.cpp.

Tensors and config are described in `_gptq`. Zero points are stored less one, so that 0 cannot be told from 16: readers
disagree about what that means, and only symmetric weights are written, whose zero point is always 8 or 128.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vlmcompress.common.layer_names import Layers, Names
from vlmcompress.common.tensor_files import Spec
from vlmcompress.errors import UserError
from vlmcompress.exporters import _gptq
from vlmcompress.numerics import QTensor, Scheme

FORMAT = "gptq"
KV_SCALES = None
_OFFSET = 1


def storage(scheme: Scheme) -> str:
    """The name of the storage format of a scheme.

    Raises:
        UserError: the format cannot hold it.
    """
    weights = scheme.weights
    if scheme.activations is not None or weights.kind != "int" or weights.bits not in (4, 8) or weights.group == 0:
        raise UserError(
            "GPTQ files hold integer weights of 4 or 8 bits with 16-bit activations; write compressed-tensors"
        )
    if not weights.symmetric:
        raise UserError("GPTQ files of version 1 hold symmetric weights only; write gptq-v2, awq or compressed-tensors")
    return "gptq"


def problems(layers: Layers) -> list[str]:
    """Reasons why the format cannot hold these layers in one checkpoint; empty if it can."""
    return _gptq.problems(layers)


def shapes(scheme: Scheme, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Local names and shapes of a layer's tensors. Raises ValueError where sides do not fill whole words, or groups."""
    storage(scheme)
    return _gptq.shapes(scheme, rows, columns)


def specs(scheme: Scheme, rows: int, columns: int, dtype: str) -> dict[str, Spec]:
    """Local names, types and shapes of a layer's tensors; `dtype` of the scales is float16 whatever is asked."""
    storage(scheme)
    return _gptq.specs(scheme, rows, columns)


def layout(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Spec]:
    """Local names, types and shapes of the tensors that `tensors` returns, without computing them."""
    return specs(scheme, qt.q.shape[0], qt.q.shape[1], "F16")


def tensors(qt: QTensor, scheme: Scheme, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Make the tensors that are stored for one linear layer. Raises `UserError` for a scale that is no 16-bit float."""
    return _gptq.tensors(qt, scheme, _OFFSET)


def config(layers: Layers) -> dict:
    """The `quantization_config` block of config.json."""
    return _gptq.config(layers, "gptq")


def files(layers: Layers) -> dict[str, dict]:
    """Further JSON files of the checkpoint: the block once more, where GPTQModel looks for it."""
    return {"quantize_config.json": config(layers)} if layers.schemes else {}


def scheme_in(config: Mapping, names: Names, stored: Mapping[str, Spec], shape: tuple[int, int]) -> Scheme | None:
    """The scheme of a linear layer `[out, in]`; None: it is not quantized. Raises `UserError` for numbers not GPTQ's."""
    return _gptq.scheme_in(config, names, stored, shape)


def takes(config: Mapping, name: str) -> bool:
    """Whether an engine takes the linear layer called `name` for quantized."""
    return _gptq.takes(config, name)


def read(stored: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> tuple[QTensor, None]:
    """The codes, scales and zero points of a layer from its tensors. Raises `UserError` for an order by activations."""
    return _gptq.read(stored, scheme, _OFFSET), None
