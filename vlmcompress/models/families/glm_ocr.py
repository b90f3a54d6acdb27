"""GLM-OCR: the decoder of GLM-4.1V, and a tower like its own with norms on queries and keys.

Published checkpoints have a draft head as the decoder's next block. transformers ignores it, and it is not copied.
"""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.models.families import glm4v

SPEC = replace(glm4v.SPEC, family="glm-ocr", model_types=("glm_ocr",), tool_calls=None)
