"""Attaching and detaching, refusals, and what cannot be done."""

from __future__ import annotations

import itertools
import json
import warnings

import pytest
import torch
from transformers import AutoModelForImageTextToText, StaticCache

from tests.kit.attached_cases import EACH, given, traces
from tests.kit.reduction_data import NONE, ONE, TWO, encode, tiny
from tests.kit.tiny import build
from vlmcompress.models import all_specs, load
from vlmcompress.reduction import block as carried
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.hooks import KeptWhole, attach, attach_carried
from vlmcompress.reduction.methods import REGISTRY, dart
from vlmcompress.reduction.support import family_problem
from vlmcompress.utils.errors import UserError

pytestmark = pytest.mark.representatives


@pytest.mark.parametrize(("family", "method"), EACH)
def test_detaching_restores_the_model(family, method):
    vlm = tiny(family)
    inputs = encode(vlm, ONE, TWO)
    plain = vlm.model(**inputs).logits
    before = traces(vlm.model)
    with attach(vlm, method, given(method)) as attached:
        assert vlm.model(**inputs).logits.shape != plain.shape
    attached.detach()  # once was enough, twice does no harm
    assert traces(vlm.model) == before
    assert torch.equal(vlm.model(**inputs).logits, plain)


@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_transformers_alone_ignores_what_a_checkpoint_carries(family, tmp_path):
    """Neither the block nor the architecture's name, which engines refuse, means anything to `from_pretrained`."""
    plain = load(build(family, tmp_path / "model"))
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in encode(plain, ONE).items()}
    logits = plain.model(**inputs).logits
    file = plain.path / "config.json"
    file.write_text(json.dumps(carried.config_with_reducer(json.loads(file.read_text()), parse_reducer("dart:0.5"))))
    model = AutoModelForImageTextToText.from_pretrained(plain.path)
    assert type(model) is type(plain.model) and model.dtype == plain.model.dtype
    assert torch.equal(model(**inputs).logits, logits)
    with attach_carried(model, plain.processor, plain.path):
        assert model(**inputs).logits.shape[1] < logits.shape[1]


@pytest.mark.parametrize(("family", "method"), [("llava", "visionzip"), ("qwen2-5-vl", "dart"), ("llava", "fastv")])
def test_a_loss_of_the_last_tokens_reaches_the_projector(family, method):
    """What training of a model after a reducer takes, in any trainer: no reducer drops the answer, which comes last."""
    vlm = tiny(family)
    weights = [w for name, w in vlm.model.named_parameters() if name.startswith(vlm.spec.projector[0]) and w.ndim == 2]
    with attach(vlm, method, given(method)), torch.enable_grad():
        for weight in weights:
            weight.requires_grad_()
        loss = vlm.model(**encode(vlm, ONE), logits_to_keep=2).logits.square().sum()
        gradients = torch.autograd.grad(loss, weights)
    assert weights and all(gradient.abs().sum() > 0 for gradient in gradients)


def test_one_at_a_time():
    vlm = tiny("llava")
    with attach(vlm, "random"), pytest.raises(ValueError, match="detach"):
        attach(vlm, "fastv", {"layer": 1})
    before = traces(vlm.model)
    with pytest.raises(UserError, match="layer 3"):
        attach(vlm, "fastv", {"layer": 3})
    assert traces(vlm.model) == before
    attach(vlm, "random").detach()


