"""The block of config.json that names a checkpoint's reducer."""

from __future__ import annotations

import json

import pytest

from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.methods import REGISTRY, TokenCounter
from vlmcompress.utils.errors import UserError

PLAIN = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}


@pytest.mark.parametrize("method", REGISTRY.names())
def test_a_written_block_is_read_back(method):
    learned = {"dymu": "dymu:thresholds=[0.9, 0.8]"}
    reducer = parse_reducer(learned.get(method, method))
    config = json.loads(json.dumps(reducer_block.config_with_reducer(PLAIN, reducer)))
    assert config["architectures"] == ["VlmcompressLlavaForConditionalGeneration"]
    assert reducer_block.read_reducer(config) == reducer_block.CarriedReducer("llava", reducer)
    assert reducer_block.config_with_reducer(config, parse_reducer("random:0.5")) == reducer_block.config_with_reducer(
        PLAIN, parse_reducer("random:0.5")
    )


def counter():
    return TokenCounter(14, (4, 16), (0.5,) * 14, (0.0,) * 14, (1.0,) * 14, 9.0, 1.5)


def test_a_count_from_pixels_is_carried():
    reducer = parse_reducer("dymu:thresholds=[0.9, 0.8]")
    config = json.loads(json.dumps(reducer_block.config_with_reducer(PLAIN, reducer, counter())))
    assert reducer_block.read_reducer(config) == reducer_block.CarriedReducer("llava", reducer, counter())
    config["vlmcompress"]["count"]["buckets"] = [16, 4]
    with pytest.raises(UserError, match="count.buckets should be ascending"):
        reducer_block.read_reducer(config)
    with pytest.raises(UserError, match="'dart' takes none"):
        reducer_block.read_reducer(reducer_block.config_with_reducer(PLAIN, parse_reducer("dart"), counter()))


@pytest.mark.parametrize("text", ["dymu", "dymu:thresholds=x.json"])
def test_a_reducer_for_a_model_in_memory_is_not_stored(text):
    with pytest.raises(UserError, match="has no thresholds"):
        reducer_block.config_with_reducer(PLAIN, parse_reducer(text))


def test_a_checkpoint_without_a_reducer_has_no_block():
    assert reducer_block.read_reducer(PLAIN) is None
    assert reducer_block.read_reducer({"model_type": "llava"}) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vlmcompress": None}, "is missing"),
        ({"vlmcompress": [1]}, "is no mapping"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "serves all tokens"),
        ({"architectures": None}, "serves all tokens"),
        ({"architectures": ["VlmcompressLlavaForConditionalGeneration", "Other"]}, "serves all tokens"),
        ({"model_type": "qwen2_vl"}, "is for model_type 'llava'"),
        ({"schema": 2}, "upgrade"),
        ({"schema": True}, "schema is True"),
        ({"schema": "1"}, "schema is '1'"),
        ({"surprise": 1}, "'surprise' is unknown"),
        ({"reduce": "dart:0.5"}, "is no mapping"),
        ({"reduce": {"keep": 0.5}}, "reduce is"),
        ({"reduce": {"method": "os.system"}}, "os.system"),
        ({"reduce": {"method": "dart", "keep": 0}}, "keep must be a number above 0"),
        ({"reduce": {"method": "dart", "keep": 1.5}}, "keep must be a number above 0"),
        ({"reduce": {"method": "dart", "keep": "0.5"}}, "should be a number"),
        ({"reduce": {"method": "dart", "kepp": 0.5}}, "no option 'kepp'"),
        ({"reduce": {"method": "dymu"}}, "has no thresholds"),
        ({"reduce": {"method": "dymu", "thresholds": [0.5], "vtu": True}}, "no option 'vtu'"),
        ({"count": [1]}, "count should be a mapping"),
        ({"reduce": {"method": "dymu", "thresholds": "/etc/passwd"}}, "has no thresholds"),
    ],
)
def test_bad_blocks_are_refused_in_one_line(change, text):
    config = reducer_block.config_with_reducer(PLAIN, parse_reducer("dart:0.5"))
    block = config["vlmcompress"]
    for key, value in change.items():
        into = config if key in config else block
        into[key] = value
    with pytest.raises(UserError) as caught:
        reducer_block.read_reducer(config)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_the_block_is_missing():
    config = reducer_block.config_with_reducer(PLAIN, parse_reducer("dart:0.5"))
    del config["vlmcompress"]["reduce"]
    with pytest.raises(UserError, match="'reduce' is missing"):
        reducer_block.read_reducer(config)
