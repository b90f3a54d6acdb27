"""Calibration: read samples, turn them into model inputs with modality masks, run the model over them."""

from vlmcompress.calibration.encode import encode, encode_prompt, render
from vlmcompress.calibration.mix import load_mixed
from vlmcompress.calibration.provenance import data_hash, provenance
from vlmcompress.calibration.rows import Sample
from vlmcompress.calibration.sources import bundled, load_samples

__all__ = [
    "Sample",
    "bundled",
    "data_hash",
    "encode",
    "encode_prompt",
    "load_mixed",
    "load_samples",
    "provenance",
    "render",
]
