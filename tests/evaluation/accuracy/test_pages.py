"""The suite `pages`, from end to end: pages drawn here and the user's, answered by what they show or less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kit.echo import Echo, checkpoint, picture, question, write_rows
from vlmcompress.engines import Request
from vlmcompress.evaluation.accuracy import pages
from vlmcompress.evaluation.accuracy.ask import ask_suite
from vlmcompress.evaluation.accuracy.tasks import load_suite
from vlmcompress.evaluation.accuracy.transcription import is_table, plain
from vlmcompress.utils.errors import UserError


@pytest.mark.parametrize("family", pages.FAMILIES)
def test_a_page_shows_its_text(family: str) -> None:
    """The same page always; as dark as its text is long, and nothing at its edges is cut off."""
    image, text = pages.draw(family, 3), pages.text(family, 3)
    assert image.mode == "RGB" and image.tobytes() == pages.draw(family, 3).tobytes()
    assert image.tobytes() != pages.draw(family, 4).tobytes()
    assert (plain(text) == "") == (family == "blank") and is_table(text) == (family == "table")
    gray = np.asarray(image.convert("L"), dtype=float)
    dark = gray < np.median(gray) - 60
    characters = len(plain(text).replace(" ", ""))
    assert 15 * characters <= dark.sum() <= 160 * characters
    assert not dark[:6].any() and not dark[-6:].any() and not dark[:, :6].any() and not dark[:, -6:].any()


def test_pages_have_questions_and_scores(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    suite = load_suite("pages", candidate=model, baseline=model, limit=14)
    assert suite.available == sum(pages.FAMILIES.values()) and suite.metric == "edit_similarity"

    def reference(request: Request) -> str:
        family, _, number = request.id.rpartition("-")
        return pages.text(family, int(number))

    def damaged(request: Request) -> str:
        text = reference(request)
        return text if is_table(text) else "".join("#" if i % 10 == 4 else c for i, c in enumerate(plain(text)))

    right = ask_suite(model, suite, Echo(reference)).samples
    assert {sample.family for sample in right} == {*pages.FAMILIES}
    assert [(sample.score, sample.parsed) for sample in right] == [(1.0, True)] * 14
    for sample in ask_suite(model, suite, Echo(damaged)).samples:
        if sample.family not in ("table", "blank"):
            assert sample.score == pytest.approx(0.9, abs=0.03)
    silent = Echo(lambda _: "")
    nothing = ask_suite(model, suite, silent).samples
    assert {sample.family for sample in nothing if sample.score or sample.parsed} == {"blank"}
    assert {question(request) for request in silent.asked} == {pages.ASK, pages.ASK_TABLE}
    assert suite.pictures(right[0].id)[0].startswith(b"\x89PNG")


def test_pages_of_the_user(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    rows = [{"image": picture(tmp_path, f"{name}.png", colour), "answer": text} for name, colour, text in (
        ("sign", "red", "Wet paint"), ("blank", "white", ""), ("table", "blue", "| a | b |\n| 1 | 2 |"))]  # fmt: skip
    rows[0]["question"] = "OCR:"
    file = write_rows(tmp_path / "mine.jsonl", *rows)
    engine = Echo(lambda request: "Wet paint" if question(request) == "OCR:" else "| a | b |\n| 1 | 7 |")
    suite = load_suite("pages", file, candidate=model, baseline=model)
    assert [sample.score for sample in ask_suite(model, suite, engine).samples] == [1, 0, 0.75]
    write_rows(file, {"image": rows[0]["image"], "answer": None})
    with pytest.raises(UserError, match="has rows without an answer; write an empty text"):
        load_suite("pages", file, candidate=model, baseline=model)
    write_rows(file, {"image": rows[0]["image"], "text": "Wet paint"})
    with pytest.raises(UserError, match="has no column answer"):
        load_suite("pages", file, candidate=model, baseline=model)
