"""Write a quantized checkpoint in another format without quantizing again.

`convert` packs the same codes and scales differently. Unpacked, they are equal bit for bit; layers that the new format cannot
express are refused by name before anything is written. Only scales of an FP8 KV cache are left out with a warning: engines
then keep keys and values in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from vlmcompress import models
from vlmcompress.export import manifest
from vlmcompress.export.formats import ExportFormat, Writer, files_problems, format_problems
from vlmcompress.export.layer_targets import describe_layers
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.export.stored import Stored
from vlmcompress.export.write import Checkpoint, OutputTensor, cast_entry, write
from vlmcompress.models import Source
from vlmcompress.models.layer_names import Layers
from vlmcompress.numerics import label
from vlmcompress.reduction import block as reducer_block
from vlmcompress.utils import folders, model_folder
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.work_folder import locked_folder


def convert(
    source: Path,
    out: Path,
    format: str,
    *,
    mmproj: Literal["q8_0", "f16"] | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Write the quantized checkpoint in `source` as `out`, in another format, and return the manifest of `out`.

    Args:
        source: our checkpoint, or another tool's in a supported format.
        out: folder to write; it is complete or absent.
        format: name of a module in `vlmcompress.export.formats`.
        mmproj: see `Recipe`.
        overwrite: replace an existing `out` of ours once the new one is complete.
        progress: called with (bytes written, total bytes).

    Raises:
        UserError: `source` is not such a checkpoint or is damaged, the format cannot hold it, or `out` cannot be written.
    """
    if format not in FORMATS.names():
        raise UserError(f"unknown format '{format}'{did_you_mean(format, FORMATS.names())}")
    writer = FORMATS.get(format)
    folders.require_out(source, out, overwrite=overwrite, mark=MANIFEST)
    with models.quiet_transformers():
        stored = Stored.of(source)
    stored.require_scales()
    if stored.format == format and (source / MANIFEST).is_file():
        raise UserError(f"{source} is already {format}; choose another format")
    model_folder.companions(source)  # raises where one cannot be copied
    written = models.written_names(stored.names, stored.spec)
    specs = {entry.name: entry.spec for entry in stored.entries}
    if problem := models.mtp_problem(stored.spec, stored.config, specs):
        raise UserError(problem)
    carried = reducer_block.read_reducer(stored.config)
    reducer = carried.reducer.plain() if carried else None
    model_config = stored.meta_model.config.to_dict()
    for reason in files_problems(writer, source, stored.spec.family, model_config, reducer, mmproj):
        raise UserError(reason)
    layers, tensors = _layers(stored, written, writer), written_tensors(stored, writer)
    config = models.without_missing_mtp(stored.spec, stored.spec.completed(stored.config), specs)
    config.pop("quantization_config", None)
    config = stored.float_type.config(config)
    record = _record(stored, {"format": format, "mmproj": mmproj})
    record["warnings"] = [*record["warnings"], *models.mtp_warnings(stored.spec, stored.config, specs)]
    if format == "compressed-tensors" and stored.scale_dtype is None:
        record["warnings"].append(
            "the model's type cannot represent the scales: transformers does not compute with both types, vLLM may round "
            "them; format bf16 runs everywhere"
        )
    if stored.kv_scales and writer.KV_SCALES is None:
        record["recipe"] = record["recipe"] | {"kv_cache": None}
        record["kv_cache"] = {}  # its errors
        record["warnings"].append(
            f"the scales of the FP8 KV cache were left out, as {format} has no place for them: engines keep keys and values in "
            "16 bits"
        )
    checkpoint = Checkpoint(
        original=source,
        files=source,
        tensors=tensors,
        quantized=stored,
        shapes={name: layer.shape for name, layer in stored.layers.items()},
        exporter=writer,
        layers=layers,
        config=config,
        manifest=record,
        mmproj=mmproj,
    )
    with locked_folder(source, out, overwrite=overwrite, mark=MANIFEST):
        return write(checkpoint, out, overwrite=overwrite, progress=progress)


def _layers(stored: Stored, written: Mapping[str, str], format: ExportFormat) -> Layers:
    """The output's quantized and unquantized layers. `written`: memory name of a parameter -> its name in the output."""
    names = [entry.name for entry in stored.entries]
    kv_cache = bool(stored.kv_scales) and format.KV_SCALES is not None
    return describe_layers(stored.schemes, stored.meta_model, written, stored.spec, stored=names, kv_cache=kv_cache)


