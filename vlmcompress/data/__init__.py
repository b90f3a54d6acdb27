"""Samples: images and conversations, read from where they are and turned into model inputs with the modality of each token."""

from vlmcompress.data.encode import encode, encode_prompt, render
from vlmcompress.data.provenance import data_hash, provenance
from vlmcompress.data.samples import Sample
from vlmcompress.data.sources import Preview, bundled, load_mixed, load_samples, preview, refuse_missing

__all__ = [
    "Preview",
    "Sample",
    "bundled",
    "data_hash",
    "encode",
    "encode_prompt",
    "load_mixed",
    "load_samples",
    "preview",
    "provenance",
    "refuse_missing",
    "render",
]
