"""Choose the samples of a suite that are asked."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence

from PIL import Image

from vlmcompress.data.samples import Sample
from vlmcompress.errors import UserError

WITHOUT_FAMILY = "other"


def stratified(samples: Sequence[Sample], limit: int | None, seed: int) -> list[Sample]:
    """Choose at most `limit` samples: families in proportion (largest remainders), in a family by a hash of the id."""
    if limit is None or limit >= len(samples):
        return list(samples)
    if limit < 1:
        raise UserError(f"--limit {limit}: must be at least 1")
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.family or WITHOUT_FAMILY, []).append(sample)
    shares = {name: limit * len(group) / len(samples) for name, group in groups.items()}
    quota = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (quota[name] - shares[name], name))
    for name in by_remainder[: limit - sum(quota.values())]:
        quota[name] += 1
    kept: set[str] = set()
    for name, group in groups.items():
        ranked = sorted(group, key=lambda s: hashlib.sha256(f"{seed} {s.id}".encode()).digest())
        kept |= {s.id for s in ranked[: quota[name]]}
    return [s for s in samples if s.id in kept]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
