"""A compressed checkpoint without the pipeline: round to nearest, made-up activation scales, the real exporter and writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from vlmcompress import models
from vlmcompress.export import manifest
from vlmcompress.export import write as checkpoint
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.export.layer_targets import describe_layers
from vlmcompress.numerics import MXFP4, MXFP8, NVFP4, ActFormat, Format, Scheme, find_global_scale, round_to_nearest
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.utils import tensor_files

SCHEMES = {
    "w4-symmetric": Scheme(Format("int", 4, 128)),
    "w4-asymmetric": Scheme(Format("int", 4, 32, symmetric=False)),
    "w4-channel": Scheme(Format("int", 4, -1)),
    "w8a16": Scheme(Format("int", 8, 128)),
    "int8": Scheme(Format("int", 8, -1), ActFormat("int", 8, dynamic=True)),
    "w4a8": Scheme(Format("int", 4, -1), ActFormat("int", 8, dynamic=True)),
    "fp8": Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=True)),
    "fp8-static": Scheme(Format("float", 8, -1), ActFormat("float", 8, dynamic=False)),
    "fp8-static-tensor": Scheme(Format("float", 8, 0), ActFormat("float", 8, dynamic=False)),
    "nvfp4": Scheme(NVFP4, ActFormat("float", 4, dynamic=True)),
    "nvfp4a16": Scheme(NVFP4),
    "mxfp4": Scheme(MXFP4, ActFormat("float", 4, dynamic=True, mx=True)),
    "mxfp4a16": Scheme(MXFP4),
    "mxfp8": Scheme(MXFP8, ActFormat("float", 8, dynamic=True, mx=True)),
    "w4a8-fp8": Scheme(Format("int", 4, 128), ActFormat("float", 8, dynamic=True)),
}


def parts(
    folder: Path,
    scheme: Scheme | None,
    vision: Scheme | None = None,
    *,
    kv_cache: bool = False,
    down: Scheme | None = None,
    changed: Mapping[str, torch.Tensor] | None = None,
    reducer: ReducerChoice | None = None,
) -> checkpoint.Checkpoint:
    """What `export.write` writes. `down`: scheme of the layers `down_proj`; None: that of the others."""
    source = models.Source.of(folder)
    model, spec, names, entries = source.meta_model, source.spec, source.names, source.entries
    groups = models.resolve_groups(model, spec) if scheme else []
    chosen = [(group, down if down and "down_proj" in group.linears[0] else scheme) for group in groups]
    chosen += [(group, vision) for group in models.vision_linears(model, spec) if vision]
    quantized = {}
    for group, group_scheme in chosen:
        weights = {name: tensor_files.read_tensor(entries[names[f"{name}.weight"]]) for name in group.linears}
        shared = find_global_scale(weights.values()) if group_scheme.weights.nvfp4 else None
        made_up = {False: 0.05, True: 448 * 6 / 20.0}[group_scheme.weights.nvfp4]
        input_scale = (
            torch.tensor(made_up) if group_scheme.activations and group_scheme.activations.calibrated else None
        )
        for name, weight in weights.items():
            result = round_to_nearest(weight, group_scheme.weights, scale_dtype=torch.bfloat16, global_scale=shared)
            quantized[name] = (result, group_scheme, input_scale)
    kv_scales = {name: torch.tensor([0.02, 0.03]) for name in models.attentions(model, spec) if kv_cache}
    recipe = {"model": str(folder), "scheme": "rtn", "seed": 0}
    schemes = {name: group_scheme for name, (_, group_scheme, _) in quantized.items()}
    return checkpoint.Checkpoint(
        original=folder,
        files=folder,
        tensors=checkpoint.plan_tensors(source, compressed_tensors.FORMAT, schemes, changed, kv_scales),
        quantized=quantized,
        shapes={name: tuple(weight.q.shape) for name, (weight, *_) in quantized.items()},
        exporter=compressed_tensors.FORMAT,
        layers=describe_layers(
            schemes,
            model,
            source.written,
            spec,
            stored=entries,
            kv_cache=kv_cache,
        ),
        config=checkpoint.written_config(source, quantized, reducer),
        manifest=manifest.build(
            folder,
            family=spec.family,
            recipe=recipe,
            calibration=None,
            errors={},
        )
        | {"size": {"weights_before": models.checkpoint_bytes(folder)}},
    )


def write(
    source: Path,
    out: Path,
    scheme: Scheme | None,
    vision: Scheme | None = None,
    *,
    shard_size: str = "5GB",
    progress: Callable[[int, int], None] | None = None,
    **keys,
) -> dict:
    """Quantize `source` into `out`; `keys` go to `parts`. Returns the quantized layers."""
    result = replace(parts(source, scheme, vision, **keys), shard_size=shard_size)
    checkpoint.write(result, out, progress=progress)
    return result.quantized
