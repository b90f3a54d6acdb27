"""Bounds of the sizes in a config.json or a processor's files, checked before anything of these sizes is built.

A config is a few bytes that ask for modules, tables and images; one that asks for a million million layers keeps a machine busy
for days. The bounds are several times what the largest models have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vlmcompress.common import json_files
from vlmcompress.errors import UserError

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
ANY = 10**11
"""The largest value of an integer whose key has no bound of its own."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
_BOUNDS: dict[int, tuple[str, ...]] = {
    1 << 10: _LAYERS,
    1 << 12: (
        *("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_head", "n_heads"),
        *("patch_size", "spatial_patch_size", "temporal_patch_size", "encoder_patch_size", "tubelet_size"),
        *("merge_size", "spatial_merge_size", "scale_factor", "downsample_factor", "min_tiles", "max_tiles"),
        *("num_channels", "in_channels", "in_chans", "min_patches", "max_patches", "conv_L_cache"),
    ),
    1 << 14: (
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
        *("head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "tile_size"),
        *("image_size", "height", "width", "max_image_size", "crop_size"),
    ),
    1 << 18: (
        *("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "projection_dim", "out_hidden_size"),
        *("vision_output_size", "projector_hidden_size", "block_dim", "conv_dim", "conv_dim_out", "mm_hidden_size"),
        *("image_seq_length", "image_seq_len", "mm_tokens_per_image", "max_image_tokens", "min_image_tokens"),
    ),
    1 << 20: ("intermediate_size", "moe_intermediate_size", "ffn_dim", "block_ff_dim", "mlp_dim", "num_patches"),
    1 << 24: ("vocab_size", "type_vocab_size", "num_position_embeddings", "max_num_patches"),
    1 << 28: ("max_position_embeddings", "shortest_edge", "longest_edge", "min_pixels", "max_pixels", "sliding_window"),
}
LARGEST = {key: bound for bound, keys in _BOUNDS.items() for key in keys}
"""Key -> the largest number in its value, which may be a number, a list or a mapping."""


def check_sizes(content: Mapping[str, Any], file: Path) -> None:
    """Refuse, with a `UserError`, a size above its bound anywhere in the JSON object that `file` holds."""
    for where, key, value in _numbers(content):
        bound = LARGEST.get(key, ANY if isinstance(value, int) else math.inf)
        if abs(value) > bound or math.isnan(value):
            shown = (
                f"a number of {len(str(value))} digits" if isinstance(value, int) and value > ANY**2 else f"{value:,}"
            )
            raise UserError(
                f"{file}: {where} is {shown}, more than the {bound:,} that are possible here; restore it from the source"
            )


def check_claims(config: Mapping[str, Any], tensors: int, file: Path) -> None:
    """Refuse a config.json that asks for more layers than the weight files have tensors."""
    for where, key, value in _numbers(config):
        if key in _LAYERS and value > tensors:
            raise UserError(
                f"{file}: {where} is {value:,}, and the weight files hold {tensors:,} tensors; config and weights do not "
                "belong together"
            )


def check_total(asked: int, headers: Iterable[Mapping[str, Any]], quantized: bool, file: Path) -> None:
    """Refuse a model of `asked` weights where the tensors in the files cannot be as many, by far.

    Args:
        headers: `{"dtype", "shape"}` of each tensor.
        quantized: whether several weights may share a stored number, as 16 weights of 2 bits share one of 32.
    """
    stored = sum(math.prod(entry["shape"]) for entry in headers)
    if asked > stored * (16 if quantized else 2):
        raise UserError(
            f"{file} asks for {asked:,} weights, and the weight files hold {stored:,}; config and weights do not belong "
            "together"
        )


def check_processor(folder: Path) -> None:
    """Refuse sizes above their bounds in the files that say how images are cut and resized."""
    for file in (folder / name for name in PROCESSOR_FILES):
        if not file.exists():
            continue
        try:
            content = json_files.read(file)
        except (OSError, ValueError) as error:
            raise UserError(f"{file} is not readable JSON ({error}); copy it from the source") from error
        if isinstance(content, Mapping):
            check_sizes(content, file)


def _numbers(value: Any, where: str = "", key: str = "") -> Iterator[tuple[str, str, int | float]]:
    """Yield dotted path, key and value of every number; one in a list or under `height` and the like has the key above."""
    if isinstance(value, Mapping):
        for inner, item in value.items():
            own = inner if inner in LARGEST or not isinstance(item, int | float) or key not in LARGEST else key
            yield from _numbers(item, f"{where}.{inner}" if where else str(inner), own)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, where, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, key, value
