"""Texts of errors, short enough for one line."""

from __future__ import annotations

import re


def shortened(text: str, longest: int = 2000) -> str:
    """Cut the middle out of a text of more than `longest` characters, so that an error that quotes input stays a line."""
    half = longest // 2 - 20
    return text if len(text) <= longest else f"{text[:half]} ... ({len(text):,} characters) ... {text[-half:]}"


def reason(error: BaseException, longest: int = 300) -> str:
    """The first line of an error's text, and the next ones as long as a line ends in a colon; its type if it has no text.

    Of more than `longest` characters the sentences that fit are left, or, where not even one does, the words.
    """
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    count = next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count]).rstrip(":")
    if len(text) <= longest:
        return text
    whole = re.match(rf".{{1,{longest - 1}}}[.;](?=\s)", text)
    return whole[0].rstrip(";.") if whole else text[: longest - 4].rpartition(" ")[0] + " ..."
