"""Generation with a reducer: every token is where it would be without one, and caches hold what was kept."""

from __future__ import annotations

import pytest
import torch

from tests.kit import reference
from tests.kit.attached_cases import CASES, FAMILIES, FEW, GREEDY, STEPS, WAYS, crossed, extended, given
from tests.kit.reduction_data import LAYERS, NONE, ONE, TWO, encode, tiny
from vlmcompress.models import all_specs
from vlmcompress.reduction.hooks import attach
from vlmcompress.reduction.methods import REGISTRY
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives

DECODING = [case for case in CASES if case[1] in WAYS]


@pytest.mark.parametrize(("family", "method"), DECODING)
def test_generated_tokens_equal_the_full_recompute(family, method):
    """Each step's logits are those of the whole sequence at once, with the prompt's dropped tokens hidden."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO, NONE)
    with attach(vlm, method, given(method)) as attached:
        out = vlm.model.generate(**inputs, **GREEDY, output_logits=True, return_dict_in_generate=True)
    tokens = out.sequences[:, -STEPS:]
    assert tokens.shape[1] == STEPS and len(out.logits) == STEPS
    full = reference.logits(vlm, extended(inputs, tokens), attached.stages)
    # generate counts positions from the first real token, forward from the padding: rotations differ in float32's last bits
    torch.testing.assert_close(torch.stack(out.logits, 1).double(), full[:, -STEPS - 1 : -1], atol=2e-5, rtol=1e-4)
    lengths = [inputs["input_ids"].shape[1] + STEPS - 1] * LAYERS
    for first, units in attached.stages:
        kept = reference.hidden_mask(inputs["attention_mask"], units).sum(1).max()
        lengths[first:] = [int(kept) + STEPS - 1] * (LAYERS - first)
    assert lengths[-1] < inputs["input_ids"].shape[1] + STEPS - 1
    assert [part.keys.shape[2] for part in out.past_key_values.layers] == lengths


# By hand, models with M-RoPE do not continue a padded batch: transformers gives them positions of the whole mask, not of the
# new tokens. generate, above, does; so do reducers before the language model, which take only the last of these positions.
M_ROPE = [spec.family for spec in all_specs() if spec.images.positions == "mrope"]
BY_HAND = [
    (family, method, masked)
    for family, method in DECODING
    for masked in (False, True)
    if not (masked and family in M_ROPE and REGISTRY.get(method).STAGE == "llm")
]


@pytest.mark.parametrize(("family", "method", "masked"), crossed(FEW, BY_HAND))
def test_forward_by_hand_equals_the_full_recompute(family, method, masked):
    """Positions that the model counts itself, from its cache or a mask, are right too, for one token and for several."""
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO) if masked else encode(vlm, TWO)
    if not masked:
        del inputs["attention_mask"]
    rows, length = inputs["input_ids"].shape
    tokens = torch.randint(0, 256, (rows, 3), generator=torch.Generator().manual_seed(3))
    with attach(vlm, method, given(method)) as attached:
        out = vlm.model(**inputs, use_cache=True)
        logits = [out.logits[:, -1:]]
        for start, end in ((0, 1), (1, 3)) if not masked else ((0, 1), (1, 2), (2, 3)):
            extra = {}
            if masked:
                extra["attention_mask"] = torch.cat([inputs["attention_mask"], torch.ones_like(tokens[:, :end])], 1)
            out = vlm.model(input_ids=tokens[:, start:end], past_key_values=out.past_key_values, **extra)
            logits.append(out.logits)
    inputs.setdefault("attention_mask", torch.ones(rows, length, dtype=torch.long))
    full = reference.logits(vlm, extended(inputs, tokens), attached.stages)
    torch.testing.assert_close(torch.cat(logits, 1), full[:, -4:], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["llava", "idefics3", "internvl"])
@pytest.mark.parametrize("method", ["random", "fastv"])
def test_a_second_turn_with_an_image_of_its_own(family, method):
    """The cache of a conversation holds reduced images of several turns."""
    vlm = tiny(family)
    first, second = encode(vlm, ONE), encode(vlm, TWO)
    length = first["input_ids"].shape[1]
    both = {name: torch.cat([first[name], second[name]], 1) for name in ("input_ids", "attention_mask")}
    with attach(vlm, method, given(method)) as attached:
        out = vlm.model(**first)
        stages = attached.stages
        out = vlm.model(**second | {"attention_mask": both["attention_mask"]}, past_key_values=out.past_key_values)
        later = reference.shifted(attached.stages, length)
        last = vlm.model(input_ids=torch.tensor([[65]]), past_key_values=out.past_key_values)
    pixels = {"pixel_values": torch.cat([first["pixel_values"], second["pixel_values"]], int(family == "idefics3"))}
    if "pixel_attention_mask" in first:
        parts = [inputs["pixel_attention_mask"] for inputs in (first, second)]
        pixels["pixel_attention_mask"] = torch.cat(parts, 1)
    stages = [(first, units + later_units) for (first, units), (_, later_units) in zip(stages, later, strict=True)]
    full = reference.logits(vlm, extended({**both, **pixels}, torch.tensor([[65]])), stages)
    visible = reference.hidden_mask(both["attention_mask"], stages[-1][1])[0].bool()[length:]
    torch.testing.assert_close(out.logits[0], full[0, length:-1][visible], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(last.logits[0], full[0, -1:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"internvl", "exaone4-5"}))
def test_beams_and_no_cache(family):
    """Beam search, which reorders the cache, equals generation that recomputes everything.

    One image a prompt, and no InternVL: transformers gives beams the wrong images where prompts have several (or tiles).
    No EXAONE 4.5 either: to divide images among beams, transformers takes the number of their tokens for theirs, and fails.
    """
    vlm = tiny(family)
    inputs = encode(vlm, ONE, (TWO[0][:1], TWO[1]))
    generation = {**GREEDY, "num_beams": 2, "output_scores": True}
    with attach(vlm, "random", {"keep": 0.4}):
        if hasattr(vlm.model, "_supports_mm_encoder_outputs") and vlm.spec.images.grid == "thw":
            with pytest.raises(UserError, match="beam search does not go with a reducer here"):
                vlm.model.generate(**inputs, **generation)
            return  # from transformers 5.18 on
        cached = vlm.model.generate(**inputs, **generation, return_dict_in_generate=True)
        whole = vlm.model.generate(**inputs, **generation, return_dict_in_generate=True, use_cache=False)
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(cached.sequences_scores, whole.sequences_scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["random", "fastv"])
def test_caches_emptied_or_cut(method):
    """An emptied cache starts over; one cut after the prompt goes on; one cut within it is refused."""
    vlm = tiny("llava")
    inputs, words = encode(vlm, ONE), encode(vlm, NONE)
    token, other = torch.tensor([[65]]), torch.tensor([[66]])
    with attach(vlm, method, given(method)):
        out = vlm.model(**inputs)
        cache = out.past_key_values
        expected = vlm.model(input_ids=token, past_key_values=cache).logits
        vlm.model(input_ids=other, past_key_values=cache)
        cache.crop(-2)
        again = vlm.model(input_ids=token, past_key_values=cache).logits
        torch.testing.assert_close(again, expected, atol=1e-9, rtol=1e-9)
        cache.crop(-3)
        with pytest.raises(UserError, match="cut within the prompt"):
            vlm.model(input_ids=token, past_key_values=cache)
        cache.crop(-cache.get_seq_length())
        vlm.model(**words, past_key_values=cache)
        last = vlm.model(input_ids=token, past_key_values=cache).logits
    both = torch.cat([words["input_ids"], token], 1)
    torch.testing.assert_close(last, vlm.model(input_ids=both).logits[:, -1:], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("method", ["random", "fastv"])
def test_an_image_after_a_cached_prefix(method):
    """The cache of text alone is continued with a prompt with images."""
    vlm = tiny("llava")
    words, inputs = encode(vlm, NONE), encode(vlm, ONE)
    length = words["input_ids"].shape[1]
    ids = torch.cat([words["input_ids"], inputs["input_ids"], torch.tensor([[65]])], 1)
    with attach(vlm, method, given(method)) as attached:
        cache = vlm.model(**words).past_key_values
        del inputs["attention_mask"]
        vlm.model(**inputs, past_key_values=cache)
        last = vlm.model(input_ids=ids[:, -1:], past_key_values=cache).logits
    stages = reference.shifted(attached.stages, length)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": inputs["pixel_values"]}
    full = reference.logits(vlm, whole, stages)
    torch.testing.assert_close(last, full[:, -1:], atol=1e-9, rtol=1e-9)