def test_an_error_within_the_model_detaches_the_reducer():
    vlm = tiny("llava")
    inputs = encode(vlm, ONE)
    with attach(vlm, "random", {"keep": 0.5}) as attached:
        with pytest.raises(ValueError, match="do not match"):
            vlm.model(**inputs | {"pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)})
        assert attached._call is None
        assert vlm.model(**inputs).logits.shape[1] < inputs["input_ids"].shape[1]


@pytest.mark.parametrize(("family", "method"), EACH)
def test_text_alone_is_untouched(family, method):
    vlm = tiny(family)
    inputs = encode(vlm, NONE)
    generation = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain, answer = vlm.model(**inputs).logits, vlm.model.generate(**inputs, **generation)
    with attach(vlm, method, given(method)) as attached:
        assert torch.equal(vlm.model(**inputs).logits, plain)
        again = vlm.model.generate(**inputs, **generation)
    assert torch.equal(torch.stack(answer.logits), torch.stack(again.logits)) and not attached.reduced_units


def test_unsupported_models_are_refused_in_one_line():
    for spec, method in itertools.product(all_specs(), REGISTRY.names()):
        reason = family_problem(spec, method)
        if reason is None:
            assert spec.images.grid is not None, (spec.family, method)
        else:
            assert "\n" not in reason and len(reason) < 280 and (method in reason or spec.family in reason), reason


def test_supported_and_unsupported_models():
    works = {spec.family: [m for m in REGISTRY.names() if family_problem(spec, m) is None] for spec in all_specs()}
    inside = ["dart-llm", "fastv"]
    after = [
        "coverage",
        "dart",
        "divprune",
        "evs",
        "learned",
        "pool",
        "random",
        "uniform",
    ]
    merging, by_pixels = ["dymu"], ["pixelprune"]
    assert works["llava"] == sorted([*after, *inside, *merging, *by_pixels, "visionzip", "vscan"])
    assert works["llava-next"] == sorted([*after, *inside])
    assert works["gemma3"] == sorted([*after, *merging, *by_pixels])
    assert works["lfm2-vl"] == after
    for family in ("qwen2-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe"):
        assert works[family] == sorted([*after, *inside, *by_pixels])
    for family in ("qwen3-5", "qwen3-5-moe"):  # recurrent states
        assert works[family] == sorted([*after, *by_pixels])
    for family in ("idefics3", "internvl"):
        assert works[family] == sorted([*after, *inside, *merging, *by_pixels])
    assert works["llava-onevision"] == sorted([*after, *inside])
    with pytest.raises(UserError, match="CLS"):
        attach(tiny("qwen2-5-vl"), "visionzip")
    with pytest.raises(UserError, match="pictures of one size, and those of qwen2-vl have any; use coverage, "):
        attach(tiny("qwen2-vl"), "dymu")


def test_options_of_an_attached_reducer():
    vlm = tiny("llava")
    for method, options in (("dart", {"keep": 0.25}), (parse_reducer("dart:0.25"), None)):
        with attach(vlm, method, options) as attached:
            assert attached.reducer == dart.Dart(keep=0.25)
    with pytest.raises(UserError, match="no option 'kep'; did you mean 'keep'"):
        attach(vlm, "dart", {"kep": 0.5})


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, True, "half", float("nan")])
def test_bad_shares_are_refused(keep):
    with pytest.raises(UserError, match="'random': keep"):
        attach(tiny("llava"), "random", {"keep": keep})


@pytest.mark.parametrize("method", ["random", "fastv"])
def test_images_too_small_for_the_share_are_kept_whole_and_reported_once(method):
    """Of 9 tokens 0.05 is none, of 15 it is one."""
    vlm = tiny("qwen2-5-vl")
    inputs = encode(vlm, ONE, TWO)
    with attach(vlm, method, given(method, 0.05)) as attached, warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        vlm.model(**inputs)
        vlm.model(**inputs)
    assert [(len(unit.reduction.anchor), len(unit.columns)) for unit in attached.reduced_units] == [
        (9, 9),
        (1, 15),
        (1, 12),
    ]
    (warning,) = [str(warned.message) for warned in output if warned.category is KeptWhole]
    assert warning.startswith("keep=0.05") and warning.endswith("one token of a 3x3 grid; such images are kept whole")


def test_calls_that_cannot_be_reduced():
    vlm = tiny("llava")
    inputs = encode(vlm, ONE, TWO)
    with attach(vlm, "random", {"keep": 0.5}):
        with pytest.raises(UserError, match="labels"):
            vlm.model(**inputs, labels=inputs["input_ids"])
        with pytest.raises(UserError, match="static cache"):
            vlm.model(**inputs, past_key_values=StaticCache(vlm.model.config, max_cache_len=200))
        with pytest.raises(UserError, match="static cache"):
            vlm.model.generate(**inputs, max_new_tokens=2, cache_implementation="static")
        with pytest.raises(UserError, match="input_ids"):
            embeds = vlm.model.get_input_embeddings()(inputs["input_ids"])
            vlm.model(inputs_embeds=embeds, pixel_values=inputs["pixel_values"])
        out = vlm.model(**inputs)
        with pytest.raises(UserError, match="full sequence"):
            short = torch.ones(2, out.logits.shape[1] + 1, dtype=torch.long)
            vlm.model(input_ids=torch.tensor([[1], [1]]), past_key_values=out.past_key_values, attention_mask=short)
    window = vlm.model.config.text_config.sliding_window = 50
    try:
        with attach(vlm, "random", {"keep": 0.5}), pytest.raises(UserError, match=f"window of {window}"):
            vlm.model(**inputs)
    finally:
        del vlm.model.config.text_config.sliding_window
    qwen = tiny("qwen2-vl")
    with attach(qwen, "random", {"keep": 0.5}), pytest.raises(UserError, match="videos"):
        qwen.model(
            **encode(qwen, ONE), pixel_values_videos=torch.zeros(4, 1176), video_grid_thw=torch.tensor([[1, 2, 2]])
        )


def test_attention_that_cannot_be_read():
    vlm = tiny("llava")
    vlm.model.set_attn_implementation("eager")
    try:
        before = traces(vlm.model)
        with pytest.raises(UserError, match="attn_implementation='sdpa'"):
            attach(vlm, "fastv", {"layer": 1})
        assert traces(vlm.model) == before
        with attach(vlm, "random", {"keep": 0.5}):  # looks at no attention
            assert vlm.model(**encode(vlm, ONE)).logits.shape[1] < encode(vlm, ONE)["input_ids"].shape[1]
    finally:
        vlm.model.set_attn_implementation("sdpa")
