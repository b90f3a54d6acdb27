"""litevlm: images that go are not encoded, and the answer is that of a model that sees a full stop in place of each."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from tests.kit import reference
from tests.kit.attached_cases import DENSE, GREEDY, STEPS, extended, traces
from tests.kit.reduction_data import NONE, picture, tiny
from vlmcompress.models import VLM
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import Signals, litevlm
from vlmcompress.reduction.support import family_problem
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

FAMILIES = [spec.family for spec in DENSE if family_problem(spec, "litevlm") is None]
Prompt = tuple[list[tuple[str, Image.Image]], str]
CAMERAS: Prompt = (
    [("front camera: ", picture(0)), ("left camera: ", picture(1, (140, 84))), ("rear view: ", picture(2, (84, 112)))],
    "who is in the rear view?",
)
OTHER: Prompt = ([("front: ", picture(3, (112, 84))), ("back: ", picture(4))], "is the front empty?")
SINGLE: Prompt = ([("", picture(5))], "what is it?")


def encode(vlm: VLM, *prompts: Prompt) -> dict[str, torch.Tensor]:
    """A batch, padded on the left; each image after its name, one a line."""
    texts, images = [], []
    for views, question in prompts:
        content: list[dict[str, str]] = []
        for number, (name, image) in enumerate(views):
            content += [{"type": "text", "text": "\n" * (number > 0) + name}, {"type": "image"}]
            images.append(image)
        content.append({"type": "text", "text": question})
        turns = [{"role": "user", "content": content}]
        texts.append(vlm.processor.apply_chat_template(turns, add_generation_prompt=True))
    batch = vlm.processor(text=texts, images=images or None, padding=True, return_tensors="pt")
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def watched(vlm: VLM) -> tuple[list[int], torch.utils.hooks.RemovableHandle]:
    """How many numbers of pixels each call of the tower gets."""
    shapes: list[int] = []
    tower = vlm.model.get_submodule(vlm.spec.vision[0])
    return shapes, tower.register_forward_hook(
        lambda module, args, kwargs, out: shapes.append((args[0] if args else kwargs["pixel_values"]).numel()),
        with_kwargs=True,
    )


def expected(vlm: VLM, prompt: Prompt, keep: float) -> list[int]:
    """Which views stay, by names and question alone."""
    embed = vlm.model.get_input_embeddings()

    def rows(text: str) -> torch.Tensor:
        return embed(
            torch.tensor(vlm.processor.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
        )

    names = [name for name, _ in prompt[0]]
    features = torch.stack([rows(name).mean(0) for name in names])
    signals = Signals(
        (len(names), 1, 1), features=features, query=rows(prompt[1]), saliency=litevlm.matches(names, prompt[1])
    )
    return litevlm.LiteVLM(keep=keep).reduce(signals).anchor.tolist()


def test_families_that_choose_among_images():
    """Those that encode a picture at a time."""
    assert [spec.family for spec in DENSE if spec.images.grid in ("patches", "thw")] == FAMILIES
    assert {"llava", "qwen2-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-5"} <= {*FAMILIES}
    with pytest.raises(UserError, match="internvl cuts them into tiles; use "):
        attach(tiny("internvl"), "litevlm")


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_full_stop_in_place_of_the_images_that_go(family):
    vlm = tiny(family)
    inputs = encode(vlm, CAMERAS, OTHER, SINGLE, ([], NONE[1]))
    sizes, hook = watched(vlm)
    plain = vlm.model(**inputs).logits
    with attach(vlm, "litevlm", {"keep": 0.4}) as attached:
        reduced = vlm.model(**inputs).logits
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    hook.remove()
    stays = [len(unit.reduction.anchor) > 1 for unit in attached.reduced_units]
    assert stays == [False, False, True, True, False, True]  # by name: rear view, front; and what is alone
    assert all(
        unit.reduction.anchor.tolist() == [0]
        for unit, stay in zip(attached.reduced_units, stays, strict=True)
        if not stay
    )
    encoded = sum(len(unit.columns) for unit, stay in zip(attached.reduced_units, stays, strict=True) if stay)
    share = encoded / sum(len(unit.columns) for unit in attached.reduced_units)
    assert sizes[1] == round(share * sizes[0]) == sizes[2]
    stop = vlm.model.get_input_embeddings().weight[vlm.processor.tokenizer.convert_tokens_to_ids(".")]
    hidden = reference.logits(vlm, inputs, attached.stages, stand_in=stop)
    reference.compare(reduced, hidden, inputs["attention_mask"], attached.reduced_units)
    full = reference.logits(vlm, extended(inputs, out.sequences[:, -STEPS:]), attached.stages, stand_in=stop)
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full[:, -STEPS - 1 : -1], atol=2e-5, rtol=1e-4)
    assert torch.equal(vlm.model(**inputs).logits, plain)


@pytest.mark.parametrize("family", ["llava", "qwen2-5-vl"])
@pytest.mark.parametrize("keep", [0.4, 0.7])
def test_names_of_images_decide_what_stays(family, keep):
    """What stays is what the method says of the names' and the question's words, here encoded apart from the prompt."""
    vlm = tiny(family)
    for prompt in (CAMERAS, OTHER):
        with attach(vlm, "litevlm", {"keep": keep}) as attached:
            vlm.model(**encode(vlm, prompt))
        stays = [number for number, unit in enumerate(attached.reduced_units) if len(unit.reduction.anchor) > 1]
        assert stays == expected(vlm, prompt, keep)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_without_a_choice_are_untouched(family):
    """All views, a single view, text alone: no bit changes."""
    vlm = tiny(family)
    for prompt, keep in ((CAMERAS, 1), (SINGLE, 0.1), (([], NONE[1]), 0.1)):
        inputs = encode(vlm, prompt)
        plain = vlm.model(**inputs).logits
        before = traces(vlm.model)
        with attach(vlm, "litevlm", {"keep": keep}) as attached:
            assert torch.equal(vlm.model(**inputs).logits, plain)
        assert len(attached.reduced_units) == len(prompt[0])
        assert traces(vlm.model) == before
