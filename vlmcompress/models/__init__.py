"""Model families as data (`ModelSpec`, one file each), and their checkpoints: read, load, find layers, map names.

Adding a family is adding one file to `families/` whose `SPEC` is a `ModelSpec`; `tests/models` picks it up. What needs the
model's classes is imported on first use, as torch and transformers take seconds.
"""

# ruff: noqa: F401  # what is imported here is what the package offers

import importlib
from typing import TYPE_CHECKING, Any

from vlmcompress.models._images import ImageSetting, Layout, Piece, side_length, square_patches
from vlmcompress.models._read import (
    REGISTRY,
    all_specs,
    asides,
    block_side,
    checkpoint_bytes,
    family_of,
    mixture,
    patch_side,
    quantization_block,
    quantization_method,
    read_config,
    read_json,
    require_model_type,
    require_no_adapter,
    require_unquantized,
    shards,
    spec_for,
    stored_tensors,
    tensor_headers,
    tile_grid,
)
from vlmcompress.models._requirements import UNSUPPORTED, has_engine_class, has_transformers_class
from vlmcompress.models._spec import HEAD, Group, LinearGroup, MlxClass, ModelSpec, MtpHead

if TYPE_CHECKING:
    from vlmcompress.models._experts import Expert, Experts
    from vlmcompress.models._load import load, load_processor, open_model
    from vlmcompress.models._modules import (
        attentions,
        decoder_blocks,
        decoder_layers,
        kept_modules,
        kept_mtp,
        keys_are_values,
        missing_mtp,
        module_names,
        mtp_blocks,
        mtp_modules,
        mtp_problem,
        mtp_roots,
        mtp_tensors,
        mtp_warnings,
        resolve_groups,
        routers,
        tower_blocks,
        values_name,
        vision_linears,
        without_missing_mtp,
    )
    from vlmcompress.models._names import (
        disk_names,
        linear_names,
        memory_names,
        tied_names,
        unfound,
        unfound_text,
        unwritten_names,
        written_names,
    )
    from vlmcompress.models._placeholders import (
        visual_features,
        visual_shape,
        wrong_settings,
    )
    from vlmcompress.models._source import (
        VLM,
        Source,
        build_meta_model,
        cast_text,
        compressed,
        quiet_transformers,
        require_shapes,
        unused_text,
    )
    from vlmcompress.models._stream import Stream, Values, stream
    from vlmcompress.models._types import FloatType
    from vlmcompress.models._vocabulary import (
        PADDING,
        NormAndHead,
        embedding_name,
        final_norm,
        head_group,
        head_on_disk,
        is_tied,
        matrices,
        rows_of,
        unembedded,
        untie,
        untied,
        with_head,
        with_vocabulary,
    )

_ON_FIRST_USE = (
    *("_experts", "_load", "_modules", "_names", "_placeholders", "_source", "_stream", "_types"),
    "_vocabulary",
)


def __getattr__(name: str) -> Any:
    """A name of a module in `_ON_FIRST_USE`."""
    for path in _ON_FIRST_USE if not name.startswith("_") else ():
        module = importlib.import_module(f"{__name__}.{path}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
