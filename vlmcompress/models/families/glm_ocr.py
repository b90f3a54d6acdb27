"""GLM-OCR: the decoder of GLM-4.1V, and a tower like its own with norms on queries and keys.

Published checkpoints have an MTP head as the decoder's next block, 16, with an embedding and an output head of its own, which
transformers ignores. Its tensors follow from vLLM's class (`models/glm_ocr_mtp.py`) and from sizes: a published checkpoint has
526 tensors with 1,325,258,240 numbers (docs/GLM-OCR_model.md of github.com/zhutao100/GLM-OCR-Swift), transformers' class 510,
and the difference is to the number such a block's.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models._spec import MtpHead
from vlmcompress.models.families import glm4v

SPEC = replace(
    glm4v.SPEC,
    family="glm-ocr",
    model_types=("glm_ocr",),
    mtp=MtpHead(glm4v.SPEC.layers, "num_nextn_predict_layers", joint="eh_proj", engine="model.layers"),
    engine=replace(glm4v.SPEC.engine, tool_calls=None),
)
