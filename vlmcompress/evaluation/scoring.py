"""Rules by which answers are scored, each as its source states it. Scores are in 0 to 1."""

from __future__ import annotations


def normalise(text: str) -> str:
    """What is compared: case-folded, spaces collapsed, one final full stop dropped."""
    return " ".join(text.casefold().split()).removesuffix(".").rstrip()
