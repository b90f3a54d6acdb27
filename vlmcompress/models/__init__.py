"""Model families as data (`ModelSpec`, one file each), and their checkpoints: read, load, find layers, map names.

Adding a family is adding one file here whose `SPEC` fills a `ModelSpec`; `tests/models` picks it up.
"""

from vlmcompress.models._draft import (
    draft_blocks,
    draft_dropped,
    draft_fault,
    draft_lost,
    draft_modules,
    draft_tensors,
    found_draft,
    kept_draft,
)
from vlmcompress.models._experts import Expert, Experts
from vlmcompress.models._kept import kept_modules, keys_are_values, module_names, routers, values_name
from vlmcompress.models._layout import Layout, Piece
from vlmcompress.models._load import (
    VLM,
    check_shapes,
    compressed,
    load,
    load_processor,
    open_model,
    quiet,
    skeleton,
    spec_for,
)
from vlmcompress.models._names import (
    disk_module,
    disk_names,
    left_out,
    linear_names,
    memory_names,
    tied_names,
    unfound,
    unfound_text,
    written_names,
)
from vlmcompress.models._quantized import CONFIG_FILES, quantization_block, quantization_method, refuse_quantized
from vlmcompress.models._read import (
    REGISTRY,
    all_specs,
    check_files,
    mixture,
    read_config,
    read_json,
    shards,
    stored_bytes,
    stored_tensors,
    tensor_headers,
)
from vlmcompress.models._resolve import attentions, decoder_blocks, decoder_layers, layer_class, resolve, vision_linears
from vlmcompress.models._sizes import ImageSetting
from vlmcompress.models._source import Source
from vlmcompress.models._spec import Draft, Group, LinearGroup, ModelSpec
from vlmcompress.models._stream import Stream, Values, stream, untied
from vlmcompress.models._unsupported import UNSUPPORTED

__all__ = [
    "CONFIG_FILES",
    "REGISTRY",
    "UNSUPPORTED",
    "VLM",
    "Draft",
    "Expert",
    "Experts",
    "Group",
    "ImageSetting",
    "Layout",
    "LinearGroup",
    "ModelSpec",
    "Piece",
    "Source",
    "Stream",
    "Values",
    "all_specs",
    "attentions",
    "check_files",
    "check_shapes",
    "compressed",
    "decoder_blocks",
    "decoder_layers",
    "disk_module",
    "disk_names",
    "draft_blocks",
    "draft_dropped",
    "draft_fault",
    "draft_lost",
    "draft_modules",
    "draft_tensors",
    "found_draft",
    "kept_draft",
    "kept_modules",
    "keys_are_values",
    "layer_class",
    "left_out",
    "linear_names",
    "load",
    "load_processor",
    "memory_names",
    "mixture",
    "module_names",
    "open_model",
    "quiet",
    "quantization_block",
    "quantization_method",
    "read_config",
    "read_json",
    "refuse_quantized",
    "resolve",
    "routers",
    "shards",
    "skeleton",
    "spec_for",
    "stored_bytes",
    "stored_tensors",
    "stream",
    "tensor_headers",
    "tied_names",
    "unfound",
    "unfound_text",
    "untied",
    "values_name",
    "vision_linears",
    "written_names",
]
