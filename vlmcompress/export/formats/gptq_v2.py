"""GPTQModel's format (v2): GPTQ's with exact zero points, symmetric or asymmetric, of 2, 4 or 8 bits.

Tensors and config are described in `_gptq`; `vlmcompress.export.readers` lists what engines read.
"""

from __future__ import annotations

from typing_extensions import override

from vlmcompress.export.formats._gptq import GptqFiles
from vlmcompress.numerics import Scheme
from vlmcompress.utils.errors import UserError


class GptqV2(GptqFiles):
    """Version 2 is GPTQModel's."""

    METHOD = "gptq-v2"
    OFFSET, VERSION = 0, "gptq_v2"

    @override
    def storage(self, scheme: Scheme) -> str:
        weights = scheme.weights
        if (
            scheme.activations is not None
            or weights.kind != "int"
            or weights.bits not in (2, 4, 8)
            or weights.group == 0
        ):
            raise UserError(
                "GPTQ files hold integer weights of 2, 4 or 8 bits with 16-bit activations; write compressed-tensors"
            )
        return "gptq_v2"


FORMAT = GptqV2()
