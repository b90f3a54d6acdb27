"""Samples: images and conversations, read from data sets and converted to model inputs with the modality of each token."""

# ruff: noqa: F401  # what is imported here is what the package offers

from vlmcompress.models.data.encode import encode, encode_prompt, encode_usable
from vlmcompress.models.data.provenance import data_hash, provenance
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import (
    Preview,
    Reading,
    Samples,
    bundled_data,
    load_mixed,
    load_samples,
    preview,
    preview_mixed,
)
