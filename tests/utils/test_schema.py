"""Files that are read back: with any field of another type each reader says so in one line, or does not read it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.kit import made_manifest, tiny
from tests.kit.made_results import make_results
from vlmcompress import models
from vlmcompress.evaluation.results import FILE, load_results
from vlmcompress.export import draft_folder, manifest
from vlmcompress.export.draft_folder import Draft
from vlmcompress.reduction import threshold_file
from vlmcompress.reduction.visual_count import CountRule, Pictures
from vlmcompress.utils.errors import UserError

OTHER = {str: [1], bool: "x", int: "x", float: "x", list: "x", dict: 7}
"""Type of a field -> a value of another."""


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all fields in JSON data but for those that are null."""
    if value is not None:
        yield place
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*place, key))


def replaced(value: Any, place: tuple[Any, ...]) -> Any:
    """The data with a value of another type at one place."""
    if not place:
        return OTHER[type(value)]
    result = copy.copy(value)
    result[place[0]] = replaced(value[place[0]], place[1:])
    return result


def accepted(file: Path, read: Any) -> set[str]:
    """The fields of `file` that `read` takes whatever their type is. Its errors have one line."""
    text, fields = file.read_text(), set()
    content = json.loads(text)
    read()
    for place in places(content):
        file.write_text(json.dumps(replaced(content, place)))
        try:
            read()
            fields.add(".".join(map(str, place)))
        except UserError as error:
            assert "\n" not in str(error), error
    file.write_text(text)
    return fields


def test_a_manifest(tmp_path):
    by_kind = {"text": 0.5, "vision": 0.25}
    file = tmp_path / manifest.MANIFEST
    content = made_manifest.manifest(
        recipe={
            "scheme": "gptq",
            "skip": ["re:x"],
            "resize": {"keep": 0.5, "tokens": 9},
            "model": "x",
            "engine": "vllm",
        },
        seed=3,
        calibration={"source": "x", "samples": 2, "tokens": {"text": 7}, "text": {"source": "y", "samples": 1}},
        errors={"a": by_kind},
        maxima={"a": by_kind},
        kv_cache={"b": {"k": {"maximum": by_kind, "clipped": by_kind, "error": by_kind}}},
        warnings=["w"],
        visual_tokens={"image": "1x1", "before": 9, "after": 4},
        recovery={},  # of earlier snapshots
        allocation={"bits": 3.5},
        devices=[1, 2],
        files={"config.json": {"sha256": "0", "size": 2}},
    )
    file.write_text(json.dumps(content))
    assert accepted(file, lambda: manifest.read_manifest(tmp_path)) == {"recipe.model", "recovery"}, (
        "which nobody reads"
    )


def test_a_draft(tmp_path):
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 8
    )
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 8,
        "target_hidden_size": 8,
        "eagle_aux_hidden_state_layer_ids": [1],
        "transformer_layer_config": sizes,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    }
    facts = {
        "method": "eagle3",
        "target": {"content_sha256": "0", "name": "x"},
        "parameters": 8,
        "samples": {"trained_on": 2, "held_out": 1},
        "acceptance": {"by_position": [0.5], "length": 1.5},
    }
    save_file({draft_folder.HEAD: torch.zeros(2)}, tmp_path / draft_folder.WEIGHTS)
    for name, content in ((draft_folder.FACTS, facts), ("config.json", config)):
        (tmp_path / name).write_text(json.dumps(content))
    for name in (draft_folder.FACTS, "config.json"):
        assert not accepted(tmp_path / name, lambda: Draft.of(tmp_path))


def test_thresholds(tmp_path):
    content = {
        "schema_version": threshold_file.SCHEMA_VERSION,
        "model": {"source": "x", "encoder_sha256": "0", "encoder": {"patch_size": 14}},
        "reduce": {"method": "dymu", "keep": 0.5, "thresholds": [0.5, 0.25]},
    }
    file = tmp_path / "t.json"
    file.write_text(json.dumps(content))
    assert accepted(file, lambda: threshold_file.read(file)) == {"model.encoder.patch_size"}, "which is compared alone"


def test_results(tmp_path):
    file = tmp_path / FILE
    file.write_text(make_results(samples=[], bench=None).model_dump_json(by_alias=True))
    fields = accepted(file, lambda: load_results(tmp_path))
    free = {".".join(field.split(".")[-2:-1]) for field in fields}
    assert free <= {"machine", "engine", "options"}, "settings of any kind, which are shown"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llava"
    tiny.build("llava", folder)
    return folder


def test_a_models_config(model):
    fields = accepted(model / "config.json", lambda: models.build_meta_model(model))
    assert not fields & {"text_config", "vision_config", "architectures", "text_config.rope_parameters", "model_type"}


def test_a_processor(model):
    config = models.build_meta_model(model).config
    spec = models.spec_for(models.read_config(model))

    def read() -> None:
        CountRule(model, config, spec).count(Pictures(((64, 48),)))

    accepted(model / "processor_config.json", read)
