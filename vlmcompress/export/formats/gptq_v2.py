"""GPTQModel's format (v2): GPTQ's with exact zero points, symmetric or asymmetric, of 2, 4 or 8 bits.

Tensors and config are described in `_gptq`; `vlmcompress.export.readers` lists what engines read.
"""

from __future__ import annotations

from functools import partial

from vlmcompress.export.formats import _gptq
from vlmcompress.export.formats._gptq import problems, quantizes, require_supported, scheme_in, specs
from vlmcompress.numerics import Scheme
from vlmcompress.utils.errors import UserError

__all__ = ["problems", "quantizes", "require_supported", "scheme_in", "specs"]

FORMAT = "gptq-v2"
KV_SCALES = None

tensors = partial(_gptq.tensors, offset=0)
read = partial(_gptq.read, offset=0)
configs = partial(_gptq.configs, version="gptq_v2")


def storage(scheme: Scheme) -> str:
    """The name of the storage format of a scheme. Raises `UserError` for an unsupported scheme."""
    weights = scheme.weights
    if scheme.activations is not None or weights.kind != "int" or weights.bits not in (2, 4, 8) or weights.group == 0:
        raise UserError(
            "GPTQ files hold integer weights of 2, 4 or 8 bits with 16-bit activations; write compressed-tensors"
        )
    return "gptq_v2"
