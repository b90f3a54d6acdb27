"""Number formats as data: what a weight matrix and a layer's input are stored or rounded as."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
FLOAT4_MAX = 6.0
BLOCK = 16  # columns per scale in NVFP4
MX_BLOCK = 32  # columns per scale in microscaling formats


@dataclass(frozen=True)
class Format:
    """How a weight matrix `[out, in]` is stored.

    Args:
        kind: "int" (signed, 2 to 8 bits) or "float" (8 bits: float8_e4m3fn; 4 bits: NVFP4 or MXFP4).
        bits: bits per weight.
        group: columns that share a scale; -1 is one scale per output row, 0 one scale per matrix. Floats in groups of 32 are
            MXFP8 and MXFP4, 4-bit floats in groups of 16 are NVFP4.
        symmetric: whether there is no zero point.
        rows: output rows per scale, for scales of blocks `rows` x `group`; blocks at the edges may be smaller. float8 only.
    """

    kind: Literal["int", "float"]
    bits: int
    group: int
    symmetric: bool = True
    rows: int = 1

    def __post_init__(self) -> None:
        _require_kind(self.kind, self.bits)
        if self.rows != 1 and (self.rows < 1 or self.group < 1 or self.kind != "float" or self.bits != 8):
            raise ValueError(f"only float8 with column groups can share a scale between rows, got rows {self.rows!r}")
        if type(self.group) is not int or self.group < -1:
            raise ValueError(f"group_size must be positive, -1 (per row) or 0 (per matrix), got {self.group!r}")
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"symmetric must be true or false, got {self.symmetric!r}")
        if self.kind == "float" and not self.symmetric:
            raise ValueError("floats have no zero point: symmetric must be true")
        if self.fp4 and self.group not in (BLOCK, MX_BLOCK):
            raise ValueError(
                f"4-bit floats have a scale for each {BLOCK} columns (NVFP4) or {MX_BLOCK} (MXFP4), got group_size "
                f"{self.group!r}"
            )

    @property
    def fp4(self) -> bool:
        """Whether the codes are 4-bit floats."""
        return self.kind == "float" and self.bits == 4

    @property
    def nvfp4(self) -> bool:
        """Whether this is NVFP4, whose scales are float8 and relative to one number for the matrix."""
        return self.fp4 and self.group == BLOCK

    @property
    def mx(self) -> bool:
        """Whether this is a microscaling format, MXFP4 or MXFP8, whose scales are powers of two."""
        return self.kind == "float" and self.group == MX_BLOCK and self.rows == 1

    @property
    def name(self) -> str:
        """Common name of the format: int, fp8, nvfp4, mxfp4 or mxfp8; the last three names imply how scales are stored."""
        if self.kind == "int":
            return "int"
        return "nvfp4" if self.nvfp4 else f"{'mx' if self.mx else ''}fp{self.bits}"

    @cached_property
    def qmin(self) -> float:
        """Smallest code."""
        return float(-(2 ** (self.bits - 1))) if self.kind == "int" else -self.qmax

    @cached_property
    def qmax(self) -> float:
        """Largest code."""
        if self.kind == "float":
            return FLOAT4_MAX if self.bits == 4 else FLOAT8_MAX
        return float(2 ** (self.bits - 1) - 1)

    @cached_property
    def max_codes(self) -> tuple[float, ...]:
        """Codes that the largest magnitude of a symmetric group may be mapped to; the first one wins ties.

        In microscaling formats this is before the scale is rounded to a power of two, which multiplies it by 7/8 to 1.75.
        """
        if self.kind == "int":
            return self.qmax + 0.5, self.qmax
        if self.mx:
            return (4.0, 2.0, 8.0) if self.bits == 4 else (256.0,)
        return (FLOAT4_MAX, 4.0) if self.bits == 4 else (FLOAT8_MAX,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of codes before an exporter packs them."""
        return torch.int8 if self.kind == "int" else FLOAT8

    def n_groups(self, columns: int) -> int:
        """Number of scales per row of a matrix of `columns` columns. Raises ValueError if the group size does not divide it."""
        if self.group <= 0:
            return 1
        if self.rows > 1:
            return math.ceil(columns / self.group)
        if columns % self.group:
            if self.nvfp4 or self.mx:
                raise ValueError(
                    f"{self.name.upper()} has a scale per {self.group} inputs, which does not divide the layer's {columns}"
                )
            raise ValueError(
                f"group size {self.group} does not divide {columns} input features; "
                f"choose a group_size that does (-1 always does), or skip the layer"
            )
        return columns // self.group


