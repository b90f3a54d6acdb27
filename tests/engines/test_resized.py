"""vLLM serves images made smaller by the processor's settings with its own classes, alone and before a reducer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from tests.kit import vllm_answers
from tests.kit.engine import asked
from tests.kit.inputs import encode
from tests.kit.published import with_real_limits
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import Recipe

pytestmark = pytest.mark.engine
CASES = {"qwen2-5-vl": "resize:tokens=4"}
MORE = {"idefics3": "resize:tokens=4", "llava-onevision": "resize:tokens=60", "gemma4": "resize:tokens=70"}
STAGES = "both"


def resized(cases: dict[str, Any], base: Path) -> dict[str, Path]:
    """Family -> its checkpoint with smaller images; `both`: with a reducer after them."""
    folders = {}
    for name, reduce in cases.items():
        source = build("qwen2-5-vl" if name == STAGES else name, base / name / "source")
        if name == "gemma4":  # which has the fewest tokens already
            with_real_limits(name, source)
        folders[name] = base / name / "out"
        quantize(Recipe.of(source, folders[name], scheme="none", reduce=reduce))
    return folders


def answered(folders: dict[str, Path]) -> dict[str, dict]:
    """What vLLM makes of each."""
    return dict(zip(folders, asked("answers", vllm_answers.jobs(folders.values(), max_tokens=6)), strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return resized(CASES | {STAGES: [CASES["qwen2-5-vl"], "uniform:0.5"]}, tmp_path_factory.mktemp("resized"))


@pytest.fixture(scope="module")
def served(folders) -> dict[str, dict]:
    return answered(folders)


def visual(vlm: models.VLM, prompt: list[int]) -> int:
    return prompt.count(getattr(vlm.model.config, vlm.spec.image_token))


def check(folder: Path, record: dict) -> None:
    """Against transformers on the same folder, whose prompts are shorter than the original's."""
    assert "error" not in record, record["error"]
    original = json.loads((folder.parent / "source" / "config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == original["architectures"] and "vlmcompress" not in config
    spec = models.spec_for(config)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    smaller = models.VLM(model, models.load_processor(folder), spec, folder)
    full = models.VLM(model, models.load_processor(folder.parent / "source"), spec, folder)
    batch, got = encode(smaller, 1), record["answers"][0]
    assert got["prompt"] == batch["input_ids"][0].tolist()
    assert visual(smaller, got["prompt"]) < visual(full, encode(full, 1)["input_ids"][0].tolist())
    assert vllm_answers.gap(model, batch, got["answer"]) < 0.05


@pytest.mark.parametrize("family", CASES)
def test_answers_like_transformers(family, folders, served):
    check(folders[family], served[family])


@pytest.mark.slow
def test_other_families_resize_like_transformers(tmp_path):
    folders = resized(MORE, tmp_path)
    for family, record in answered(folders).items():
        check(folders[family], record)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tokens", "settings"),
    [("qwen2-5-vl", 4, {"max_pixels": 4 * 28 * 28}), ("gemma4", 70, {"max_soft_tokens": 70})],
)
def test_a_request_sets_the_processors_limit(family, tokens, settings, tmp_path):
    """Up and down: the checkpoint of one limit answers as that of the other where the request has its setting."""
    larger = with_real_limits(family, build(family, tmp_path / "larger"))
    quantize(Recipe.of(larger, tmp_path / "smaller", scheme="none", reduce=f"resize:tokens={tokens}"))
    up = {"max_pixels": 512 * 28 * 28} if family == "qwen2-5-vl" else {"max_soft_tokens": 280}
    folders = [larger, tmp_path / "smaller"]
    plain, asking = vllm_answers.jobs(folders), vllm_answers.jobs(folders)
    for job, processor in zip(asking, (settings, up), strict=True):
        job["processor"] = processor
    answers = [record.get("answers", record) for record in asked("answers", plain + asking)]
    assert answers[:2] == answers[:1:-1] and answers[0] != answers[1], answers


def test_a_reducer_acts_on_what_the_smaller_image_has(folders, served):
    """Half of its tokens are left in vLLM's prompt."""
    assert "error" not in served[STAGES], served[STAGES]["error"]
    folder = folders[STAGES]
    vlm = models.load(folder)
    tokens = vlm.spec.layout(vlm.processor, 80, 60, 1).tokens
    alone, both = (served[name]["answers"][0]["prompt"] for name in ("qwen2-5-vl", STAGES))
    assert visual(vlm, alone) == tokens
    assert visual(vlm, both) == (tokens + 1) // 2
