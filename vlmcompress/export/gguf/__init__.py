"""GGUF files: tensor names and metadata of model families as data, one file per family, and the code that applies them.

Sources: llama.cpp's converter (`conversion/*.py`), its loader of towers (`tools/mtmd/clip.cpp`) and the package `gguf`. A file
is named like the family in `vlmcompress.models`, and its `FAMILY` is a `GgufFamily`.
"""

from __future__ import annotations

from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule
from vlmcompress.utils.registry import LLAMACPP as REGISTRY

__all__ = ["REGISTRY", "ModelFacts", "GgufFamily", "GgufFile", "TensorRule"]
