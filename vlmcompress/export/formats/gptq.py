"""AutoGPTQ's format (v1): symmetric weights of 4 or 8 bits.

Tensors and config are described in `_gptq`. Zero points are stored minus 1, so that 0 and 16 have the same code, which readers
interpret differently. So only symmetric weights are written, whose zero point is always 8 or 128.
"""

from __future__ import annotations

from functools import partial

from vlmcompress.export.formats import _gptq
from vlmcompress.export.formats._gptq import problems, quantizes, require_supported, scheme_in, specs
from vlmcompress.numerics import Scheme
from vlmcompress.utils.errors import UserError

__all__ = ["problems", "quantizes", "require_supported", "scheme_in", "specs"]

FORMAT = "gptq"
KV_SCALES = None

tensors = partial(_gptq.tensors, offset=1)
read = partial(_gptq.read, offset=1)
configs = partial(_gptq.configs, version="gptq")


def storage(scheme: Scheme) -> str:
    """The name of the storage format of a scheme. Raises `UserError` for an unsupported scheme."""
    weights = scheme.weights
    if scheme.activations is not None or weights.kind != "int" or weights.bits not in (4, 8) or weights.group == 0:
        raise UserError(
            "GPTQ files hold integer weights of 4 or 8 bits with 16-bit activations; write compressed-tensors"
        )
    if not weights.symmetric:
        raise UserError("GPTQ files of version 1 hold symmetric weights only; write gptq-v2, awq or compressed-tensors")
    return "gptq"
