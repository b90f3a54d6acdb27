"""Bytes of the weights in each number format, exactly as `quantize` writes them, and the part of them on one device.

A row is a format, for all schemes that produce it, under the name of the scheme that suits the target best. The layers of each
scheme come from `plan.plan`, so that a new scheme gets a row automatically.

Each of several devices holds its part of every matrix of the decoder, the tower, the embedding and the head. Everything else
(norms, biases, the patch kernel, position embeddings) is copied to all of them; heads of keys and values are replicated if
there are more devices than heads. Source: vLLM 0.32 `model_executor/layers/linear.py`.

Speculative decoding adds to both: the checkpoint's draft head (`mtp`) has weights, and its decoder blocks add keys and values
to the cache of each token. With any draft method, a recurrent block keeps an additional state per drafted token, and as many
additional inputs of its convolution, to roll back. Sources: vLLM 0.32 `models/qwen3_5_mtp.py`,
`v1/kv_cache_interface.py` (`MambaSpec`), `layers/mamba/mamba_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vlmcompress import models
from vlmcompress.engines.vllm import partition
from vlmcompress.engines.vllm.served_model import Attention, ServedDecoder, ServedModel
from vlmcompress.export.draft_folder import Draft
from vlmcompress.models import Source
from vlmcompress.numerics import Scheme, label
from vlmcompress.quantization.plan import make_plan
from vlmcompress.recipe import resolve, targets
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.registry import SCHEMES
from vlmcompress.utils.tensor_headers import Spec

QUANTIZED = "quantized"
"""Row name of an already quantized checkpoint."""


@dataclass(frozen=True)
class Weights:
    """The weights in one number format.

    Attributes:
        name: a scheme that produces it; `others`: further such schemes.
        label: the number format in words; `key`: its name in `targets`.
        stored: bytes of all tensors in the files; None if there are none, for the reason in `refused`.
        scheme: the number formats; None: not quantized.
        options: non-default options of the scheme: the group size that does not split groups over several devices.
    """

    name: str
    label: str
    key: str
    stored: int | None
    scheme: Scheme | None = None
    others: tuple[str, ...] = ()
    problem: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def formats(
    model: ServedModel, target: str | None, devices: int = 1, vocabulary: Mapping[str, str] | None = None
) -> list[Weights]:
    """A row for each number format that a scheme produces and the target runs, bf16 first; refused ones come last.

    Args:
        devices: number of devices that share the model; group sizes that would be split are reduced to the largest that fit.
        vocabulary: formats of the recipe's `head` and `embeddings`; they do not apply to the 16-bit row.

    Raises:
        UserError: the layers of a quantized checkpoint can't be split over the devices.
    """
    if model.quantized:
        _require_whole_layers(model, devices)
        return [Weights(model.quantized, "as stored", QUANTIZED, stored_bytes(model.stored))]
    if model.source is None:
        return [Weights("bf16", "bf16", "bf16", stored_bytes(model.stored))]
    source = model.source
    best = targets.get_target(target).schemes.values() if target else ()
    names = sorted(SCHEMES.names(), key=lambda name: (name not in best, name))
    rows_by_label: dict[str, Weights] = {}
    for name in names:
        module = SCHEMES.get(name)
        options = _fitting(source, module, devices)
        scheme = module.scheme(module.OPTIONS(**options))
        key = label(scheme)
        if key in rows_by_label:
            rows_by_label[key] = replace(rows_by_label[key], others=(*rows_by_label[key].others, name))
        else:
            row = Weights(name, key, targets.format_key(scheme), None, scheme, options=options)
            rows_by_label[key] = _row(source, target, row, devices, vocabulary or {})
    rows = sorted(
        rows_by_label.values(), key=lambda row: (row.problem is not None, row.scheme is not None, -(row.stored or 0))
    )
    return [replace(row, name="bf16") if row.scheme is None else row for row in rows]


def _require_whole_layers(model: ServedModel, devices: int) -> None:
    """Raise `UserError` if the layers of a quantized checkpoint (in a supported format) can't be split over the devices."""
    if devices == 1 or model.spec is None or not model.headers:
        return
    try:
        layers = partition.stored_layers(model.path)
    except UserError:
        return  # another tool's, in an unsupported format
    if problem := partition.partition_problem(layers, devices):
        raise UserError(problem)


def _fitting(source: Source, module: Any, devices: int) -> dict[str, int]:
    """The group-size option with which devices split no groups of a scheme; empty if none are split, or no size helps."""
    scheme = module.scheme(module.OPTIONS())
    if scheme is None or devices == 1 or "group_size" not in {field.name for field in fields(module.OPTIONS)}:
        return {}
    groups = [group for block in source.blocks for group in block]
    layers = partition.fused_layers(
        source.meta_model, groups, {name: scheme for group in groups for name in group.linears}
    )
    size = None if devices in partition.device_counts(layers, [devices]) else partition.fitting_size(layers, devices)
    return {"group_size": size} if size and size > 0 else {}


