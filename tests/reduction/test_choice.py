"""`--reduce` and a recipe's `reduce`: what is understood, what is refused and in which words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmcompress.recipe import Recipe
from vlmcompress.reduction import methods
from vlmcompress.reduction.choice import compared, layered, parse_reducer, reducer_of_setting, same
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.settings import merge


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("dart:0.25", {"method": "dart", "keep": 0.25, "pivots": 0}),
        ("dart:1/4,pivots=8", {"method": "dart", "keep": 0.25, "pivots": 8}),
        ("dart: keep = 0.25 , pivots=8", {"method": "dart", "keep": 0.25, "pivots": 8}),
        ("random:1", {"method": "random", "keep": 1, "seed": 0}),
        ("fastv:5e-1,layer=3", {"method": "fastv", "keep": 0.5, "layer": 3}),
        ("coverage:auto,merge=nearest", {"method": "coverage", "keep": 0.5, "merge": "nearest"}),
        (
            "dymu:thresholds=[0.9, 0.8],keep=0.5",
            {"method": "dymu", "keep": 0.5, "thresholds": (0.9, 0.8)},
        ),
    ],
)
def test_choices_of_reducers_are_parsed(text, plain):
    chosen = parse_reducer(text)
    assert chosen.plain() == plain
    assert reducer_of_setting(plain).plain() == plain
    assert isinstance(chosen.reducer, type(methods.REGISTRY.get(plain["method"])))


@pytest.mark.parametrize("method", methods.REGISTRY.names())
def test_defaults_and_back(method):
    chosen = parse_reducer(method)
    assert chosen.reducer == methods.REGISTRY.get(method)
    assert (
        reducer_of_setting({"method": method, **({"keep": "auto"} if chosen.reducer.keep is not None else {})})
        == chosen
    )
    assert parse_reducer(str(chosen)) == chosen


@pytest.mark.parametrize(
    "text",
    ["dart:0.25", "dart:1/3,pivots=8", "random:1", "dymu:0.07,thresholds=[0.9, 0.8]", "coverage:0.25,merge=nearest"],
)
def test_written_as_read(text):
    assert str(parse_reducer(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dort:0.5", "--reduce dort:0.5: unknown reducer 'dort'; did you mean 'dart'?"),
        (":0.5", "unknown reducer ''; choose from"),
        ("dart:0", "--reduce dart:0: 'dart': keep must be a number above 0 and at most 1, got 0"),
        ("dart:1.5", "keep must be a number above 0 and at most 1, got 1.5"),
        ("dart:-0.5", "keep must be a number above 0"),
        ("dart:.nan", "keep must be a number above 0 and at most 1, got nan"),
        ("dart:1e-300", "keep must be at least 1e-06, got 1e-300, which leaves no token of any image"),
        (f"dart:1/1{'0' * 400}", "keep must be a number above 0 and at most 1, got 0.0"),
        (f"dart:1{'0' * 400}/1", "should be a number"),
        (f"dart:1{'0' * 400}", "keep "),
        (f"random:0.5,seed={'9' * 30}", "seed must be at most 9223372036854775807, got " + "9" * 30),
        ("random:0.5,seed=-1", "seed must be a whole number of at least 0, got -1"),
        ("tome:0.5", "there is no reducer 'tome' any more; take dymu"),
        (f"dart:0.5,pivots={'9' * 30}", "pivots must be at most 1000000"),
        ("pixelprune:threshold=.inf", "threshold must be a number from 0 to 1, got inf"),
        ("dart:half", "keep is 'half', should be a number"),
        ("dart:50%", "keep is '50%', should be a number"),
        ("dart:true", "keep is True, should be a number"),
        ("dart:1/0", "keep is '1/0', should be a number"),
        ("dart:0.5,pivot=3", "has no option 'pivot'; did you mean 'pivots'?"),
        ("dart:0.5,pivots=2.5", "pivots is 2.5, should be a whole number"),
        ("dart:0.5,8", "'8' is not a setting; write METHOD:KEEP,OPTION=VALUE"),
        ("dart:0.5,keep=0.3", "'keep' is given twice"),
        ("pixelprune:0.5", "'pixelprune' has no share to keep; its options are threshold"),
        ("dyrate", "there is no reducer 'dyrate' any more; take fastv"),
        ("cdpruner:0.5", "there is no reducer 'cdpruner' any more; take coverage, or divprune"),
        ("visionzip:0.5,merge=mean", "'visionzip' has no option 'merge' any more, it is always sum"),
        ("divprune:0.5,merge=nearest,similar=0.8", "'divprune' has no option 'similar' any more, it is always 0.6"),
        ("dymu:thresholds=[a]", "thresholds is ['a'], should be a list of numbers"),
        ("dart:[0.5", "is not valid YAML"),
    ],
)
def test_bad_choices_are_refused(text, message):
    with pytest.raises(UserError) as raised:
        parse_reducer(text)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("settings", [None, 3, {"keep": 0.5}, {"method": 3}, ["dart"]])
def test_recipes_without_a_method_are_refused(settings):
    with pytest.raises(UserError, match="write it like {method: dart, keep: 0.5}"):
        reducer_of_setting(settings)


def test_earlier_checkpoints_name_options_that_have_one_value_now():
    assert reducer_of_setting({"method": "coverage", "keep": 0.5, "temperature": 0.2}) == parse_reducer("coverage:0.5")
    every = {"method": "visionzip", "keep": 0.5, "contextual": 10 / 64, "merge": "sum"}
    assert reducer_of_setting(every) == parse_reducer("visionzip:0.5")


def test_unknown_options_are_refused():
    """What the base answers for a method is not on the command line, nor in a checkpoint."""
    for text in ("dymu:0.5,LEARNS=false", "dart:0.5,vtu=true", "uniform:layer=2", "uniform:0.5,thresholds=[0.5]"):
        option = text.partition("=")[0].rpartition(",")[2].rpartition(":")[2]
        with pytest.raises(UserError, match=f"has no option '{option}'"):
            parse_reducer(text)


def test_methods_that_need_training():
    states = {
        "uniform:0.5": (False, False, False),
        "dymu:0.5": (True, True, False),
        "dymu:0.5,thresholds=file.json": (True, False, False),
        "dymu:0.5,thresholds=[0.5, 0.25]": (True, False, True),
    }
    choices = {text: parse_reducer(text) for text in states}
    assert {
        text: (c.reducer.LEARNS, c.reducer.needs_thresholds, c.has_thresholds) for text, c in choices.items()
    } == states
    *_, learned = choices.values()
    assert learned.label == "dymu:0.5 (learned thresholds)" and choices["dymu:0.5"].label == "dymu:0.5"
    assert choices["uniform:0.5"].with_thresholds((0.5,)) == choices["uniform:0.5"]
    assert [same(learned, other) for other in choices.values()] == [False, True, True, True]
    assert not same(learned, learned.with_thresholds((0.5, 0.5))) and not same(learned, None) and same(None, None)


def test_images_too_small_for_a_share():
    assert parse_reducer("dart:0.1").too_small((1, 2, 2)) and not parse_reducer("dart:0.1").too_small((1, 2, 3))
    assert not parse_reducer("dymu:0.01").too_small((1, 1, 1))


def resolved(*layers):
    """`resize` and `reduce` of a recipe whose layers, first one strongest, say these things."""
    values, _ = merge(layered([(f"layer {number}", layer) for number, layer in enumerate(layers)]))
    return values.get("resize"), values.get("reduce")


@pytest.mark.parametrize(
    ("layers", "resize", "reduce"),
    [
        ([{"reduce": "resize:0.5"}], {"keep": 0.5}, None),
        ([{"reduce": ["resize:0.5", "dart:0.25"]}], {"keep": 0.5}, {"method": "dart", "keep": 0.25}),
        (
            [{"reduce": [{"method": "resize", "tokens": 64}, {"method": "dart"}]}],
            {"tokens": 64},
            {"method": "dart"},
        ),
        ([{"resize": {"tokens": 64}, "reduce": "dart:0.25"}], {"tokens": 64}, {"method": "dart", "keep": 0.25}),
        # A layer that names a method starts anew, whichever stage it is of.
        ([{"reduce": "resize:0.5"}, {"reduce": "dart:0.25"}], {"keep": 0.5}, None),
        ([{"reduce": "dart:0.25"}, {"reduce": ["resize:0.5", "dart:0.5"]}], None, {"method": "dart", "keep": 0.25}),
        (
            [{"reduce": {"keep": 0.1}}, {"reduce": ["resize:0.5", "dart:0.5"]}],
            {"keep": 0.5},
            {"method": "dart", "keep": 0.1},
        ),
    ],
)
def test_two_stages(layers, resize, reduce):
    assert resolved(*layers) == (resize, reduce)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"reduce": ["dart:0.5", "resize:0.5"]}, "layer 0: reduce: resize works on images, before dart; name it first"),
        ({"reduce": ["resize:0.5", "resize:0.5"]}, "resize and resize do not go together"),
        ({"reduce": ["dart:0.5", "divprune:0.5"]}, "dart and divprune do not go together"),
        ({"reduce": ["resize:0.5", "dart:0.5", "random"]}, "do not go together"),
        ({"reduce": "resize:0.5", "resize": {"keep": 0.5}}, "resize is given twice"),
    ],
)
def test_contradictory_stages_are_refused(layer, message):
    with pytest.raises(UserError, match=message):
        resolved(layer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "should have keep"),
        ({"keep": 0}, "greater than 0"),
        ({"keep": 1.5}, "less than or equal to 1"),
        ({"tokens": 0}, "greater than or equal to 1"),
        ({"tokens": 2.5}, "valid integer"),
        ({"share": 0.5}, "unknown key 'resize.share'"),
    ],
)
def test_resize_values(settings, message):
    with pytest.raises(UserError, match=message):
        Recipe.of("nowhere", scheme="none", resize=settings)


def test_resize_is_written_as_read():
    assert compared(["resize:0.5,tokens=64", "dart:0.5"]) == (Resize(keep=0.5, tokens=64), [parse_reducer("dart:0.5")])
    assert str(Resize(keep=0.5, tokens=64)) == "resize:0.5,tokens=64" and str(Resize(keep="1/4")) == "resize:0.25"
    with pytest.raises(UserError, match="not a token reducer"):
        parse_reducer("resize:0.5")


def test_a_request_sets_a_share_within_bounds():
    choice = parse_reducer("coverage:0.5,keep_max=3/4")
    assert parse_reducer(str(choice)) == choice and choice.plain()["keep_max"] == 0.75
    assert [choice.requested(keep) for keep in (0.25, 0.75, 2, 10**6)] == [0.25, 0.75, 2, 10**6]
    for keep in (0, -1, 0.76, 1, 1.5, math.nan, math.inf, 10**400, True, "0.5", None):
        with pytest.raises(
            ValueError, match="'keep' must be a share above 0 and at most 0.75, or a number of tokens from 2"
        ):
            choice.requested(keep)
    with pytest.raises(ValueError, match="coverage:0.5 has no 'keep_max'"):
        parse_reducer("coverage:0.5").requested(0.5)
    with pytest.raises(UserError, match="keep_max must be a number from 0.5 to 1, got 0.25"):
        parse_reducer("coverage:0.5,keep_max=0.25")
    with pytest.raises(UserError, match="'pool' has no option 'keep_max'"):
        parse_reducer("pool:window=2x2,keep_max=1")


@given(st.integers(1, 300), st.integers(1, 13), st.floats(1e-6, 0.75) | st.integers(2, 400))
def test_a_request_keeps_no_more_than_the_largest_share(tokens: int, tiles: int, keep: float):
    """A number of tokens is met exactly, where the image has as many within the bounds. Each tile keeps one at least."""
    choice = parse_reducer("coverage:0.5,keep_max=0.75")
    count = choice.keeping(choice.requested(keep), tokens * tiles).reducer.budget((1, 1, tokens))
    exact = min(tokens * keep if keep < 1 else keep / tiles, tokens * 0.75)
    assert count >= 1 and abs(count - max(exact, 0.5)) <= 0.5 + 1e-9
