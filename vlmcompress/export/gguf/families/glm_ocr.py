"""GLM-OCR: llama.cpp has it as GLM-4.1V, without positions of patches. Its MTP head is left out, as llama.cpp skips it."""

from __future__ import annotations

from dataclasses import replace

from vlmcompress.export.gguf.families import glm4v
from vlmcompress.export.gguf.families._parts import LANGUAGE

FAMILY = replace(glm4v.FAMILY, unused=(f"{LANGUAGE}.layers.{{blocks}}.",))
