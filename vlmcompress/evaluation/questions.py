"""The questions of an evaluation: which samples are asked, as chat requests whose images are files."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vlmcompress.calibration.rows import Sample
from vlmcompress.calibration.sources import bundled, load_samples
from vlmcompress.engines.vllm.runner import Request
from vlmcompress.errors import UserError

WITHOUT_FAMILY = "other"


def load(data: str | Path | None, candidate: Path, baseline: Path, seed: int) -> tuple[list[Sample], Path]:
    """All samples of the source; each has an answer."""
    source = Path(data) if data else bundled(baseline, "test") or bundled(candidate, "test")
    if source is None:
        raise UserError(f"no data set is bundled with {baseline}; give --data FILE.jsonl (image, question, answer)")
    samples = load_samples(source, samples=None, seed=seed, check_images=False)
    without = next((sample for sample in samples if not (sample.answer or "").strip()), None)
    if without is not None:
        raise UserError(f"{without.name} has no answer, so nothing can be scored; give every row an `answer`")
    return samples, source


def stratified(samples: Sequence[Sample], limit: int | None, seed: int) -> list[Sample]:
    """At most `limit` samples: families in proportion (largest remainders), inside a family by a hash of the id."""
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


def write_requests(samples: Sequence[Sample], media: Path) -> tuple[list[Request], list[str]]:
    """The samples as chat requests, their images as PNG files in `media` (equal images once).

    Returns:
        The requests, and for each a name of its set of images (without images: of the sample itself).
    """
    requests, names = [], []
    for sample in samples:
        files = []
        for image in sample.images:
            encoded = png(image)
            file = media / f"{hashlib.sha256(encoded).hexdigest()[:32]}.png"
            if not file.exists():
                _write(file, encoded)
            files.append(file)
        requests.append(Request(sample.id, _messages(sample, [file.as_uri() for file in files])))
        names.append("+".join(file.stem for file in files) or f"text:{sample.id}")
    return requests, names


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UserError(f"can't write images for the engine to {file.parent} ({error.strerror}); set TMPDIR") from error


def _messages(sample: Sample, urls: list[str]) -> list[dict]:
    """OpenAI-style messages up to the question, each image part in its place with its address."""
    images = iter(urls)
    turns = sample.prompt()
    for turn in turns:
        turn["content"] = [
            {"type": "image_url", "image_url": {"url": next(images)}} if part["type"] == "image" else part
            for part in turn["content"]
        ]
    return turns


def fingerprint(samples: Sequence[Sample], images: Sequence[str]) -> str:
    """One hash over what was asked: ids, questions, answers and pixels."""
    digest = hashlib.sha256()
    for sample, image in zip(samples, images, strict=True):
        digest.update(json.dumps([sample.id, sample.question, sample.answer, sample.family, image]).encode())
    return digest.hexdigest()


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