def written_tensors(stored: Stored, writer: Writer) -> list[OutputTensor]:
    """The tensors to write in a format, in the checkpoint's order. Raises `UserError` for tensors that it cannot hold."""
    written = models.written_names(stored.names, stored.spec)
    for problem in format_problems(writer, _layers(stored, written, writer)):
        raise UserError(problem)
    for layer in stored.layers.values():
        try:
            writer.specs(layer.scheme, *layer.shape, "BF16")
        except ValueError as error:
            raise UserError(f"{layer.prefix.removesuffix('.')}: {error}") from error
    renamed = {disk: written[memory] for memory, disk in stored.names.items()}
    owner = {entry.name: name for name, layer in stored.layers.items() for entry in layer.entries.values()}
    unwanted, kv = set(models.unwritten_names(stored.names, [entry.name for entry in stored.entries])), dict[str, str]()
    for prefix, pair in stored.kv_scales.items():
        if writer.KV_SCALES is None:
            unwanted |= {entry.name for entry in pair}
        else:
            kv |= {entry.name: prefix + local for entry, local in zip(pair, writer.KV_SCALES, strict=True)}
    memory = {disk: name for name, disk in stored.names.items()}
    tensors, done = list[OutputTensor](), set[str]()
    for entry in stored.entries:
        module = owner.get(entry.name)
        if module is None:
            if entry.name not in unwanted:
                name, spec = kv.get(entry.name) or renamed.get(entry.name, entry.name), entry.spec
                if entry.name not in kv:
                    spec = stored.float_type.spec(memory.get(entry.name, entry.name), spec)
                tensors.append(OutputTensor(name, spec, cast_entry(entry, spec), memory.get(entry.name)))
        elif module not in done:
            done.add(module)
            layer = stored.layers[module]
            prefix = renamed[f"{layer.prefix}weight"].removesuffix("weight")
            for local, spec in writer.specs(layer.scheme, *layer.shape, stored.scale_type(module)).items():
                tensors.append(OutputTensor(prefix + local, spec, (module, local)))
    return tensors


def _record(stored: Stored, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The new checkpoint's manifest without its size and hashes; `keys`: of its recipe.

    The original of another tool's checkpoint is unknown and assumed to be 16 bits wide.
    """
    packed = {entry.name for layer in stored.layers.values() for entry in layer.entries.values()}
    total = sum(entry.spec.nbytes for entry in stored.entries if entry.name not in packed)
    total += sum(2 * rows * columns for rows, columns in (layer.shape for layer in stored.layers.values()))
    converted = {"from": stored.format, "to": keys["format"], "folder": stored.path.resolve().name}
    if (stored.path / MANIFEST).is_file():
        record = manifest.read_manifest(stored.path)
        manifest.verify_hashes(stored.path, record)
        recipe = record["recipe"] | keys
        return record | {"recipe": recipe, "converted": converted}
    recipe = {"model": str(stored.path), "scheme": "converted", "seed": None, **keys}
    record = manifest.build(stored.path, family=stored.spec.family, recipe=recipe, calibration=None, errors={})
    return record | {"size": {"weights_before": total}, "converted": converted}


def dequantized_outline(path: Path) -> Source:
    """The 16-bit model that `write_dequantized` would write, from headers alone.

    FP8 has 3 bits of mantissa, so that its error adds little to that of a second rounding to 4 bits or fewer. Integers of few
    bits have larger errors and are refused with a `UserError`.
    """
    with models.quiet_transformers():
        stored = Stored.of(path)
    for scheme in dict.fromkeys(stored.schemes.values()):
        if scheme.weights.kind != "float" or scheme.weights.bits != 8:
            raise UserError(
                f"{path} holds weights in {label(scheme)}, but --from-quantized takes only FP8, as rounding codes of few bits "
                "again costs too much; give the 16-bit original"
            )
    stored.require_scales()
    specs = {tensor.name: tensor.spec for tensor in written_tensors(stored, FORMATS.get("bf16"))}
    config = {key: value for key, value in stored.config.items() if key != "quantization_config"}
    names = models.written_names(stored.names, stored.spec)
    return Source(path, config, stored.spec, stored.meta_model, specs, names, headers=False)


def write_dequantized(path: Path, out: Path, progress: Callable[[int, int], None] | None = None) -> Source:
    """Write the 16-bit model of an FP8 checkpoint to the folder `out`, replacing an earlier one."""
    convert(path, out, "bf16", overwrite=True, progress=progress)
    return Source.of(out)
