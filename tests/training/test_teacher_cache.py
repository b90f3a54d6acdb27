"""Who is held out of a training: samples about images that it never sees."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from vlmcompress.models.data import Sample
from vlmcompress.training.teacher_cache import apart


def sample(number: int, *images: int) -> Sample:
    output = [Image.fromarray(np.full((2, 2, 3), image, np.uint8)) for image in images]
    return Sample(str(number), output, "what is it?", "this")


def shown(samples: list[Sample]) -> set[bytes]:
    return {image.tobytes() for row in samples for image in row.images}


@pytest.mark.parametrize("per_image", [1, 2, 5])
def test_no_image_is_in_both_splits(per_image):
    samples = [sample(i, i * 7 % (100 // per_image)) for i in range(100)]
    ordered, count = apart(samples)
    trained, held = ordered[:-count], ordered[-count:]
    assert sorted(row.id for row in ordered) == sorted(row.id for row in samples)
    assert 10 <= count < 10 + per_image and not shown(trained) & shown(held)
    assert [row.id for row in trained] == [row.id for row in samples if row in trained], "the order is kept"


def test_images_of_one_sample_stay_together():
    """Each sample shares an image with the next: what is held out would draw all others after it, so little is."""
    chain = [sample(i, i, i + 1) for i in range(20)]
    others = [sample(20 + i, 100 + i) for i in range(30)]
    ordered, count = apart([*chain, *others])
    assert count == 8 and not shown(ordered[:-count]) & shown(ordered[-count:])
    ordered, count = apart([*others, *chain])
    assert count == 20 and {row.id for row in ordered[-count:]} == {row.id for row in chain}


def test_text_alone_is_a_group_of_its_own():
    ordered, count = apart([sample(i) for i in range(40)])
    assert count == 8 and [row.id for row in ordered[-count:]] == [str(i) for i in range(32, 40)]
