"""Who is held out of a training: samples about images that it never sees."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlmcompress.data import Sample
from vlmcompress.runs.teacher_cache import apart


def sample(number: int, *images: int) -> Sample:
    shown = [Image.fromarray(np.full((2, 2, 3), image, np.uint8)) for image in images]
    return Sample(str(number), shown, "what is it?", "this")


def shown(samples: list[Sample]) -> set[bytes]:
    return {image.tobytes() for one in samples for image in one.images}


@pytest.mark.parametrize("per_image", [1, 2, 5])
def test_no_image_is_on_both_sides(per_image):
    samples = [sample(i, i * 7 % (100 // per_image)) for i in range(100)]
    found, count = apart(samples)
    trained, held = found[:-count], found[-count:]
    assert sorted(one.id for one in found) == sorted(one.id for one in samples)
    assert 10 <= count < 10 + per_image and not shown(trained) & shown(held)
    assert [one.id for one in trained] == [one.id for one in samples if one in trained], "the order is kept"


def test_images_that_a_sample_shows_together_stay_together():
    """Each sample shares an image with the next: what is held out would draw all others after it, so little is."""
    chain = [sample(i, i, i + 1) for i in range(20)]
    others = [sample(20 + i, 100 + i) for i in range(30)]
    found, count = apart([*chain, *others])
    assert count == 8 and not shown(found[:-count]) & shown(found[-count:])
    found, count = apart([*others, *chain])
    assert count == 20 and {one.id for one in found[-count:]} == {one.id for one in chain}


def test_text_alone_is_a_group_of_its_own():
    found, count = apart([sample(i) for i in range(40)])
    assert count == 8 and [one.id for one in found[-count:]] == [str(i) for i in range(32, 40)]
