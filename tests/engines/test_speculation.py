"""Speculative decoding: what is refused in one line; greedy answers that are those without it; an MTP head that vLLM loads."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kit import rtn
from tests.kit.engine import asked
from tests.kit.tiny import build
from vlmcompress.engines.vllm import Installed, installed, serve, speculation
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 1}
HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None  # compiled at install: not in our requirements


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return build("qwen2-5-vl", tmp_path_factory.mktemp("plain") / "qwen")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """A quantized Qwen3.5 with its head."""
    folder = tmp_path_factory.mktemp("hybrid")
    rtn.write(build("qwen3-5", folder / "source"), folder / "out", rtn.SCHEMES["w4-symmetric"])
    return folder / "out"


@pytest.fixture
def cpu(monkeypatch) -> None:
    """An engine on a CPU without the package of `suffix`, wherever this runs."""
    monkeypatch.setattr(speculation, "installed", lambda: Installed("0.33.0+cpu", cpu=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "is no JSON object; write it like"),
        ("[1]", "is no JSON object"),
        ('{"method": "ngrm", "num_speculative_tokens": 1}', "unknown method 'ngrm'; did you mean 'ngram'"),
        ('{"num_speculative_tokens": 1}', "unknown method None"),
        ('{"method": "ngram"}', "num_speculative_tokens is None, it should be a whole number"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "medusa", "num_speculative_tokens": 2}', "unknown method 'medusa'"),
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "method eagle3 needs a model"),
        (
            '{"model": "/nowhere", "num_speculative_tokens": 2}',
            "the draft model /nowhere is no folder with a config.json",
        ),
        (json.dumps(SUFFIX), "suffix needs the package arctic-inference"),
        (json.dumps(MTP), r"has no head that drafts tokens \(mtp"),
    ],
)
def test_unsupported_drafts_are_refused_in_one_line(plain, cpu, text, message):
    for arguments in ({"speculative": text}, {"extra": ["--speculative-config", text]}, {"extra": [f"-sc={text}"]}):
        with pytest.raises(UserError, match=message) as raised:
            serve.arguments_of(plain, **arguments)
        assert "\n" not in str(raised.value)


def test_speculation_settings_reach_vllm(plain, cpu):
    arguments = serve.arguments_of(plain, speculative=json.dumps(NGRAM))
    assert arguments[-2] == "--speculative-config" and json.loads(arguments[-1]) == NGRAM
    draft = {"model": str(plain.parent / "." / plain.name), "num_speculative_tokens": 2}
    assert json.loads(serve.arguments_of(plain, speculative=json.dumps(draft))[-1])["model"] == str(plain.resolve())
    both = serve.arguments_of(plain, speculative=json.dumps(NGRAM), extra=["--speculative-config", json.dumps(draft)])
    assert both.count("--speculative-config") == 1  # flags after -- win
    assert json.loads(both[-1])["model"] == str(plain.resolve())


def test_recurrent_states_are_refused_on_a_cpu(hybrid, cpu, monkeypatch):
    with pytest.raises(UserError, match="qwen3-5 has Gated DeltaNet.* CPU build lacks the .Triton. kernel"):
        serve.arguments_of(hybrid, speculative=json.dumps(MTP))
    monkeypatch.setattr(speculation, "installed", lambda: Installed("0.33.0"))
    assert json.loads(serve.arguments_of(hybrid, speculative=json.dumps(MTP))[-1]) == MTP


def test_the_engine_reports_its_draft_methods():
    pytest.importorskip("vllm")
    engine = installed()
    assert engine.suffix is HAS_SUFFIX and engine.plugin and engine.numbers >= (0, 32)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("kind", ["quantized", "reduced"])
def test_greedy_answers_stay_the_same(plain, kind, tmp_path):
    """Token by token in float32, with drafts of which some are accepted and some are not, and on as many threads."""
    recipe = {"quantized": {"scheme": "fp8"}, "reduced": {"scheme": "none", "reduce": "uniform:0.5"}}[kind]
    quantize(resolve({"model": str(plain), "out": str(tmp_path / "out"), **recipe}).recipe)
    job = {"folder": str(tmp_path / "out"), "dtype": "float32", "max_tokens": 24}
    methods = [NGRAM, SUFFIX] if HAS_SUFFIX else [NGRAM]
    expected, *speculated = asked("speculation", [job | {"speculative": setting} for setting in (None, *methods)])
    assert expected["counted"] == {} and len({len(answer) for answer in expected["answers"]}) == 1
    for setting in speculated:
        for name in ("prompts", "answers", "threads"):
            assert setting[name] == expected[name]
        counted = {name.rpartition("spec_decode_num_")[2]: value for name, value in setting["counted"].items()}
        assert 0 < counted["accepted_tokens"] < counted["draft_tokens"]
        assert counted["drafts"] <= counted["draft_tokens"] <= 4 * counted["drafts"]


@pytest.mark.engine
def test_vllm_loads_the_head(hybrid, tmp_path):
    """Its first step needs a Triton kernel, so on a CPU loading is all that can be seen; without the entries it fails."""
    bare = Path(shutil.copytree(hybrid, tmp_path / "bare"))
    config = json.loads((bare / "config.json").read_text())
    block = config["quantization_config"]
    block["ignore"] = [entry for entry in block["ignore"] if "mtp" not in entry]
    (bare / "config.json").write_text(json.dumps(config))
    job = {"dtype": "bfloat16", "max_tokens": 0, "speculative": MTP}
    ours, control = asked("speculation", [job | {"folder": str(folder)} for folder in (hybrid, bare)])
    assert ours.get("drafter") == "Qwen3_5MTP", ours
    stored = load_file(hybrid / "model.safetensors")
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):  # matrices are packed away on a CPU
        assert ours["sums"][f"model.{name}.weight"] == pytest.approx(float(stored[f"mtp.{name}.weight"].double().sum()))
    assert "no module or parameter named 'fc.weight'" in control["error"]


@pytest.mark.engine
def test_vllm_drafts_with_the_next_block(tmp_path):
    """GLM-OCR's head, which is numbered on from the decoder's blocks: loaded, run, and answers stay the same."""
    source = build("glm-ocr", tmp_path / "source", num_hidden_layers=16, num_nextn_predict_layers=1)
    rtn.write(source, tmp_path / "out", rtn.SCHEMES["fp8"])
    job = {"folder": str(tmp_path / "out"), "dtype": "float32", "max_tokens": 12}
    plain, ours = asked("speculation", [job | {"speculative": setting} for setting in (None, MTP)])
    assert ours.get("drafter") == "GlmOcrMTP", ours
    stored, block = load_file(tmp_path / "out/model.safetensors"), "layers.16."
    for name in ("enorm", "hnorm", "shared_head.norm", "eh_proj"):
        sum_ = float(stored[f"model.language_model.{block}{name}.weight"].double().sum())
        assert ours["sums"][f"model.{block}{name}.weight"] == pytest.approx(sum_)
    assert ours["answers"] == plain["answers"]
    assert ours["counted"]["vllm:spec_decode_num_draft_tokens"] > 0
