"""Whether vLLM can share the quantized layers of a checkpoint out among devices (tensor parallelism).

Of a layer whose inputs are split (`o`, `down`, `fc2`, ...) each of `n` devices has `in / n` columns, which must be whole
groups of columns with one scale; of the others each has rows, where scales do not matter but in FP8 blocks of rows and
columns. Sources: vLLM 0.32 `distributed/utils.py` (`verify_group_size_divides_partition`), `quantization/utils/fp8_utils.py`
(`validate_fp8_block_shape`), `compressed_tensors_wNa16.py` (scales per row are copied to all devices). Kernels of a target
have to take what one device has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vlmcompress import models
from vlmcompress.export.stored import Stored
from vlmcompress.models import Group, ModelSpec
from vlmcompress.numerics import Scheme, label
from vlmcompress.recipe import targets
from vlmcompress.recipe.targets import Target

SIZES = (128, 64, 32)  # sizes of groups that vLLM's kernels for NVIDIA GPUs have, besides one scale per row
DEVICES = (1, 2, 4, 8)
"""Numbers of devices that launch files choose from."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class FusedLayer:
    """Linear layers that an engine runs as one matrix.

    Attributes:
        group: the layers; `shapes`: `(out, in)` of each.
        scheme: their number formats; None: 16 bits.
        head: rows of one head of attention, of which a device has at least one; 1 in other layers.
    """

    group: Group
    shapes: tuple[Shape, ...]
    scheme: Scheme | None
    head: int = 1

    @property
    def inputs(self) -> int:
        """Columns of the matrix."""
        return self.shapes[0][1]

    def share(self, devices: int) -> tuple[list[int], int]:
        """Rows of each layer, and columns, that one of several devices has."""
        rows = [max(self.head, out // devices) if self.group.split == "outputs" else out for out, _ in self.shapes]
        return rows, self.inputs // devices if self.group.split == "inputs" else self.inputs


def fused_layers(model: nn.Module, groups: Iterable[Group], schemes: Mapping[str, Scheme]) -> list[FusedLayer]:
    """The layers of groups, those of equal shapes and formats once.

    Args:
        model: the model, shapes only; `schemes`: quantized linear layer (memory name) -> its number formats.
    """
    layers: dict[tuple, FusedLayer] = {}
    for group in groups:
        first = group.linears[0]
        weights = [model.get_parameter(f"{name}.weight") for name in group.linears]
        shapes = tuple((weight.shape[0], weight.shape[1]) for weight in weights)
        head: Any = getattr(model.get_submodule(first.rpartition(".")[0]), "head_dim", 1)
        layer = FusedLayer(group, shapes, schemes.get(first), head)
        layers.setdefault((group.kind, shapes, layer.scheme), layer)
    return list(layers.values())


def fits(layer: FusedLayer, devices: int) -> bool:
    """Whether no group of a layer's columns, and no block of its weights, is torn."""
    weights = layer.scheme.weights if layer.scheme else None
    if weights is None or weights.group <= 0:
        return True
    rows, columns = layer.share(devices)
    if devices > 1 and layer.group.split == "inputs" and columns % weights.group:
        return False
    if weights.rows == 1:
        return True
    whole = (devices > 1 and layer.group.split == "outputs") or layer.group.expert is not None
    return all(count % weights.rows == 0 for count in (rows if whole else rows[:-1]))


def fitting_size(layers: Iterable[FusedLayer], devices: int) -> int | None:
    """The largest size of groups, below the layers' own, that no layer is torn in; -1: one scale per row; None: none helps.

    NVFP4 has groups of 16 and FP8 blocks of 128 x 128, which no option changes.
    """
    quantized = [layer for layer in layers if layer.scheme and layer.scheme.weights.group > 0]
    formats = {layer.scheme.weights for layer in quantized if layer.scheme}
    if any(weights.kind == "float" for weights in formats):
        return None
    largest = max((weights.group for weights in formats), default=0)
    sizes = (size for size in SIZES if size < largest)
    shares = [layer.share(devices)[1] for layer in quantized]
    return next((size for size in sizes if not any(columns % size for columns in shares)), -1)


def partition_problem(layers: Sequence[FusedLayer], devices: int, target: str | None = None) -> str | None:
    """Why vLLM cannot share layers out among `devices`, and what to do; None where it can."""
    torn = next((layer for layer in layers if not fits(layer, devices)), None)
    if torn is not None and torn.scheme:
        rows, columns = torn.share(devices)
        weights, name = torn.scheme.weights, torn.group.linears[0]
        if torn.group.split == "inputs" and columns % weights.group:
            part, pieces = f"{columns:,} of the {torn.inputs:,} inputs", f"groups of {weights.group}"
        else:
            count, whole = next(
                (count, out) for count, (out, _) in zip(rows, torn.shapes, strict=True) if count % weights.rows
            )
            part, pieces = f"{count:,} of {whole:,} outputs", f"blocks of {weights.rows}"
        return (
            f"on each of {devices} devices {name} has {part}, which {pieces} do not divide, so that vLLM refuses it; "
            f"{_instead(layers, torn, devices)}"
        )
    return _limit_problem(layers, devices, targets.get_target(target)) if target else None


def tower_problem(model: nn.Module, spec: ModelSpec, schemes: Mapping[str, Scheme], devices: int) -> str | None:
    """Why vLLM cannot split a model's vision tower; None where it can, or gives every device the whole of it.

    Args:
        model: the model, shapes only; `schemes`: quantized linear layer (memory name) -> its number formats.
    """
    if spec.vision_whole:
        return None
    layers = fused_layers(model, models.vision_linears(model, spec), schemes)
    torn = next((layer for layer in layers if not fits(layer, devices)), None)
    for layer in layers:
        sides = [layer.inputs] if layer.group.split == "inputs" else [rows for rows, _ in layer.shapes]
        if layer is torn or any(side % devices for side in sides):
            return f"{layer.group.linears[0]} of the vision tower cannot be split over {devices} devices"
    return None


def device_counts(layers: Sequence[FusedLayer], limit: Iterable[int] = DEVICES) -> list[int]:
    """Numbers of devices, of those in `limit`, that layers can be split among without a group being torn."""
    return [devices for devices in limit if all(fits(layer, devices) for layer in layers)]


def stored_layers(path: Path) -> list[FusedLayer]:
    """The decoder's layers of the quantized checkpoint in a folder. Raises `UserError` for one that is not read."""
    with models.quiet_transformers():
        stored = Stored.of(path)
    return fused_layers(stored.meta_model, models.resolve_groups(stored.meta_model, stored.spec), stored.schemes)


def _limit_problem(layers: Sequence[FusedLayer], devices: int, machine: Target) -> str | None:
    """Why a machine's kernels do not take what one device has of a layer; None where they do."""
    for layer in layers:
        limit = machine.limits.get(targets.format_key(layer.scheme).removesuffix("-static"))
        if layer.scheme is None or layer.group.expert is not None or limit is None:
            continue
        rows, columns = layer.share(devices)
        if why := limit.problem(sum(rows), columns, layer.scheme.weights.group):
            part = f"what each of {devices} devices has of {layer.group.linears[0]}"
            return f"{machine.title} does not run {part} as {label(layer.scheme)}: {why}; use fewer devices"
    return None


def _instead(layers: Sequence[FusedLayer], torn: FusedLayer, devices: int) -> str:
    """What does not tear a layer: the largest size of groups that fits, fewer devices, or experts that stay whole."""
    size, fewer = fitting_size(layers, devices), device_counts(layers, (n for n in DEVICES if n < devices))
    about = " (one scale per row, which costs accuracy below 8 bits)" if size == -1 else ""
    sizes = [f"quantize with --set options.group_size={size}{about}"] if size else []
    whole = ["serve with --enable-expert-parallel, which shares experts out whole"]
    devices_text = [f"use --tp {fewer[-1]}"] if fewer else []
    ways = [*sizes, *devices_text, *(whole if torn.group.expert is not None else [])]
    return ", or ".join(ways) or "use another scheme"
