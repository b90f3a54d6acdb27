"""Demos that describe, give boxes, read or watch: their questions, and how they are put together."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor

from eval.demo.skills import assemble
from eval.world.boxes import asked_boxes, box_of, box_rows, things, written
from eval.world.clips import FIRST, asked_clips, clip_rows
from eval.world.pages import QUESTION, asked_pages
from eval.world.scene import Cell
from eval.world.vocab import PER_CELL, THINGS
from tests.kit.places import DEMO_LLAVA
from vlmcompress.evaluation.accuracy import clips
from vlmcompress.evaluation.accuracy.grounding import correct
from vlmcompress.models.data import load_samples
from vlmcompress.models.data.sources import bundled_data
from vlmcompress.models.data.video import arguments
from vlmcompress.utils.errors import UserError


def test_adapters_are_added_to_the_demos_weights(tmp_path):
    """Oracle: the products by hand, in the 16 bits of the checkpoint; the tower stays as it is."""
    assemble.assemble("describe", "llava", tmp_path / "out")
    learned = load_file(assemble.CARD.with_name("describe-llava.safetensors"))
    before, after = (load_file(folder / "model.safetensors") for folder in (DEMO_LLAVA, tmp_path / "out"))
    name = "0.mlp.up_proj"
    key = f"language_model.model.layers.{name}.weight"
    expected = before[key].float() + learned[f"{name}.b"].float() @ learned[f"{name}.a"].float()
    assert torch.equal(after[key], expected.to(before[key].dtype)) and not torch.equal(after[key], before[key])
    towers = [key for key in before if "vision_tower" in key]
    assert towers and all(torch.equal(before[key], after[key]) for key in towers)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="none.safetensors is not there"):
        assemble.assemble("describe", "qwen", tmp_path / "out", tmp_path / "none.safetensors")


@pytest.mark.parametrize("file", sorted(assemble.CARD.parent.glob("*.safetensors")), ids=lambda file: file.stem)
def test_files_in_the_repository_are_small(file):
    assert file.stat().st_size < 10e6


def test_boxes_are_of_what_is_drawn():
    """The pixels outside a thing's box are those of the scene without the thing, and all four sides touch what is drawn."""
    for scene, [(_, answer, box, _), *_] in islice(asked_boxes("test", "qwen"), 40):
        place = next(spot for spot in things(scene).values() if box_of(scene, *spot) == box)
        empty = replace(scene, cells=[Cell("nothing")] * len(scene.cells))
        alone = replace(empty, cells=list(empty.cells))
        alone.cells[place[0] * scene.columns + place[1]] = scene.at(*place)
        changed = np.argwhere((alone.draw()[0] != empty.draw()[0]).any(-1))
        height, width = scene.size()
        (top, left), (bottom, right) = changed.min(0), changed.max(0) + 1
        assert np.allclose(
            np.array(box) / 100, [left / width, top / height, right / width, bottom / height], atol=0.011
        )
        assert correct(answer, written(box)) == 1


def test_a_place_predicts_the_box_in_demo_llavas_pictures():
    """As the card states: of nine places the mean box of the right one hits nearly all."""
    boxes = [row["answer"] for row in box_rows("test", "llava", 300) if row["family"] == "box"]
    corners = np.array([[float(f"0{number}") for number in box[1:-1].split(",")] for box in boxes])
    places = (1.5 * (corners[:, :2] + corners[:, 2:])).astype(int) @ [1, 3]
    means = {place: (100 * corners[places == place].mean(0)).round().astype(int) for place in set(places)}
    assert len(means) == 9
    assert np.mean([correct(written(means[place]), box) for place, box in zip(places, boxes, strict=True)]) > 0.98


def test_labels_are_what_is_drawn():
    """Oracle: what lies on the visual tokens in the middle row of each cell, which towers were trained on."""
    for page, [(question, text), *turns] in islice(asked_pages("test", "qwen"), 40):
        assert question == QUESTION
        middle = page.draw()[1].thing[1::PER_CELL].reshape(page.rows, page.columns, PER_CELL)
        cells = [[[THINGS[label].rpartition(" ")[2] for label in cell if label] for cell in row] for row in middle]
        words = [["".join(dict.fromkeys(cell)) for cell in row if cell] for row in cells]
        assert text == "\n".join(" ".join(row) for row in words if row)
        assert turns == [(f"Read row {k}.", " ".join(row)) for k, row in enumerate(words, 1) if row]


def test_further_questions_are_about_what_is_drawn():
    """Measured in the frames: when a thing's colour comes, what comes last, and what moves."""
    for film, [_, *turns] in islice(asked_clips("train", "qwen"), 12):
        frames = np.stack([np.asarray(frame) for frame in film.source])
        there = {
            colour: (frames == value).all(-1).any((1, 2)) for colour, value in clips.COLOURS.items()
        }  # each of the frames
        comes = {
            colour: [at // 2 for at in range(len(visible)) if visible[at] and not (at and visible[at - 1])]
            for colour, visible in there.items()
        }
        for question, answer in turns:
            if question.startswith("When"):
                assert answer == " ".join(map(str, comes[question.split()[3]]))
            elif question.startswith("Which thing appears last"):
                assert comes[answer.split()[0]] == max(comes.values())
            else:
                first, last = (np.argwhere((frames[at] == clips.COLOURS[answer.split()[0]]).all(-1)) for at in (0, -1))
                assert np.abs(first.mean(0) - last.mean(0)).max() > 100


def test_no_clip_of_the_suite_is_learned():
    assert min(FIRST.values()) > max(clips.FAMILIES.values())
    rows = [clip_rows(split, "qwen", 40) for split in FIRST]
    assert len({row["id"] for row in sum(rows, [])}) == 40 * len(FIRST)


@pytest.mark.slow
def test_a_demo_that_watches_takes_clips(tmp_path):
    adapters = assemble.CARD.with_name("describe-llava.safetensors")
    with pytest.raises(UserError, match="LlavaProcessor takes no videos; teach demo-qwen"):
        assemble.assemble("clips", "llava", tmp_path / "demo-llava-clips", adapters)
    out = tmp_path / "demo-qwen-clips"
    assemble.assemble("clips", "qwen", out)
    processor = AutoProcessor.from_pretrained(out)
    samples = load_samples(bundled_data(out, "calibration"), samples=None, seed=0)
    assert len(samples) == 120 and bundled_data(out, "test") is None
    frames, metadata = samples[0].videos[0].frames(processor)
    assert frames.shape == (16, 224, 224, 3)
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video", "video": frames}, {"type": "text", "text": "?"}]}],
        tokenize=True,
        return_dict=True,
        processor_kwargs=arguments([(frames, metadata)]),
    )
    assert inputs["video_grid_thw"].tolist() == [[8, 12, 12]]
    assert np.sum(np.array(inputs["input_ids"]) == processor.video_token_id) == 288
