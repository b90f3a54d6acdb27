"""What `inspect` draws: each token's part of the image shows what became of the token."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from vlmcompress.models import Layout, Piece
from vlmcompress.reduction.hooks import picture
from vlmcompress.reduction.methods import Reduction

SIZE = (60, 40)
WHOLE = Layout((Piece(2, 3, (0.0, 0.0, 60.0, 40.0)),))


def drawn(layout: Layout, reduction: Reduction, image: Image.Image | None = None) -> list[Image.Image]:
    image = image or Image.new("RGB", SIZE, (200, 120, 40))
    return picture.panel(image.resize((600, 400)), image.size, layout, reduction)


def middles(drawing: Image.Image) -> list[tuple[int, int, int]]:
    """The colours in the middles of 2 x 3 parts."""
    return [drawing.getpixel((100 + 200 * column, 100 + 200 * row)) for row in range(2) for column in range(3)]


def test_kept_merged_and_dropped():
    (drawing,) = drawn(WHOLE, Reduction.join(torch.tensor([0, 0, 2, -1, 5, 5])))
    colours = middles(drawing)
    assert colours[2] == (200, 120, 40)
    assert (
        colours[0] == colours[1]
        and colours[4] == colours[5]
        and len({colours[0], colours[2], colours[3], colours[4]}) == 4
    )
    assert len(set(colours[3])) == 1 and colours[3][0] < 60  # gray and dark
    corners = [drawing.getpixel((200 * column, 200 * row)) for row in range(2) for column in range(3)]
    assert corners[0] == picture.color_of(0) and corners[5] == picture.color_of(2) and corners[2] == (255, 255, 255)
    assert (
        corners[1] == colours[1] and corners[4] == colours[4] and corners[3] == colours[3]
    )  # no edge where nothing is put


def test_parts_that_the_model_does_not_see_are_flat():
    (drawing,) = drawn(Layout((Piece(1, 1, (20.0, 0.0, 60.0, 40.0)),)), Reduction.identity(1))
    assert middles(drawing)[::3] == [(0x8A,) * 3] * 2 and middles(drawing)[1] == (200, 120, 40)


def test_tiles_and_the_whole_image_are_drawn_apart():
    tiles = [Piece(1, 1, (30.0 * i, 0.0, 30.0 * (i + 1), 40.0)) for i in range(2)]
    layout = Layout((*tiles, Piece(2, 3, (0.0, 0.0, 60.0, 40.0))))
    first, second = drawn(layout, Reduction.keep(torch.tensor([0, 3]), 8))
    assert first.getpixel((150, 200)) == (200, 120, 40) and first.getpixel((450, 200)) != (200, 120, 40)
    assert [color == (200, 120, 40) for color in middles(second)] == [False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("parent", "text"),
    [
        ([0, 1, 2], "3 of 3 tokens: 3 as they are"),
        ([0, 0, 2, -1, 5, 5], "3 of 6 tokens: 1 as they are, 4 merged into 2, 1 dropped"),
        ([-1, 1], "1 of 2 tokens: 1 as they are, 1 dropped"),
    ],
)
def test_counts(parent, text):
    assert str(picture.Counts.of(Reduction.join(torch.tensor(parent)))) == text
