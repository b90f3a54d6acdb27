"""vLLM's own processor of a reduced checkpoint, without an engine: counts, names of images in caches, refused prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import tiny
from tests.kit.engine import asked
from tests.kit.places import DEMO_LLAVA
from tests.kit.reduced_cases import reduced

pytestmark = pytest.mark.engine
REDUCERS = {
    "half": "dart:0.5,keep_max=0.75",
    "quarter": "dart:0.25",
    "exact": "pixelprune",
    "close": "pixelprune:threshold=0.1",
}
FILMED = ("internvl", "short", "llava-onevision")
ROOM = 256


@pytest.fixture(scope="module")
def processed(tmp_path_factory) -> dict:
    """Of each checkpoint what its processor makes of the prompts of `vllm_processor`."""
    folder = tmp_path_factory.mktemp("reduced")
    folders = {name: str(reduced(DEMO_LLAVA, folder / name, text)) for name, text in REDUCERS.items()}
    films = {name: str(filmed(name, folder / name)) for name in FILMED}
    tiles = reduced(onevision(folder / "onevision"), folder / "tiles", "dart:0.1")
    (processed,) = asked(
        "processor",
        [
            {
                "folders": folders,
                "films": films,
                "tiles": str(tiles),
                "pixels": {name: str(by_pixels(name, folder / name)) for name in ("paddleocr-vl", "glm4v")},
                "room": ROOM,
            }
        ],
        seconds=600,
    )
    assert "error" not in processed, processed["error"]
    return processed


def filmed(name: str, folder: Path) -> Path:
    """A family that takes videos; "short": one that knows no more positions than a prompt may have tokens."""
    source = tiny.build("internvl" if name == "short" else name, folder / "full")
    config = json.loads((source / "config.json").read_text())
    if name == "short":
        config["text_config"]["max_position_embeddings"] = ROOM
    (source / "config.json").write_text(json.dumps(config))
    return reduced(source, folder / "model", "uniform:0.5")


def by_pixels(name: str, folder: Path) -> Path:
    return reduced(tiny.build(name, folder / "full"), folder / "model", "pixelprune")


def onevision(folder: Path) -> Path:
    """LLaVA-OneVision with canvases of up to 6 x 6 tiles, as in the published ones."""
    tiny.build("llava-onevision", folder)
    canvases = [[56 * rows, 56 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    for name, part in (("config.json", None), ("processor_config.json", "image_processor")):
        config = json.loads((folder / name).read_text())
        (config[part] if part else config)["image_grid_pinpoints"] = canvases
        (folder / name).write_text(json.dumps(config))
    return folder


def test_memory_is_reserved_for_the_largest_image(processed):
    """Of a tall image all the newlines are left; the largest square has fewer."""
    assert processed["tiles"]["largest"] >= processed["tiles"]["all"] > processed["tiles"]["first"]


def test_counts_are_exact(processed):
    """81 tokens, rounded half up, where one placeholder stood."""
    assert processed["half"]["plain"]["prompt"] == 41 - 1
    assert processed["quarter"]["plain"]["prompt"] == 20 - 1


def test_the_cache_key_of_an_image_includes_the_reducer(processed):
    assert len({processed[name]["plain"]["name"] for name in REDUCERS}) == len(REDUCERS)
    assert (
        processed["half"]["plain"]["name"] == processed["half"]["again"]["name"] == processed["half"]["other"]["name"]
    )


def test_a_request_sets_its_share(processed):
    """Up to what memory is reserved for; the share is part of the cache's key, also where it is the checkpoint's own."""
    half = processed["half"]
    counts = {name: half[name]["prompt"] + 1 for name in ("plain", "own share", "more", "seven", "a thousand")}
    assert counts == {"plain": 41, "own share": 41, "more": 61, "seven": 7, "a thousand": 61}
    assert half["plain"]["name"] == half["own share"]["name"]
    assert len({half[name]["name"] for name in counts}) == 4
    assert "'keep' must be a share above 0 and at most 0.75" in half["too much"]["error"]
    assert "dart:0.25 has no 'keep_max'" in processed["quarter"]["more"]["error"]
    assert (half["reserved"], processed["quarter"]["reserved"]) == (61, 20)


def test_counts_follow_from_pixels(processed):
    """81 of noise, and for the largest image; one of a blank image; of two images each its own number."""
    for name in ("exact", "close"):
        asked_of = processed[name]
        counts = [asked_of[prompt]["prompt"] for prompt in ("plain", "blank", "both")]
        assert (counts, asked_of["reserved"]) == ([81 - 1, 1 - 1, 82 - 2], 81)
        assert "has no 'keep_max'" in asked_of["more"]["error"]


def test_memory_is_reserved_for_images_that_are_nowhere_flat(processed):
    """vLLM has no number of its own for PaddleOCR-VL, and asks what a blank image has, which keeps one token."""
    for name, (reserved, tokens) in processed["pixels"].items():
        assert reserved == tokens > 4, name


def test_a_prompt_beyond_the_positions_of_the_model_is_refused(processed):
    """30 images of 81 tokens are more than 2,048, though the 41 that are kept of each are fewer."""
    assert "the prompt ends at position 2434," in processed["half"]["long"]["error"]


def test_embeddings_of_images_are_refused(processed):
    assert "send images, not embeddings" in processed["half"]["embeds"]["error"]


def test_memory_is_measured_with_the_largest_video_that_fits(processed):
    """Next to the largest image; vLLM takes no more than 16 frames of LLaVA-OneVision's for that."""
    films = processed["films"]
    assert films["internvl"]["tokens"] <= ROOM < films["internvl"]["more"]
    assert films["short"]["tokens"] <= ROOM
    assert f"counted before images and videos are reduced, and the model knows {ROOM}" in films["short"]["more"]
    assert (films["llava-onevision"]["frames"], films["llava-onevision"]["video"]) == (16, 16 * 4 // 2 + 1)
