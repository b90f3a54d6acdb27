"""The world: splits are disjoint, everything is a function of its seed, answers are those of the scene."""

import io
from random import Random

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from eval.world import questions
from eval.world.chart import Chart, sample_chart
from eval.world.rows import PER_FAMILY, VARIANTS, asked_views, family_rows, images_of, sample_view
from eval.world.scene import Cell, Scene, sample_scene
from eval.world.stamps import digit_pool
from eval.world.textual import ask_text
from eval.world.vocab import BAR_LEVELS, FAMILIES, SPLITS, THINGS, TOKEN
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


def test_drawing_and_sampling_depend_on_the_seed_alone():
    first, again = (sample_scene(Random(3), (3, 4), "test") for _ in range(2))
    assert first == again and first != sample_scene(Random(4), (3, 4), "test")
    np.testing.assert_array_equal(first.draw()[0], again.draw()[0])
    np.testing.assert_array_equal(sample_chart(Random(3)).draw()[0], sample_chart(Random(3)).draw()[0])


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


def _scene() -> Scene:
    star = Cell("shape", "star", "red", True, 36)
    ring = Cell("shape", "ring", "blue", False, 22)
    small = Cell("shape", "ring", "red", False, 22)
    digit = Cell("digit", "7", size=34, digit_index=digit_pool("test")[7][0])
    return Scene(2, 3, "gray", [star, ring, Cell("nothing"), digit, Cell("text", "KAT"), small], 1)


def _all(asker, view, times=400) -> dict[str, str]:
    rng = Random(0)
    return dict(turn for _ in range(times) if (turn := asker(rng, view)))


def test_answers_about_a_known_scene():
    scene = _scene()
    assert _all(questions.colour_at, scene)["What colour is the shape at row 1 column 2?"] == "blue"
    assert _all(questions.object_at, scene)["What is at row 2 column 1?"] == "digit"
    assert _all(questions.object_at, scene)["What is at row 1 column 3?"] == "nothing"
    counts = _all(questions.count, scene)
    assert counts["How many rings are there?"] == "2" and counts["How many red shapes are there?"] == "2"
    assert counts["How many digits are there?"] == "1" and counts["How many green shapes are there?"] == "0"
    assert _all(questions.locate, scene) == {
        "Where is the star?": "row 1 column 1", "Where is the 7?": "row 2 column 1",
    }  # fmt: skip
    assert _all(questions.read, scene) == {
        "Read the text at row 2 column 2.": "K A T", "Which digit is at row 2 column 1?": "7",
    }  # fmt: skip
    assert set(_all(questions.compare, scene).values()) == {"red"}  # the ring is not unique: sizes have no question
    wide = _all(questions.scene_wide, scene)
    assert wide["What is the background colour?"] == "gray" and wide["Do all shapes have the same colour?"] == "no"
    assert wide["Is there a star?"] == "yes" and wide["Is there a circle?"] == "no"


def test_sizes_are_compared_between_unique_shapes():
    scene = _scene()
    scene.cells[5] = Cell("nothing")
    answers = _all(questions.compare, scene)
    assert (
        answers["Which is larger, the star or the ring?"] == answers["Which is larger, the ring or the star?"] == "star"
    )


def test_answers_about_a_known_chart():
    answers = _all(questions.chart, Chart("white", [("red", 2), ("blue", 5), ("green", 1)], 0))
    assert answers["How tall is the red bar?"] == "2" and answers["How tall is the blue bar?"] == "5"
    assert answers["Which bar is the tallest?"] == "blue" and answers["Which bar is the shortest?"] == "green"
    assert all(1 <= height <= BAR_LEVELS for seed in range(20) for _, height in sample_chart(Random(seed)).bars)


def test_answers_about_two_known_images():
    first, second = _scene(), _scene()
    second.background, second.cells = "white", [Cell("nothing")] * 6
    answers = _all(questions.two_images, (first, second))
    assert answers["Which image has a star?"] == "first"
    assert answers["Do both images have the same background colour?"] == "no"
    assert answers["What is at row 1 column 1 of the second image?"] == "nothing"
    assert answers["What is at row 1 column 1 of the first image?"] == "star"


def test_text_only_answers():
    for seed in range(300):
        question, answer = ask_text(Random(seed))
        words = question.rstrip("?.").split()
        if words[0] == "Reverse":
            assert answer.split() == words[:0:-1]
        elif words[0] == "Copy":
            assert answer.split() == words[1:]
        elif words[0] == "Sort":
            assert answer.split() == sorted(words[1:], key=int)
        elif "plus" in words:
            assert int(answer) == int(words[2]) + int(words[4])
        elif words[0] == "Which":
            assert int(answer) == max(int(words[3].rstrip(",")), int(words[5]))
        else:
            assert f"The {words[-1]} is {answer}." in question


def test_answers_are_not_lopsided():
    """No single answer makes up more than half of a family."""
    for family in FAMILIES:
        answers = [row["answer"] for row in frozen("llava", "test") if row["family"] == family]
        assert max(map(answers.count, set(answers))) < 0.5 * len(answers)


def test_every_family_has_questions_on_every_grid():
    for variant, grids in VARIANTS.items():
        for family in set(FAMILIES) - {"text"}:
            view = sample_view(Random(1), family, grids[-1], "train")
            assert all(hasattr(image, "draw") for image in images_of(view))
            assert next(asked_views("train", family, variant))[1]
