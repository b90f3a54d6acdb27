"""Number formats of weights, and all quantization arithmetic of the project: find a scale, round, dequantize.

A weight `W [out, in]` is cut into groups along `in` (`group` > 0), rows (`group` = -1) or not at all (`group` = 0).
Each piece has one scale `s` and, when asymmetric, one zero point `z`:

    q = clamp(round(W / s + z), qmin, qmax)        W ~ (q - z) * s

Conventions are those of compressed-tensors 0.19 (tested), so an exporter only packs bits:

* Integers are signed, `qmin = -2^(b-1)`, `qmax = 2^(b-1) - 1`, for symmetric *and* asymmetric formats; `q` and `z`
  are int8. Formats that store unsigned codes add `2^(b-1)` to both.
* Symmetric: `s = max|W| / qmax`, or `max|W| / (qmax + 1/2)`, whose step is finer and whose largest value lands half a step
  outside and is clamped: whichever has the smaller error, chosen for each scale. compressed-tensors uses the second
  (`max_code`); engines accept either. `z` is None.
* Asymmetric: `s = (max - min) / (2^b - 1)` over a range widened to hold 0, `z = round(qmin - min / s)`, so 0 stays
  exact.
* float8_e4m3fn: `s = max|W| / 448`, `q` is a float8 tensor.
* NVFP4, 4-bit floats (`_fp4`) in blocks of 16: a block's scale is itself stored as float8, relative to one float32 number for
  the whole matrix, the `global_scale` g. It is a divisor, as compressed-tensors stores it: `g = 448 * 6 / max|W|` and
  `s = float8(g * max|block| / 6) / g`, or with 4 instead of 6, whichever has the smaller error (Four Over Six, arXiv
  2512.02010). Functions take and return `s` in float32; a `QTensor` holds the float8 and g. Layers that an engine fuses into
  one matrix must share g. `q` is a float8 tensor as well, which holds all 4-bit floats exactly; `pack_fp4` packs it into
  nibbles.
* MXFP4 and MXFP8, 4-bit floats and float8 in blocks of 32 (`_mx`): a block's scale is a power of two: `max|block| / 4` (MXFP8:
  `/ 256`) rounded down, or up from 1.75 times the lower power on, as in compressed-tensors. MXFP4 also tries its double and
  its half, and takes the one with the smallest error. A `QTensor` stores the exponent plus 127 in a byte.
* The scale is rounded to the dtype it will be stored in *before* anything is rounded with it, so what a solver
  optimizes is what an engine computes. A scale of zero (all-zero group, or underflow) becomes that dtype's epsilon.

All arithmetic is in float32, for any input dtype.
"""

# ruff: noqa: F401  # what is imported here is what the package offers

from vlmcompress.numerics._formats import (
    FLOAT8,
    FLOAT8_MAX,
    MXFP4,
    MXFP8,
    NVFP4,
    ActFormat,
    Format,
    Scheme,
    label,
    weight_only,
)
from vlmcompress.numerics._fp4 import find_global_scale, pack_fp4, unpack_fp4
from vlmcompress.numerics._rounding import (
    as_stored,
    decode,
    dequantize,
    fake_quantize,
    find_params,
    find_ranges,
    remainder,
    residual,
    round_to_codes,
    row_chunks,
    scale_from_range,
    to_codes,
    weight_codes,
)
from vlmcompress.numerics._tensors import QTensor, quantize_with, round_activations, round_to_nearest
