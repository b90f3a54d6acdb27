"""Schemes of the output head and the token embedding, for recipes that quantize them.

vLLM 0.32 (`compressed_tensors.py: get_quant_method`) treats a head as a linear layer of any scheme. Embeddings may be integers
without zero points and with 16-bit outputs, whose rows a Triton kernel looks up (`compressed_tensors_embedding.py`). A tied
head would get the embedding's weights in place of its scheme's, so it is untied. MLX has kernels with zero points, and its tied
head multiplies by the quantized embedding.

An engine computes logits only at a prompt's last token and at the answer's. So the head's calibration leaves out visual tokens,
which are most of a prompt and never precede a generated token.
"""

from __future__ import annotations

from vlmcompress import models
from vlmcompress.models import Source
from vlmcompress.numerics import Scheme, weight_only
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.recipe import Recipe, presets
from vlmcompress.utils.registry import SCHEMES

GROUP_SIZES = (128, 64, 32)
BALANCE = {"text": 1.0, "vision": 0.0, "answer": 1.0}
_CODE_BITS = {"w8a16": 8, "w4a16": 4}


def head_method(recipe: Recipe, source: Source) -> QuantMethod:
    """The method of an output head that is quantized. 4 bits are calibrated if the run has samples or statistics."""
    name, options = presets.resolve_scheme(recipe.head)
    if recipe.head == "w8a16":
        options = {"group_size": recipe.group_size}
    if _CODE_BITS.get(recipe.head) == 4:
        options = {"group_size": _group_size(source), "symmetric": _symmetric(recipe)}
        calibrate, needs = recipe.calibrate, recipe.method.needs(recipe.options)
        if needs.statistics or calibrate.data or recipe.kv_cache or recipe.bits:
            options["balance"] = BALANCE
        else:
            name = "rtn"
    module = SCHEMES.get(name)
    return QuantMethod(module, module.OPTIONS(**options), scale_dtype=recipe.exporter.SCALES)


def embedding_scheme(recipe: Recipe, source: Source) -> Scheme | None:
    """The number formats of the token embedding; None: it is not quantized."""
    bits = _CODE_BITS.get(recipe.embeddings)
    if bits == 8:
        return weight_only(8, recipe.group_size)
    return None if bits is None else weight_only(bits, _group_size(source), _symmetric(recipe))


def _symmetric(recipe: Recipe) -> bool:
    """Whether 4 bits have no zero points."""
    return recipe.format != "mlx"


def _group_size(source: Source) -> int:
    """The largest size of groups that kernels have and that divides the width of head and embedding; -1: a scale per row."""
    width = source.meta_model.get_parameter(f"{models.embedding_name(source.meta_model)}.weight").shape[1]
    return next((size for size in GROUP_SIZES if width % size == 0), -1)
