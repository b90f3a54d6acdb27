"""AutoGPTQ's format (v1): symmetric weights of 4 or 8 bits.

Tensors and config are described in `_gptq`. Zero points are stored minus 1, so that 0 and 16 have the same code, which readers
interpret differently. So only symmetric weights are written, whose zero point is always 8 or 128.
"""

from __future__ import annotations

from typing_extensions import override

from vlmcompress.export.formats._gptq import GptqFiles
from vlmcompress.numerics import Scheme
from vlmcompress.utils.errors import UserError


class Gptq(GptqFiles):
    """Version 1 is AutoGPTQ's."""

    METHOD = "gptq"
    OFFSET, VERSION = 1, "gptq"

    @override
    def storage(self, scheme: Scheme) -> str:
        weights = scheme.weights
        if scheme.activations is not None or weights.kind != "int" or weights.bits not in (4, 8) or weights.group == 0:
            raise UserError(
                "GPTQ files hold integer weights of 4 or 8 bits with 16-bit activations; write compressed-tensors"
            )
        if not weights.symmetric:
            raise UserError(
                "GPTQ files of version 1 hold symmetric weights only; write gptq-v2, awq or compressed-tensors"
            )
        return "gptq"


FORMAT = Gptq()
