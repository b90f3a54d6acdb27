"""Bytes of the weights in each number format: exactly those that `quantize` writes, and what of them one device holds.

A format is a row for all schemes that give it, under the name of the one that the target is served best with. What a scheme
makes of a model is asked of `planning.plan`, scheme by scheme, so a scheme that is added has a row by itself.

Of several devices each has its part of every matrix of the decoder, the tower, the embedding and the head. What is no matrix
(norms, biases, the kernel that cuts an image into patches) all of them have, and embeddings of positions; keys and values
have a copy on several devices where these are more than their heads. Source: vLLM 0.32 `model_executor/layers/linear.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vlmcompress import targets
from vlmcompress.capacity.model import Model
from vlmcompress.common.registry import SCHEMES
from vlmcompress.common.tensor_files import Spec
from vlmcompress.models import Source
from vlmcompress.numerics import Scheme, label
from vlmcompress.planning.plan import make_plan
from vlmcompress.recipe import resolve

QUANTIZED = "quantized"
"""Name of the row of a checkpoint that is quantized already."""


@dataclass(frozen=True)
class Weights:
    """The weights in one number format.

    Attributes:
        name: scheme that gives it; `others`: schemes that give it, too.
        label: the number format in words; `key`: its name in `targets`.
        stored: bytes of all tensors in the files; None where `refused` says why there are none.
        scheme: the number formats; None: weights are left as they are.
    """

    name: str
    label: str
    key: str
    stored: int | None
    scheme: Scheme | None = None
    others: tuple[str, ...] = ()
    refused: str | None = None


def formats(model: Model, target: str | None) -> list[Weights]:
    """A row for each number format that a scheme gives and the target runs, bf16 first; refused ones behind them."""
    if model.quantized:
        return [Weights(model.quantized, "as stored", QUANTIZED, stored_bytes(model.stored))]
    if model.source is None:
        return [Weights("bf16", "bf16", "bf16", stored_bytes(model.stored))]
    source = model.source
    best = targets.get(target).schemes.values() if target else ()
    names = sorted(SCHEMES.names(), key=lambda name: (name not in best, name))
    found: dict[str, Weights] = {}
    for name in names:
        module = SCHEMES.get(name)
        scheme = module.scheme(module.Options())
        key = label(scheme)
        if key in found:
            found[key] = replace(found[key], others=(*found[key].others, name))
        else:
            found[key] = _row(source, target, name, key, scheme)
    rows = sorted(found.values(), key=lambda row: (row.refused is not None, row.scheme is not None, -(row.stored or 0)))
    return [replace(row, name="bf16") if row.scheme is None else row for row in rows]


def _row(source: Source, target: str | None, name: str, title: str, scheme: Scheme | None) -> Weights:
    row = Weights(name, title, targets.format_key(scheme), None, scheme)
    if target and (reason := targets.get(target).refusal(row.key)):
        return replace(row, refused=reason)
    if scheme is None:
        return replace(row, stored=stored_bytes(source.stored))
    given: dict[str, Any] = {"model": str(source.path), "scheme": name}
    recipe = resolve(given | ({"target": target} if target else {}), refuse=False, weights="headers").recipe
    plan = make_plan(recipe, source=source, refuse=False)
    carried = [problem for problem in plan.problems if not problem.startswith("the model carries the reducer")]
    return replace(row, refused=carried[0]) if carried else replace(row, stored=plan.bytes_after)


def stored_bytes(stored: Mapping[str, Spec]) -> int:
    """Bytes of all tensors."""
    return sum(spec.nbytes for spec in stored.values())


def loaded_bytes(row: Weights, stored: Mapping[str, Spec]) -> int:
    """Bytes of the weights in an engine, which loads a model in float32 as 16 bits."""
    wide = sum(spec.nbytes for spec in stored.values() if spec.dtype == "F32") if row.key == "bf16" else 0
    return (row.stored or 0) - wide // 2


def device_bytes(loaded: int, stored: Mapping[str, Spec], tp: int, kv_heads: int) -> int:
    """Bytes of the weights on one of `tp` devices.

    Args:
        loaded: bytes on one device alone.
        kv_heads: heads of keys of a decoder block.
    """
    if tp == 1:
        return loaded
    total = stored_bytes(stored)
    whole = sum(spec.nbytes for name, spec in stored.items() if len(spec.shape) not in (2, 3) or "pos" in name)
    matrices = loaded - min(whole, loaded)
    copies = max(1, math.ceil(tp / kv_heads))
    keys = sum(spec.nbytes for name, spec in stored.items() if ".k_proj.weight" in name or ".v_proj.weight" in name)
    share = keys / max(total - whole, 1)
    return math.ceil(whole + matrices * (1 - share) / tp + matrices * share * copies / tp)
