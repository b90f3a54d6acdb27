"""Choose the samples that a reader should see first, and make thumbnails of their pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from PIL import Image

from vlmcompress.common.messages import reason
from vlmcompress.errors import UserError
from vlmcompress.results import Scored

THUMBNAIL = 360  # pixels


def changed(samples: Sequence[Scored]) -> list[Scored]:
    """Sort samples with differing answers: the largest losses first, then gains, then changes in words only; families in
    turn, so that one weak family doesn't fill the page."""
    turns: dict[tuple[int, str, str], int] = {}
    ranked = []
    for sample in samples:
        if sample.baseline == sample.candidate:
            continue
        key = (kind(sample), sample.suite, sample.family)
        turns[key] = turns.get(key, -1) + 1
        size = -abs(sample.candidate_score - sample.baseline_score)
        ranked.append(((key[0], turns[key], size, sample.suite, sample.family, sample.id), sample))
    return [sample for _, sample in sorted(ranked, key=lambda item: item[0])]


def kind(sample: Scored) -> int:
    """Rank a sample: 0 if it was lost, 1 if it was gained, 2 if the score is the same."""
    change = sample.candidate_score - sample.baseline_score
    return 0 if change < 0 else 1 if change > 0 else 2


def thumbnail(png: str) -> tuple[str, bool]:
    """Turn a PNG in base64 into a data URI; small pictures stay PNG, larger become JPEG. Also tell whether it is small."""
    with _opened(png) as image:
        if max(image.size) <= THUMBNAIL:
            return f"data:image/png;base64,{png}", max(image.size) <= THUMBNAIL // 2
        small = image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}", False


def _opened(png: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"])
        image.load()
    except Exception as error:  # decoders raise anything on damaged data
        raise UserError(f"results have a picture that is no PNG ({reason(error)}); write the report again") from error
    return image
