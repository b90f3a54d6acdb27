"""Families of models as llama.cpp has them, one file each, as data: names of tensors and metadata of a GGUF file.

Sources: llama.cpp's converter (`conversion/*.py`), its loader of towers (`tools/mtmd/clip.cpp`) and the package `gguf`. A file
is called like the family in `vlmcompress.models`, and its `FAMILY` is a `GgufFamily`.
"""

from __future__ import annotations

from vlmcompress.export.gguf.spec import GgufFamily, GgufFile, ModelFacts, TensorRule
from vlmcompress.utils.registry import LLAMACPP as REGISTRY

__all__ = ["REGISTRY", "ModelFacts", "GgufFamily", "GgufFile", "TensorRule"]
