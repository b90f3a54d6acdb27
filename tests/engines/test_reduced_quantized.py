"""Reduced and quantized: every reducer that a family serves, with every kind of weights, loads in vLLM and answers.

Checkpoints are written by the pipeline from tiny random models, calibrated after the reducer. Oracle: transformers on the
same checkpoint with the reducer attached: the same prompt, and the same probabilities of the first token.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from tests.kit import calibration_rows, forks, lane, tiny
from vlmcompress import engines, models
from vlmcompress.engines import EngineSettings
from vlmcompress.engines.vllm import PYTHON_VARIABLE
from vlmcompress.evaluation.doctor.questions import make_questions
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import support
from vlmcompress.reduction.choice import parse_reducer

pytestmark = pytest.mark.engine
SCHEMES = {"fp8": {}, "int8": {}, "awq": {"group_size": 32}, "gptq": {"group_size": 64}}
ARCHITECTURES = {
    "llava": "LlavaForConditionalGeneration",
    "qwen2-5-vl": "Qwen2_5_VLForConditionalGeneration",
}
REDUCERS = (
    "random:0.5",
    "uniform:0.5",
    "dart:0.5",
    "divprune:0.5",
    "visionzip:0.5",
    "vscan:0.5,shallow=1",
    "dymu:0.5",
)
SERVED = [
    (family, reducer)
    for family, name in ARCHITECTURES.items()
    for reducer in REDUCERS
    if support.engine_problem(name, parse_reducer(reducer)) is None
]
FEW = [
    ("llava", "visionzip:0.5", "fp8"),
    ("qwen2-5-vl", "dart:0.5", "int8"),
]
REST = [(*pair, scheme) for pair, scheme in itertools.product(SERVED, SCHEMES) if (*pair, scheme) not in FEW]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, quick_engines) -> Path:
    """Tiny models of the families, calibration data, and images to ask about."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 6, lambda i: [] if i == 0 else ["1.png", "0.png"] if i == 1 else f"{i}.png")
    for family in ARCHITECTURES:
        tiny.build(family, folder / family)
    (folder / "media").mkdir()
    return folder


def written(world: Path, out: Path, family: str, reducer: str, scheme: str) -> Path:
    """The checkpoint."""
    recipe = {"model": str(world / family), "out": str(out), "scheme": scheme, "reduce": reducer}
    calibrate = {"data": str(world / "calib.jsonl"), "samples": 6}
    quantize(resolve(recipe | {"options": SCHEMES[scheme], "calibrate": calibrate}).recipe)
    assert reducer_block.read_reducer(models.read_config(out)).reducer.method == parse_reducer(reducer).method
    return out


def whole_characters(first: dict[str, float] | None) -> dict[str, float]:
    """Probabilities of first tokens; those of parts of characters, which each engine decodes its own way, are one."""
    assert first
    shares = dict.fromkeys(["", *first], 0.0)
    for token, logprob in first.items():
        shares["" if token == "\ufffd" else token] += math.exp(logprob)
    return shares


def check(world: Path, folder: Path, names: tuple[str, str, str]) -> str:
    """Write a checkpoint, and ask vLLM and transformers the same. Returns vLLM's version."""
    out = written(world, folder / "-".join(names).replace(":", "-"), *names)
    requests, media = make_questions(world / "media", 4, None, seed=0), world / "media"
    runs = {}
    for engine, at_once in (("hf", 1), ("vllm", 4)):
        settings = EngineSettings(max_tokens=4, logprobs=40, max_model_len=2048, max_num_seqs=at_once)
        runs[engine] = engines.get_engine(engine).answer(out, requests, media=media, settings=settings)
    for name, answer in runs["vllm"].answers.items():
        expected = runs["hf"].answers[name]
        assert answer.prompt_tokens == expected.prompt_tokens, (names, name)
        vllm, hf = whole_characters(answer.first), whole_characters(expected.first)
        gaps = [abs(vllm[token] - hf[token]) for token in vllm.keys() & hf.keys()]
        assert len(gaps) > 10 and max(gaps) < 0.02, (names, name, gaps)
    return runs["vllm"].engine["version"]


@pytest.mark.slow
@pytest.mark.parametrize("names", FEW, ids=" ".join)
def test_a_few_quantized_checkpoints_answer_with_every_reducer(
    world: Path, tmp_path: Path, names: tuple[str, str, str]
) -> None:
    check(world, tmp_path, names)


def test_one_checkpoint_answers_in_the_newer_vllm(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/test --slow` runs all tests of engines there."""
    newer = forks.python(*forks.VLLM, path=lane.environment()["PYTHONPATH"])
    monkeypatch.setenv(PYTHON_VARIABLE, newer)
    assert check(world, tmp_path, FEW[0]) == "0.33.0"


@pytest.mark.slow
@pytest.mark.parametrize("pair", SERVED, ids=" ".join)
def test_all_quantized_checkpoints_answer_with_every_reducer(
    world: Path, tmp_path: Path, pair: tuple[str, str]
) -> None:
    for names in REST:
        if names[:2] == pair:
            check(world, tmp_path, names)
