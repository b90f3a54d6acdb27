"""Whether vLLM can split the quantized layers of a checkpoint over devices (tensor parallelism).

If a layer's inputs are split (`o`, `down`, `fc2`, ...), each of `n` devices has `in / n` columns, which must be whole scale
groups; of other layers each device has rows, which only matters for FP8 blocks of rows and columns. Sources: vLLM 0.32
`distributed/utils.py` (`verify_group_size_divides_partition`), `quantization/utils/fp8_utils.py` (`validate_fp8_block_shape`),
`compressed_tensors_wNa16.py` (scales per row are copied to all devices). The target's kernels must support the part of one
device.
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

SIZES = (128, 64, 32)  # group sizes of vLLM's kernels for NVIDIA GPUs, besides one scale per row
DEVICES = (1, 2, 4, 8)
"""Numbers of devices for launch files."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class FusedLayer:
    """Linear layers that an engine runs as one matrix.

    Attributes:
        group: the layers; `shapes`: `(out, in)` of each.
        scheme: their number formats; None: 16 bits.
        head: rows of one attention head, as a device has at least one head; 1 in other layers.
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
        """Rows of each layer, and columns, on one of `devices` devices."""
        rows = [max(self.head, out // devices) if self.group.split == "outputs" else out for out, _ in self.shapes]
        return rows, self.inputs // devices if self.group.split == "inputs" else self.inputs


def fused_layers(model: nn.Module, groups: Iterable[Group], schemes: Mapping[str, Scheme]) -> list[FusedLayer]:
    """The fused layers of groups, without duplicates of equal shapes and formats.

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
    """Whether the split divides no scale group and no block of a layer."""
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
    """The largest group size, below the current one, that the split does not divide; -1: one scale per row; None: none.

    NVFP4's groups of 16 and FP8's blocks of 128 x 128 cannot be changed by an option.
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
    """Why vLLM cannot split layers over `devices` devices, and what to do; None if it can."""
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
    """Why vLLM cannot split a model's vision tower; None if it can, or replicates it on every device.

    Args:
        model: the model, shapes only; `schemes`: quantized linear layer (memory name) -> its number formats.
    """
    if spec.tower.whole:
        return None
    layers = fused_layers(model, models.vision_linears(model, spec), schemes)
    torn = next((layer for layer in layers if not fits(layer, devices)), None)
    for layer in layers:
        sides = [layer.inputs] if layer.group.split == "inputs" else [rows for rows, _ in layer.shapes]
        if layer is torn or any(side % devices for side in sides):
            return f"{layer.group.linears[0]} of the vision tower cannot be split over {devices} devices"
    return None


def device_counts(layers: Sequence[FusedLayer], limit: Iterable[int] = DEVICES) -> list[int]:
    """The numbers of devices in `limit` over which the layers can be split without dividing a group."""
    return [devices for devices in limit if all(fits(layer, devices) for layer in layers)]


def stored_layers(path: Path) -> list[FusedLayer]:
    """The decoder's layers of the quantized checkpoint in a folder. Raises `UserError` if it cannot be read."""
    with models.quiet_transformers():
        stored = Stored.of(path)
    return fused_layers(stored.meta_model, models.resolve_groups(stored.meta_model, stored.spec), stored.schemes)


def _limit_problem(layers: Sequence[FusedLayer], devices: int, machine: Target) -> str | None:
    """Why a machine's kernels do not support one device's part of a layer; None if they do."""
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
    """Alternatives that do not divide a group: a smaller group size, fewer devices, or expert parallelism."""
    size, fewer = fitting_size(layers, devices), device_counts(layers, (n for n in DEVICES if n < devices))
    about = " (one scale per row, which costs accuracy below 8 bits)" if size == -1 else ""
    sizes = [f"quantize with --set options.group_size={size}{about}"] if size else []
    whole = ["serve with --enable-expert-parallel, which shares experts out whole"]
    devices_text = [f"use --tp {fewer[-1]}"] if fewer else []
    ways = [*sizes, *devices_text, *(whole if torn.group.expert is not None else [])]
    return ", or ".join(ways) or "use another scheme"
