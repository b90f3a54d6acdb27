"""Checkpoint formats. One file per format: pure maps from a solver's result to stored tensors and back, plus its config block.

A recipe's `format` names the file. A format is a module with

    FORMAT: str                                     `quant_method` in config.json
    KV_SCALES: (str, str) | None                    names below an attention module of an FP8 KV cache's scales; None: not held
    storage(scheme) -> str                          how it stores a scheme; UserError: it cannot
    problems(layers) -> [str]                       why it cannot hold these layers together; none if it can
    shapes(scheme, rows, columns) -> {local name: shape}        ValueError: not a layer of this shape
    specs(scheme, rows, columns, dtype) -> {local name: Spec}   the same with types; `dtype` of scales, where there is a choice
    layout(qt, scheme, input_scale=None) -> {local name: Spec}  the specs of what `tensors` returns, without computing it
    tensors(qt, scheme, input_scale=None) -> {local name: Tensor}       what is stored for one linear layer
    config(layers) -> dict                          the `quantization_config` block; empty: none
    files(layers) -> {file name: dict}              further JSON files that readers look for
    scheme_in(config, names, stored, shape) -> Scheme | None    what a checkpoint's block says of a layer; None: not quantized
    takes(config, name) -> bool                     whether an engine takes a layer of this name for quantized
    read(stored, scheme, shape) -> (QTensor, input scale)       the inverse of `tensors`

`layers` is a `common.layer_names.Layers`. A local name has no module path (`weight_packed`, `weight_scale`, ...). Nothing here
reads a model or writes a file.
"""
