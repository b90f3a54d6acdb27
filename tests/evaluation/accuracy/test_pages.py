"""The suite `pages`, from end to end: pages drawn here, the user's and OmniDocBench's, answered by what they show or less."""

from __future__ import annotations

import json
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


def test_what_is_asked_and_scored(tmp_path: Path) -> None:
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


def test_omnidocbench(tmp_path: Path) -> None:
    model, data = checkpoint(tmp_path / "model"), tmp_path / "OmniDocBench"
    (data / "images").mkdir(parents=True)
    picture(data / "images", "book_1.png")
    blocks = [
        {
            "category_type": "table",
            "order": 2,
            "html": "<table><tr><td>a</td><td>b</td></tr></table>",
            "latex": "a & b",
        },
        {"category_type": "title", "order": 1, "text": "On paint", "attribute": {"text_language": "text_en"}},
        {"category_type": "text_block", "order": 3, "text": "hidden", "ignore": True},
        {"category_type": "equation_isolated", "order": 4, "latex": "$$a = b$$", "attribute": {"with_span": False}},
        {"category_type": "page_number", "order": None, "text": "17"},
        {"category_type": "figure", "order": 5, "poly": [1.0]},
    ]
    about = {"image_path": "images/book_1.png", "page_attribute": {"data_source": "book"}}
    file = data / "OmniDocBench.json"
    file.write_text(json.dumps([{"layout_dets": blocks, "page_info": about, "extra": {"relation": []}}]))
    suite = load_suite("omnidocbench", data, candidate=model, baseline=model)
    engine = Echo(lambda _: "# On paint\n\n| a | b |\n|---|---|\n\n$$a = b$$")
    (sample,) = ask_suite(model, suite, engine).samples
    assert (sample.id, sample.family, sample.score) == ("book_1.png", "book", 1.0)
    assert "to Markdown in reading order" in sample.question and suite.max_tokens == 4096
    (data / "images" / "book_1.png").unlink()
    with pytest.raises(UserError, match=r"1 of 1 images are missing, e.g. book_1.png"):
        load_suite("omnidocbench", data, candidate=model, baseline=model)
    for content, message in (('[{"page_info": 1}]', "not in the form of"), ("[", "can't be read")):
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            load_suite("omnidocbench", data, candidate=model, baseline=model)
    file.unlink()
    with pytest.raises(UserError, match="OmniDocBench.json can't be read"):
        load_suite("omnidocbench", data, candidate=model, baseline=model)