def _row(source: Source, target: str | None, row: Weights, devices: int, vocabulary: Mapping[str, str]) -> Weights:
    """The row with its bytes, or with its problem."""
    scheme = row.scheme
    if target and (reason := targets.get_target(target).format_problem(row.key)):
        return replace(row, problem=reason)
    if scheme is None:
        return replace(row, stored=stored_bytes(source.stored))
    settings: dict[str, Any] = {"model": str(source.path), "scheme": row.name, "options": dict(row.options)}
    settings |= vocabulary
    recipe = resolve(settings | ({"target": target} if target else {}), strict=False, weights="headers").recipe
    plan = make_plan(recipe, source=source, strict=False)
    carried = [problem for problem in plan.problems if not problem.startswith("the model carries the reducer")]
    torn = partition.partition_problem(plan.fused_layers, devices, target) if devices > 1 else None
    if carried or torn:
        return replace(row, problem=carried[0] if carried else torn)
    return replace(row, stored=plan.bytes_after)


def stored_bytes(stored: Mapping[str, Spec]) -> int:
    """Bytes of all tensors."""
    return sum(spec.nbytes for spec in stored.values())


def loaded_bytes(row: Weights, stored: Mapping[str, Spec]) -> int:
    """Bytes of the weights in an engine, which loads float32 models in 16 bits."""
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
    # Matrices and stacks of experts are split; vectors, convolutions and position tables are copied.
    whole = sum(spec.nbytes for name, spec in stored.items() if len(spec.shape) not in (2, 3) or "pos" in name)
    matrices = loaded - min(whole, loaded)
    copies = max(1, math.ceil(tp / kv_heads))
    keys = sum(spec.nbytes for name, spec in stored.items() if ".k_proj.weight" in name or ".v_proj.weight" in name)
    share = keys / max(total - whole, 1)
    return math.ceil(whole + matrices * (1 - share) / tp + matrices * share * copies / tp)


METHODS = {"mtp": 1, "ngram": 4, "suffix": 4}  # method -> default number of drafted tokens


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: its method, the tokens drafted at once, bytes of a head's weights, and the head's blocks."""

    method: str
    tokens: int
    bytes: int = 0
    blocks: tuple[Attention, ...] = ()

    def __str__(self) -> str:
        """The text in the form of `--speculative`."""
        return f"{self.method}:{self.tokens}"

    def added(self, decoder: ServedDecoder) -> ServedDecoder:
        """The decoder with the head's blocks after its own, which cache as those do."""
        return replace(decoder, blocks=(*decoder.blocks, *self.blocks))


def parse_speculation(text: str) -> tuple[str, int]:
    """Read `METHOD` or `METHOD:TOKENS`. Raises `UserError`."""
    method, _, count = text.partition(":")
    if method not in METHODS:
        raise UserError(f"--speculative {text[:40]}: no method '{method[:20]}'{did_you_mean(method, METHODS)}")
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= 100):
        raise UserError(f"--speculative {text[:40]}: tokens drafted at once should be a number from 1 to 100")
    return method, int(count or METHODS[method])


def speculation_of(model: ServedModel, method: str, tokens: int) -> Speculation:
    """The costs of a method for a model. Raises `UserError` for `mtp` if the model has no MTP head."""
    if method != "mtp":
        return Speculation(method, tokens)
    attention: Any = next((block for block in model.decoder.blocks if isinstance(block, Attention)), None)
    count = models.mtp_blocks(model.spec, model.config) if model.spec else 0
    if not model.spec or not count or attention is None:
        raise UserError("--speculative mtp: the model has no MTP head; use ngram or suffix")
    if lost := models.missing_mtp(model.spec, model.config, model.stored):
        raise UserError(f"--speculative mtp: {lost}")
    return Speculation(method, tokens, mtp_bytes(model), (attention,) * count)


def speculation_by(model: ServedModel, draft: Draft) -> Speculation:
    """The costs of a separate draft head. Raises `UserError` if it does not fit the model."""
    if problem := draft.mismatch(model.config):
        raise UserError(f"--draft {draft.folder}: {problem}; train one for this model with `vlmcompress draft`")
    block: Any = draft.block
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return Speculation("eagle3", draft.tokens, draft.bytes, (Attention(*(block[name] for name in heads)),))


def mtp_bytes(model: ServedModel) -> int:
    """Bytes of the model's MTP head, which engines load only for speculative decoding."""
    names = models.mtp_tensors(model.spec, model.stored) if model.spec else []
    return sum(model.stored[name].nbytes for name in names)
