"""Boxes and points in answers: one reader for the forms in which models write them, and scores.

    region('[{"bbox_2d": [104, 62, 250, 310], "label": "star"}]')    (0.104, 0.062, 0.25, 0.31)
    correct("<point x='17.7' y='18.6'>", "[104,062,250,310]")        1.0

A region is a box (left, top, right, bottom) or a point (x, y) in shares of the image's width and height. Of several in a text
the last counts, of a point's repetitions in one tag the first. What models write:

| form | order | unit | models |
|---|---|---|---|
| JSON `bbox_2d`, `point_2d` | x, y | thousandths; pixels in Qwen2.5-VL | Qwen2.5-VL, Qwen3-VL, Qwen3.5 |
| JSON `box_2d`, `point` | y, x | thousandths | Gemma 3 and 4, as Gemini |
| `<loc0123>`, four or two | y, x | 1024ths | PaliGemma |
| `<point x="17.7" y="18.6">`, `<points x1=... y1=...>` | x, y | hundredths | Molmo |
| `<points coords="1 1 177 186">` | image, number, x, y | thousandths | Molmo 2 |
| numbers in brackets, as in `<box>`, `<|box_start|>`, `<|det|>` | x, y | thousandths, shares | Qwen2-VL, InternVL, LLaVA |

Where the form has no unit of its own, numbers of which one exceeds 2 are divided by 1000; shares from 1 to 2 are beyond the
image. Divided pixels are no shares, but IoU and hits do not depend on the unit as long as answer and reference have the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Region = tuple[float, ...]
METRICS = ("box_match", "iou_0.5")
"""Metrics of suites whose answers are boxes or points."""

_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)"
_BETWEEN = r"[\s,;()\[\]<>]+"
_KEYED = re.compile(rf"""["'](bbox_2d|box_2d|point_2d|point)["']\s*:\s*[\[(]+({_NUMBER}(?:[\s,\[\]()]+{_NUMBER})*)""")
_TOKENS = re.compile(r"(?:<loc\d{4}>){2,4}")
_TAGS = re.compile(rf"""<points?\s[^>]*?\bx1?\s*=\s*["']?({_NUMBER})["']?\s+y1?\s*=\s*["']?({_NUMBER})""")
_COORDS = re.compile(r"""<(?:points|tracks)[^>]*?\bcoords=["'][\d.]+ \d+ (\d{3,4}) (\d{3,4})""")
_PLAIN = {n: re.compile(rf"(?<![\w.-])({_BETWEEN.join([_NUMBER] * n)})(?![\w]|\.\d)") for n in (4, 2)}
_POINT = re.compile(rf"[\[(<]\s*({_NUMBER}\s*[,;]?\s*{_NUMBER})\s*[\])>]")


def region(text: str) -> Region | None:
    """The last box or point in a text, in the module's forms; the first form that occurs counts. None: there is none."""
    if keyed := _KEYED.findall(text):
        key, numbers = keyed[-1]
        length = 4 if key.startswith("b") else 2
        values = [float(value) for value in re.findall(_NUMBER, numbers)][:length]
        if len(values) == length:
            return _shares(_swapped(values) if key in ("box_2d", "point") else values)
    if tokens := _TOKENS.findall(text):
        values = [float(value) / 1024 for value in re.findall(r"\d{4}", tokens[-1])]
        return _swapped(values[: len(values) // 2 * 2])
    if tags := _TAGS.findall(text):
        return tuple(float(value) / 100 for value in tags[-1])
    if coords := _COORDS.findall(text):
        return tuple(float(value) / 1000 for value in coords[-1])
    if plain := _PLAIN[4].findall(text) or _POINT.findall(text):
        return _shares([float(value) for value in re.findall(_NUMBER, plain[-1])])
    return None


def _swapped(values: Sequence[float]) -> Region:
    """Coordinates in the order y, x in the order x, y."""
    return tuple(values[index ^ 1] for index in range(len(values)))


def _shares(values: Sequence[float]) -> Region:
    return tuple(value / 1000 for value in values) if max(values) > 2 else tuple(values)


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes (left, top, right, bottom); an inverted box has no area."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = sum(max(right - left, 0) * max(bottom - top, 0) for left, top, right, bottom in (a, b))
    return width * height / (areas - width * height)


def overlap(answer: str, expected: str) -> float | None:
    """IoU of the box in an answer with the expected box; 0 for a point, None where there is neither."""
    answered, target = region(answer), _target(expected)
    if answered is None:
        return None
    return iou(answered, target) if len(answered) == len(target) == 4 else 0.0


def correct(answer: str, expected: str) -> float | None:
    """1 for a box whose IoU with the expected one is at least 0.5, or a point in the expected box; else 0; None: neither.

    The threshold of RefCOCO (Yu et al. 2016, arXiv 1608.00272, section 5), the hit of pointing tasks (ScreenSpot: Cheng et al.
    2024, arXiv 2401.10935, section 5). An expected point is hit by a box around it.
    """
    answered, target = region(answer), _target(expected)
    if answered is None:
        return None
    if len(answered) == len(target) == 4:
        return float(iou(answered, target) >= 0.5)
    box, point = (target, answered) if len(target) == 4 else (answered, target)
    return float(len(box) == 4 and box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3])


def _target(expected: str) -> Region:
    target = region(expected)
    if target is None:
        raise ValueError(f"the expected answer '{expected}' has no box and no point")
    return target
