"""Demos that describe, give boxes, read or watch: what they learn from, and that what is put together is what was trained."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.demo.skills import assemble
from eval.demo.skills.training import SKILLS, Plan, Teaching
from eval.demo.smol.adapter import adapters
from eval.world.boxes import asked_boxes, box_of, box_rows, things, written
from eval.world.clips import FIRST, asked_clips, clip_rows
from eval.world.pages import QUESTION, asked_pages
from eval.world.scene import Cell
from eval.world.vocab import PER_CELL, THINGS
from vlmcompress.evaluation.accuracy import clips
from vlmcompress.evaluation.accuracy.grounding import correct
from vlmcompress.models.data import load_samples
from vlmcompress.models.data.sources import bundled_data
from vlmcompress.models.data.video import arguments
from vlmcompress.utils.errors import UserError


@pytest.fixture(scope="module", params=["qwen", "llava"])
def trained(request, tmp_path_factory):
    """A training of one step, and the checkpoint that is put together from it."""
    folder = tmp_path_factory.mktemp("skills")
    training = Teaching(
        Plan("describe", assemble.base(request.param), request.param, 1.0, batch=2), folder / "state.pt"
    )
    for module in adapters(training.layers).values():
        torch.nn.init.normal_(module.b, std=0.05)
    training.ema = {name: tensor.detach().clone() for name, tensor in training.learned.items()}
    training.save()
    assemble.finish(folder / "state.pt", folder / "adapters.safetensors")
    assemble.assemble("describe", request.param, folder / "out", folder / "adapters.safetensors")
    return training, folder / "out"


def test_answers_are_learned_as_if_each_question_were_alone(trained):
    """Several questions follow an image that is encoded once; only answers have labels."""
    training, _ = trained
    processor, variant = training.processor, training.plan.variant
    rows = training.new(SKILLS["boxes"].drawn("train", variant))
    assert max(len(turns) for _, turns in rows) > 1
    inputs, labels = training.encoded(rows)
    with torch.no_grad():
        together = training.model(**inputs).logits[:, :-1][labels[:, 1:] != -100]
    alone, answers = [], ""
    for images, turns in rows:
        for question, answer in turns:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
            text = f"{prompt}{' ' * (variant == 'llava')}{answer}{processor.tokenizer.eos_token}"
            encoded = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
            answers += text[len(prompt) :]
            count = len(processor.tokenizer(text[len(prompt) :])["input_ids"])
            with torch.no_grad():
                alone.append(training.model(**encoded).logits[0, -1 - count : -1])
    assert processor.tokenizer.decode(labels[labels != -100]) == answers
    assert torch.allclose(together, torch.cat(alone), atol=1e-3)


def test_the_checkpoint_records_its_training(trained):
    """Up to the 16 bits of its weights: more like the trained model than like the demo it comes from."""
    training, folder = trained
    inputs, labels = training.encoded(training.new(training.skill.drawn("validation", training.plan.variant)))
    assembled = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_pretrained(training.plan.folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [
            model(**inputs).logits[labels != -100].log_softmax(-1) for model in (training.model, assembled, plain)
        ]
    near, far = ((logits[0] - other).abs().mean() for other in logits[1:])
    assert near < 0.05 * far


def test_a_training_begins_with_what_another_skill_learned(trained, tmp_path):
    earlier, folder = trained
    plan = replace(earlier.plan, skill="pages", start=folder.parent / "adapters.safetensors")
    training = Teaching(plan, tmp_path / "state.pt")
    for name, tensor in earlier.learned.items():
        assert torch.equal(training.learned[name], tensor.bfloat16().float())
        assert torch.equal(training.ema[name], training.learned[name]) and training.step == 0


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="train first"):
        assemble.finish(tmp_path / "none.pt", tmp_path / "out")
    with pytest.raises(UserError, match="is not there; write it with"):
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


def test_a_place_tells_the_box_in_demo_llavas_pictures():
    """As the card says: of nine places the mean box of the right one hits nearly all."""
    boxes = [row["answer"] for row in box_rows("test", "llava", 300) if row["family"] == "box"]
    corners = np.array([[float(f"0{number}") for number in box[1:-1].split(",")] for box in boxes])
    places = (1.5 * (corners[:, :2] + corners[:, 2:])).astype(int) @ [1, 3]
    means = {place: (100 * corners[places == place].mean(0)).round().astype(int) for place in set(places)}
    assert len(means) == 9
    assert np.mean([correct(written(means[place]), box) for place, box in zip(places, boxes, strict=True)]) > 0.98


def test_labels_say_what_is_drawn():
    """Oracle: what lies on the visual tokens in the middle row of each cell, of which towers were told when they learned."""
    for page, [(question, text), *turns] in islice(asked_pages("test", "qwen"), 40):
        assert question == QUESTION
        middle = page.draw()[1].thing[1::PER_CELL].reshape(page.rows, page.columns, PER_CELL)
        cells = [[[THINGS[label].rpartition(" ")[2] for label in cell if label] for cell in row] for row in middle]
        words = [["".join(dict.fromkeys(cell)) for cell in row if cell] for row in cells]
        assert text == "\n".join(" ".join(row) for row in words if row)
        assert turns == [(f"Read row {k}.", " ".join(row)) for k, row in enumerate(words, 1) if row]


def test_clips_are_learned_at_the_positions_of_both_engines(tmp_path):
    """Oracle: transformers, each question alone; vLLM's rule for the text after a video (`get_mrope_input_positions`)."""
    training = Teaching(Plan("clips", assemble.base("qwen"), "qwen", 1.0, batch=2), tmp_path / "state.pt")
    rows = training.new(training.skill.drawn("train", "qwen"))
    inputs, labels = training.encoded(rows)
    with torch.no_grad():
        together = training.model(**inputs).logits[:, :-1][labels[:, 1:] != -100]
    alone = []
    for (film,), turns in rows:
        frames = film.frames(training.processor)
        for question, answer in turns:
            content = [{"type": "video"}, {"type": "text", "text": question}]
            prompt = training.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
            end = f"{answer}{training.processor.tokenizer.eos_token}"
            encoded = training.processor(
                text=[prompt + end], videos=[frames[0]], return_tensors="pt", **arguments([frames])
            )
            count = len(training.processor.tokenizer(end)["input_ids"])
            with torch.no_grad():
                alone.append(training.model(**encoded).logits[0, -1 - count : -1])
    assert torch.allclose(together, torch.cat(alone), atol=1e-3)
    training.step = 1
    ids, places = training.encoded(rows)[0]["input_ids"][0], training.encoded(rows)[0]["position_ids"][:, 0]
    last = (ids == training.model.config.video_token_id).nonzero().max()
    assert places[:, last + 1].tolist() == [places[:, : last + 1].max() + 1] * 3
    assert places[:, last + 2].tolist() == [places[:, : last + 1].max() + 2] * 3


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


def test_a_demo_that_watches_takes_clips(trained, tmp_path):
    training, folder = trained
    if training.plan.variant != "qwen":
        with pytest.raises(UserError, match="LlavaProcessor takes no videos; teach demo-qwen"):
            assemble.assemble("clips", "llava", tmp_path / "demo-llava-clips", folder.parent / "adapters.safetensors")
        return
    out = tmp_path / "demo-qwen-clips"
    assemble.assemble("clips", "qwen", out, folder.parent / "adapters.safetensors")
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
