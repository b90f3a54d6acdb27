"""Checkpoint formats. One file per format: pure maps from a solver's result to stored tensors, plus its config block.

An exporter is a module with

    FORMAT: str                                               what config.json calls the format
    layout(qt, scheme, input_scale=None) -> {local name: Spec}          types and shapes, without computing anything
    tensors(qt, scheme, input_scale=None) -> {local name: Tensor}       what is stored for one linear layer
    quantization_config(groups, ignore, kv_cache=False) -> dict         the `quantization_config` block

A local name has no module path (`weight_packed`, `weight_scale`, ...). Nothing here reads a model or writes a file.
"""

from vlmcompress.common.registry import Registry

REGISTRY = Registry("vlmcompress.exporters", "format")