@dataclass(frozen=True)
class ActFormat:
    """Format of a linear layer's input as an engine quantizes it: with with a scale per token (dynamic) or one fixed scale
    (static).

    4-bit floats are NVFP4: the engine computes a scale per 16 channels of a token (dynamic), relative to a fixed global scale.
    With `mx` they are MXFP4 or MXFP8: the engine computes a power of two per 32 channels of a token.
    """

    kind: Literal["int", "float"]
    bits: int
    dynamic: bool
    mx: bool = False

    def __post_init__(self) -> None:
        _require_kind(self.kind, self.bits)
        if (self.mx or self.nvfp4) and not self.dynamic:
            raise ValueError("activations in blocks (NVFP4, MXFP4, MXFP8) have dynamic scales")

    @property
    def nvfp4(self) -> bool:
        """Whether this is NVFP4."""
        return self.kind == "float" and self.bits == 4 and not self.mx

    @property
    def calibrated(self) -> bool:
        """Whether calibration fixes a number for the layer's input: its scale, or for NVFP4 the divisor `448 * 6 / max|X|`."""
        return not self.dynamic or self.nvfp4


@dataclass(frozen=True)
class Scheme:
    """The format of the weights and, unless they stay in 16 bits, of the activations."""

    weights: Format
    activations: ActFormat | None = None


def label(scheme: Scheme | None) -> str:
    """Name a scheme in a few characters, e.g. `w4a16 int g128 asym`."""
    if scheme is None:
        return "bf16"
    fmt, act = scheme.weights, scheme.activations
    inputs = f"a{act.bits if act else 16}"
    if fmt.nvfp4 or fmt.mx:
        return f"w{fmt.bits}{inputs} {fmt.name}"
    grouped = f"{fmt.rows}x{fmt.group}" if fmt.rows > 1 else f"g{fmt.group}"
    scales = {-1: "channel", 0: "tensor"}.get(fmt.group, grouped)
    extra = ("" if fmt.symmetric else " asym") + (" static" if act and not act.dynamic else "")
    mixed = "-fp8" if act and fmt.kind == "int" and act.kind == "float" else ""
    return f"w{fmt.bits}{inputs} {fmt.name}{mixed} {scales}{extra}"


def weight_only(bits: int, group_size: int, symmetric: bool = True) -> Scheme:
    """Integer weights, 16-bit activations. Raises ValueError for group size 0: engines have no kernel for one scale per
    matrix."""
    if group_size == 0:
        raise ValueError("group_size must be a positive number or -1 (one scale per row), got 0")
    return Scheme(Format("int", bits, group_size, symmetric))


def _require_kind(kind: str, bits: int) -> None:
    if kind not in ("int", "float"):
        raise ValueError(f"kind must be 'int' or 'float', got {kind!r}")
    if kind == "int" and (type(bits) is not int or not 2 <= bits <= 8):
        raise ValueError(f"bits must be a whole number from 2 to 8, got {bits!r}")
    if kind == "float" and bits not in (4, 8):
        raise ValueError(f"bits must be 8 or 4 for a float format, got {bits!r}")


NVFP4 = Format("float", 4, BLOCK)
MXFP4 = Format("float", 4, MX_BLOCK)
MXFP8 = Format("float", 8, MX_BLOCK)
