"""Checkpoint formats. One file per format: pure maps from a solver's result to stored tensors, plus its config block.

A recipe's `format` names the file. An exporter is a module with

    FORMAT: str                                     `quant_method` in config.json
    storage(scheme) -> str                          how it stores a scheme; UserError: it cannot
    shapes(scheme, rows, columns) -> {local name: shape}        ValueError: not a layer of this shape
    specs(scheme, rows, columns, dtype) -> {local name: Spec}   the same with types; scales have `dtype`
    layout(qt, scheme, input_scale=None) -> {local name: Spec}  the specs of what `tensors` returns, without computing it
    tensors(qt, scheme, input_scale=None) -> {local name: Tensor}       what is stored for one linear layer
    dequantized(stored, scheme, shape) -> Tensor    the weight that an engine computes with, read back
    quantization_config(groups, ignore, kv_cache=False) -> dict         the `quantization_config` block
    group_of(config, layer) -> str | None           which of its groups a layer belongs to
    scheme_of(group) -> Scheme                      what a group says: the inverse of `quantization_config`

A local name has no module path (`weight_packed`, `weight_scale`, ...). Nothing here reads a model or writes a file.
"""
