"""Quantized matrices, and rounding whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vlmcompress.numerics import _fp4, _mx
from vlmcompress.numerics._formats import FLOAT8, FLOAT8_MAX, MXFP4, MXFP8, NVFP4, ActFormat, Format
from vlmcompress.numerics._rounding import as_stored, dequantize, fake_quantize, find_params, weight_codes


@dataclass(frozen=True)
class QTensor:
    """A quantized weight matrix.

    Args:
        q: codes `[out, in]`, int8 or float8_e4m3fn; NVFP4 and MXFP4: the 4-bit floats themselves as float8_e4m3fn.
        scale: `[out, n_groups]`; `[out, 1]` per row; `[1]` per matrix. In its stored dtype; NVFP4: float8_e4m3fn; MXFP4
            and MXFP8: uint8, exponent of 2 plus 127.
        zero_point: int8, shaped like `scale`; None when symmetric.
        format: what the codes mean.
        global_scale: NVFP4's float32 `[1]` that `scale` is divided by; else None.
    """

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    format: Format
    global_scale: Tensor | None = None

    @classmethod
    def of(
        cls, q: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format, global_scale: Tensor | None = None
    ) -> QTensor:
        """Make a matrix from codes and the float32 scales of `find_params`, for NVFP4 with its `global_scale`.

        Raises ValueError for NVFP4 scales that can't be stored with this `global_scale`.
        """
        if fmt.nvfp4:
            if global_scale is None:
                raise ValueError("NVFP4 needs the global scale that its scales were computed with")
            # Two-level scales: the file holds float8(s g), and the engine multiplies by s = float8 / g. Codes were computed
            # with s, so the stored scale has to reproduce exactly that number.
            stored = _fp4.stored(scale * global_scale)
            if not torch.equal(stored.float() / global_scale, scale):
                raise ValueError("the scales of NVFP4 were computed with another global scale")
            return cls(q, stored, zero_point, fmt, global_scale)
        return cls(q, _mx.stored(scale) if fmt.mx else scale, zero_point, fmt)

    @property
    def step(self) -> Tensor:
        """The factor of the codes, shaped like `scale`: the scale itself; NVFP4: float32, divided by the global scale;
        MXFP4 and MXFP8: float32 powers of two."""
        if self.format.mx:
            return _mx.steps(self.scale)
        return self.scale if self.global_scale is None else self.scale.float() / self.global_scale

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, rows: slice = slice(None)) -> Tensor:
        """The weights `[out, in]` that an engine computes with, for the given `rows` (default: all)."""
        scale, zero_point = self.scale, self.zero_point
        if self.format.rows > 1:  # [out / rows, in / group] -> [out, in / group]: the scales of each row's blocks
            scale = scale[torch.arange(len(self.q), device=scale.device)[rows] // self.format.rows]
        elif scale.dim() > 1:  # not per matrix
            scale, zero_point = scale[rows], None if zero_point is None else zero_point[rows]
        part = replace(self, q=self.q[rows], scale=scale, zero_point=zero_point)
        return dequantize(part.q, part.step, part.zero_point, self.format).to(dtype)


def round_to_nearest(
    w: Tensor,
    fmt: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    importance: Tensor | None = None,
    max_code: float | None = None,
    global_scale: Tensor | None = None,
) -> QTensor:
    """Quantize `w [out, in]` to `fmt`, each element rounded to the nearest code.

    Other arguments as in `find_params`. `global_scale`: NVFP4's; None: computed from `w` alone.
    """
    if fmt.rows > 1:
        return _round_blocks(w, fmt, scale_dtype)
    if fmt.nvfp4 and global_scale is None:
        global_scale = _fp4.find_global_scale([w])
    kwargs = {"scale_dtype": scale_dtype, "max_code": max_code, "global_scale": global_scale}
    params = find_params(w, fmt, importance=importance, **kwargs)  # type: ignore[arg-type]
    return quantize_with(w, *params, fmt, global_scale)


def quantize_with(
    w: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format, global_scale: Tensor | None = None
) -> QTensor:
    """Quantize `w [out, in]` to the nearest codes with an existing scale and zero point, for NVFP4 those of `global_scale`."""
    return QTensor.of(weight_codes(w, scale, zero_point, fmt), scale, zero_point, fmt, global_scale)


def _round_blocks(w: Tensor, fmt: Format, scale_dtype: torch.dtype) -> QTensor:
    """Quantize `w [out, in]` to float8 with a scale for each block of `fmt.rows` x `fmt.group`, cut off at the edges."""
    if not w.isfinite().all():
        raise ValueError("the weight holds NaN or Inf; check that the checkpoint is whole")
    edges = -w.shape[0] % fmt.rows, -w.shape[1] % fmt.group
    padded = torch.nn.functional.pad(w.abs(), (0, edges[1], 0, edges[0]))
    # Blocks at the edges are padded with zeros, which do not change a maximum: [out, in] -> [blocks, rows, blocks, group].
    tops = padded.unflatten(0, (-1, fmt.rows)).unflatten(2, (-1, fmt.group)).amax((1, 3)).float()  # [blocks, blocks]
    scale = as_stored(tops / fmt.qmax, fmt, scale_dtype)
    q = torch.empty(w.shape, dtype=FLOAT8, device=w.device)
    for row, steps in enumerate(scale.float()):
        rows = slice(row * fmt.rows, (row + 1) * fmt.rows)
        spread = steps.repeat_interleave(fmt.group)[: w.shape[1]]
        q[rows] = (w[rows].float() / spread).clamp_(fmt.qmin, fmt.qmax).to(FLOAT8)
    return QTensor(q, scale, None, fmt)


def round_activations(x: Tensor, fmt: ActFormat, scale: Tensor | None = None) -> Tensor:
    """Round `x [tokens, in]` to `fmt` as an engine does; returns the rounded values in float32.

    `scale`: the scale `[1]` of static activations; None: one per token. For NVFP4 it is the fixed global scale of the layer's
    input; None: the one of `x`.
    """
    x = x.float()
    if fmt.mx:
        blocks = MXFP4 if fmt.bits == 4 else MXFP8
        steps, _ = find_params(x, blocks, max_code=blocks.max_codes[0])
        return fake_quantize(x, steps, None, blocks)
    if fmt.nvfp4:
        divided = _fp4.find_global_scale([x]) if scale is None else scale.float()
        steps, _ = find_params(x, NVFP4, max_code=NVFP4.qmax, global_scale=divided)
        return fake_quantize(x, steps, None, NVFP4)
    # Dynamic scales: max|x_t| / top for each token t, not clipped and not rounded to 16 bits, as in vLLM's quantizing kernels.
    top = FLOAT8_MAX if fmt.kind == "float" else 2.0 ** (fmt.bits - 1) - 1
    if scale is None:
        scale = (x.abs().amax(-1, keepdim=True) / top).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (x / scale.float()).clamp_(-top, top)
    return (codes.to(FLOAT8).float() if fmt.kind == "float" else codes.round_()) * scale.float()
