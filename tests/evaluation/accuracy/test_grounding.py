"""Boxes and points: each form that models write is read as the same region, and what counts as a hit."""

from __future__ import annotations

import pytest

from vlmcompress.evaluation.accuracy.grounding import correct, iou, overlap, region

BOX, POINT = (0.104, 0.062, 0.25, 0.31), (0.177, 0.186)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[104,062,250,310]", BOX),
        ("The star is at [0.104, .062, 0.25, 0.31].", BOX),
        ("(104, 62), (250, 310)", BOX),
        ('```json\n[{"bbox_2d": [104, 62, 250, 310], "label": "star 2"}]\n```', BOX),
        ('{"bbox_2d": [[104, 62], [250, 310]]}', BOX),
        ('[{"box_2d": [62, 104, 310, 250], "label": "star"}]', BOX),
        ("<|box_start|>(104,62),(250,310)<|box_end|>", BOX),
        ("<ref>star</ref><box>[[104, 62, 250, 310]]</box>", BOX),
        ("<|ref|>star<|/ref|><|det|>[[104, 62, 250, 310]]<|/det|>", BOX),
        ("of the 2 dogs, first [1, 2, 3, 4], better [104 62 250 310]", BOX),
        ("<loc0064><loc0128><loc0512><loc0256> star", (0.125, 0.0625, 0.25, 0.5)),
        ("<loc0064><loc0128>", (0.125, 0.0625)),
        ("(177, 186)", POINT),
        ("click(0.177, 0.186)", POINT),
        ('{"point_2d": [177, 186]}', POINT),
        ('[{"point": [186, 177], "label": "star"}]', POINT),
        ('<point x="17.7" y="18.6" alt="star">star</point>', POINT),
        ('<points x1="17.7" y1="18.6" x2="3.5" y2="4.5" alt="star">', POINT),
        ('<points coords="1 1 177 186 2 300 400">star</points>', POINT),
        ("[.98, -.02, 1.04, .31]", (0.98, -0.02, 1.04, 0.31)),  # beyond the image
        ("I see 3 stars and 4 dogs, 2 rings, 1 cross", None),
        ("[1, 2, 3]", None),
        ("top left", None),
        ("", None),
    ],
)
def test_forms_of_models(text: str, expected: tuple | None) -> None:
    assert region(text) == (expected if expected is None else pytest.approx(expected))


def test_iou() -> None:
    assert iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert iou((0, 0, 2, 2), (0, 0, 2, 2)) == 1 and iou((0, 0, 1, 1), (1, 0, 2, 1)) == 0
    assert iou((2, 2, 0, 0), (0, 0, 2, 2)) == 0


@pytest.mark.parametrize(
    ("answer", "expected", "right", "share"),
    [
        ("[100, 0, 200, 100]", "[0.1, 0, 0.2, 0.1]", 1, 1),
        ("[100, 0, 200, 50]", "[100, 0, 200, 100]", 1, 0.5),
        ("[100, 0, 200, 49]", "[100, 0, 200, 100]", 0, 0.49),
        ("[1000, 0, 2000, 500]", "[1000, 0, 2000, 1000]", 1, 0.5),  # pixels on both sides
        ("[.9, 0, 1.06, .1]", "[.9, 0, 1, .1]", 1, 0.625),  # beyond the image
        ("[200, 0, 100, 100]", "[100, 0, 200, 100]", 0, 0),  # inverted
        ("(150, 99)", "[100, 0, 200, 100]", 1, 0),
        ("(150, 101)", "[100, 0, 200, 100]", 0, 0),
        ("[100, 0, 200, 100]", "(150, 99)", 1, 0),
        ("(150, 99)", "(150, 99)", 0, 0),
        ("none", "[100, 0, 200, 100]", None, None),
    ],
)
def test_hits(answer: str, expected: str, right: float | None, share: float | None) -> None:
    assert correct(answer, expected) == right and overlap(answer, expected) == pytest.approx(share)
    with pytest.raises(ValueError, match="has no box and no point"):
        correct(answer, "red")
