"""The output head and the token embedding of a recipe that quantizes them: with which scheme, and why not.

vLLM 0.32 (`compressed_tensors.py: get_quant_method`) takes a head for a linear layer of any scheme, and of embeddings integers
without zero points and with 16-bit outputs, whose rows a Triton kernel looks up (`compressed_tensors_embedding.py`). A head
that shares the embedding's weights is given these whatever its own scheme, so it is made a matrix of its own.

A head is asked for logits at a prompt's last token and at the answer's. So its calibration leaves visual tokens out, which are
most of a prompt and of which none is followed by a token of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlmcompress import models
from vlmcompress.calibration.solve import QuantMethod
from vlmcompress.common.registry import SCHEMES
from vlmcompress.models import Source
from vlmcompress.numerics import Scheme, weight_only
from vlmcompress.planning.shape_checks import shape_problems
from vlmcompress.recipe import Recipe

if TYPE_CHECKING:
    from vlmcompress.planning.survey import Survey

GROUP_SIZES = (128, 64, 32)
BALANCE = {"text": 1.0, "vision": 0.0, "answer": 1.0}
_CODE_BITS = {"w8a16": 8, "w4a16": 4}


def head_method(recipe: Recipe, source: Source) -> QuantMethod | None:
    """How the output head is quantized; None: it stays as it is. 4 bits are calibrated where the run sees samples."""
    if recipe.head == "bf16":
        return None
    name, options = SCHEMES.name(recipe.head), {}
    if _CODE_BITS.get(recipe.head) == 4:
        options = {"group_size": _group_size(source), "symmetric": True}
        if _sees_samples(recipe):
            options["balance"] = BALANCE
        else:
            name = "rtn"
    module = SCHEMES.get(name)
    return QuantMethod(module, module.Options(**options), scale_dtype=getattr(recipe.exporter, "SCALES", None))


def embedding_scheme(recipe: Recipe, source: Source) -> Scheme | None:
    """The number formats of the token embedding; None: it stays as it is."""
    bits = _CODE_BITS.get(recipe.embeddings)
    return None if bits is None else weight_only(bits, -1 if bits == 8 else _group_size(source))


def problems(survey: Survey) -> Iterator[str]:
    """Whether head and embedding can be quantized as the recipe asks for it."""
    recipe, source = survey.recipe, survey.source
    quantized = [key for key in ("head", "embeddings") if getattr(recipe, key) != "bf16"]
    if quantized and source.spec.head_shares and recipe.engine == "vllm":
        yield (
            f"{quantized[0]}: vLLM's class of {source.spec.family} gives the output head the embedding's weights, whatever the "
            "checkpoint has; leave it in bf16"
        )
    elif quantized == ["embeddings"] and models.is_tied(source.meta_model, source.spec):
        yield "embeddings: the output head shares these weights, and reads no quantized ones; quantize it, too, by --head w4a16"
    for group in filter(None, [survey.head]):
        scheme = survey.method.of(group).scheme
        yield from shape_problems(source, group, scheme, recipe.exporter, recipe.target)


def _sees_samples(recipe: Recipe) -> bool:
    """Whether a run of the recipe has statistics of inputs, whatever becomes of the head."""
    calibrate, needs = recipe.calibrate, recipe.method.needs(recipe.options)
    return bool(needs.statistics or calibrate.data or calibrate.stats or recipe.kv_cache or recipe.bits)


def _group_size(source: Source) -> int:
    """The largest size of groups that kernels have and that divides the width of head and embedding; -1: a scale per row."""
    width = source.meta_model.get_parameter(f"{models.embedding_name(source.meta_model)}.weight").shape[1]
    return next((size for size in GROUP_SIZES if width % size == 0), -1)
