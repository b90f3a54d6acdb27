"""The world: splits are disjoint, everything is a function of its seed, answers are those of the scene."""

import io
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from eval.world.rows import PER_FAMILY, VARIANTS, family_rows
from eval.world.scene import sample_scene
from eval.world.stamps import digit_pool
from eval.world.vocab import FAMILIES, SPLITS, THINGS, TOKEN
from tests.kit.places import DEMOS

DATA = DEMOS / "data"


def frozen(variant: str, split: str) -> list[dict]:
    return pq.read_table(DATA / variant / f"{split}.parquet").to_pylist()


def test_handwritten_digits_of_the_splits_are_disjoint_and_complete():
    pools = [{i for members in digit_pool(split).values() for i in members} for split in SPLITS]
    assert sum(map(len, pools)) == len(set().union(*pools)) == 1797
    assert all(len(members) >= 5 for split in SPLITS for members in digit_pool(split).values())


def test_frozen_images_of_the_splits_are_disjoint():
    images = {s: {i for v in VARIANTS for row in frozen(v, s) for i in row["image"]} for s in PER_FAMILY}
    assert not images["test"] & (images["validation"] | images["calibration"])
    assert not images["validation"] & images["calibration"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("split", PER_FAMILY)
def test_frozen_rows_are_balanced_and_have_stable_ids(variant, split):
    rows = frozen(variant, split)
    assert len({row["id"] for row in rows}) == len(rows) == PER_FAMILY[split] * len(FAMILIES)
    assert [row["family"] for row in rows[: len(FAMILIES)]] == list(FAMILIES)
    images_per_row = {"text": 0, "two_images": 2}
    assert all(len(row["image"]) == images_per_row.get(row["family"], 1) for row in rows)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_generator_reproduces_frozen_rows(variant, family):
    kept = [row for row in frozen(variant, "calibration") if row["family"] == family][:4]
    for row, again in zip(kept, family_rows("calibration", family, variant, 4), strict=True):
        assert {k: v for k, v in row.items() if k != "image"} == {k: v for k, v in again.items() if k != "image"}
        for data, fresh in zip(row["image"], again["image"], strict=True):
            pixels = [np.asarray(Image.open(io.BytesIO(d))) for d in (data, fresh)]
            np.testing.assert_array_equal(*pixels)


def test_token_labels_name_the_object_at_each_token():
    for seed in range(20):
        scene = sample_scene(Random(seed), (3, 3), "train")
        pixels, labels = scene.draw()
        assert pixels.shape == (144, 144, 3) and labels.thing.shape == (144 // TOKEN, 144 // TOKEN)
        for i, cell in enumerate(scene.cells):
            centre = (3 * (i // 3) + 1, 3 * (i % 3) + 1)
            name = {"shape": cell.name, "digit": f"digit {cell.name}", "nothing": "nothing"}.get(cell.kind)
            name = name or f"letter {cell.name[1]}"
            assert THINGS[labels.thing[centre]] == name
