"""The training code's own parts: transfer between the demos, question drawing, attention in equal windows."""

from random import Random

import torch

from eval.demo.architectures import build_model
from eval.demo.learner import Learner, qwen_patches
from eval.demo.sequences import Writer, form_of, training_batch
from eval.demo.text import build_tokenizer
from eval.demo.transfer import adopt
from eval.world.vocab import FAMILIES


def _learner(kind: str) -> tuple[Learner, Writer, object]:
    tokenizer = build_tokenizer(kind)
    writer = Writer(kind, tokenizer)
    return Learner(kind, build_model(kind, tokenizer, 0), writer.image_id), writer, tokenizer


def test_a_language_model_is_adopted_whole():
    donor, _, donor_tokenizer = _learner("llava")
    learner, _, tokenizer = _learner("qwen")
    state = {"learner": donor.state_dict(), "ema": {}}
    copied = adopt(learner, tokenizer, state, donor_tokenizer)
    mine, theirs = learner.state_dict(), donor.state_dict()
    adopted_names = [name for name in mine if "language_model" in name or name.startswith(("oracle", "model.lm_head"))]
    assert sorted(copied) == sorted(adopted_names)
    layer = "model.model.language_model.layers.0.mlp.up_proj.weight"
    assert torch.equal(mine[layer], theirs[layer])
    word = "model.model.language_model.embed_tokens.weight"
    rows = tokenizer.convert_tokens_to_ids("\u0120star"), donor_tokenizer.convert_tokens_to_ids("\u0120star")
    assert torch.equal(mine[word][rows[0]], theirs[word][rows[1]])


def test_batched_windows_give_what_the_model_gives():
    learner, writer, tokenizer = _learner("qwen")
    batch = training_batch(writer, Random(2), 3, dict.fromkeys(FAMILIES, 0.5) | {"text": 0.0})
    plain = build_model("qwen", tokenizer, 0)
    patches, grids = qwen_patches(batch.pixels)
    with torch.no_grad():
        expected = plain.model.visual(patches, grid_thw=grids).pooler_output
        torch.testing.assert_close(learner.look(batch.pixels), expected, atol=1e-4, rtol=1e-4)


def test_only_answers_are_learned_and_hard_forms_are_drawn_more():
    _, writer, tokenizer = _learner("llava")
    weights = dict.fromkeys(FAMILIES, 0.5) | {"text": 0.0, "What is": 0.0, "What object": 0.0}
    for seed in range(4):
        batch = training_batch(writer, Random(seed), 4, weights)
        assert not {"What is", "What object"} & set(batch.forms)
        answer = tokenizer.decode(batch.labels[0][batch.labels[0] != -100])
        assert answer.endswith("</s>") and "?" not in answer
        assert (batch.ids == writer.image_id).sum() == batch.cells["thing"].numel()


def test_each_skill_has_its_own_question_forms():
    assert form_of("The box is red. What colour is the box?") == "The"
    assert form_of("Where is the star?") == "Where is" and form_of("Sort 3 1 2.") == "Sort"
