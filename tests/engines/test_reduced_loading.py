"""The plugin's refusals of checkpoints that cannot be served, before any engine runs and in vLLM itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.kit import forks
from tests.kit.places import DEMO_LLAVA, ROOT
from tests.kit.reduced_cases import reduced
from tests.kit.vllm_source import edited
from vlmcompress.engines.vllm import plugin
from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer
from vlmcompress.models import all_specs
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import support
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.methods import REGISTRY, TokenCounter
from vlmcompress.reduction.scorer_file import CARRIED
from vlmcompress.reduction.support import SERVED_FAMILIES, engine_problem
from vlmcompress.utils.errors import UserError

PLAIN = json.loads((DEMO_LLAVA / "config.json").read_text())


def config(reducer: str, folder: Path, **block):
    """The demo's config as transformers reads it, with a reducer whose block has been changed."""
    written = reducer_block.config_with_reducer(PLAIN, parse_reducer(reducer))
    written["vlmcompress"].update(block)
    (folder / "config.json").write_text(json.dumps(written))
    return AutoConfig.from_pretrained(folder)


def test_the_reducer_survives_transformers(tmp_path):
    assert ServedReducer.of(config("dart:0.25,pivots=3", tmp_path)).chosen == parse_reducer("dart:0.25,pivots=3")


@pytest.mark.parametrize(
    ("reducer", "block", "text"),
    [
        ("dart:0.5", {"schema": 2}, "upgrade"),
        ("dart:0.5", {"model_type": "qwen2_vl"}, "is for model_type 'qwen2_vl'"),
        ("dart:0.5", {"reduce": {"method": "dart", "keep": 7}}, "keep must be"),
        ("dart:0.5", {"reduce": {"method": "future", "keep": 0.5}}, "unknown reducer 'future'"),
        ("fastv:0.5", {}, "choose from"),
        ("dart-llm:0.5", {}, "choose from coverage"),
        ("vscan:0.5,shallow=99", {}, "shallow=99"),
    ],
)
def test_unserved_reducers_are_refused_in_one_line(reducer, block, text, tmp_path):
    with pytest.raises(UserError) as caught:
        ServedReducer.of(config(reducer, tmp_path, **block))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scorer", ["/etc/passwd", "/dev/zero", "reducer/scorer.safetensors", "a pipe", "a text"])
def test_a_folder_whose_scorer_is_no_file_of_a_scorer_is_refused_in_one_line(scorer, tmp_path):
    """As `serve` asks before the engine starts."""
    config("learned:0.5", tmp_path, reduce={"method": "learned", "scorer": scorer if "/" in scorer else CARRIED})
    carried = tmp_path / CARRIED
    carried.parent.mkdir()
    if scorer == "a pipe":
        os.mkfifo(carried)
    elif scorer == "a text":
        carried.write_text("text")
    with pytest.raises(UserError, match="scorer") as caught:
        ServedReducer.in_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_with_a_million_thresholds_is_refused_and_one_without_a_reducer_has_none(tmp_path):
    config("dymu:thresholds=[0.9]", tmp_path, reduce={"method": "dymu", "thresholds": [0.9] * 10**6})
    with pytest.raises(UserError, match="there are 1000000 thresholds") as caught:
        ServedReducer.in_folder(tmp_path)
    assert len(str(caught.value)) < 200
    assert ServedReducer.in_folder(DEMO_LLAVA) is None


def test_a_config_without_a_reducer_is_refused():
    with pytest.raises(UserError, match="carries no reducer"):
        ServedReducer.of(AutoConfig.from_pretrained(DEMO_LLAVA))


@pytest.mark.parametrize("family", SERVED_FAMILIES.names())
def test_every_family_serves_the_baselines_and_no_method_within_the_language_model(family):
    architecture = SERVED_FAMILIES.constant(family, "ARCHITECTURE")
    served = {name for name in REGISTRY.names() if engine_problem(architecture, parse_reducer(name)) is None}
    assert {"random", "uniform", "dart", "divprune"} <= served
    assert not served & {"fastv", "dart-llm"}
    assert engine_problem(support.PREFIX + architecture, parse_reducer("dart:0.5")) is None


def test_counts_that_depend_on_the_image_need_a_place_for_them():
    merging = parse_reducer("dymu:thresholds=[0.9, 0.9]")
    for counted in ("Llava", "Idefics3", "SmolVLM", "InternVL"):
        assert engine_problem(f"{counted}ForConditionalGeneration", merging) is None
    assert "counts that depend on the image" in (engine_problem("LlavaNextForConditionalGeneration", merging) or "")


def test_families_have_specs():
    """A reduced checkpoint's positions and counts come from its family's layout."""
    registered = {name for spec in all_specs() for name in spec.model_types}
    assert {family.replace("-", "_") for family in SERVED_FAMILIES.names()} <= registered


def test_a_family_that_is_not_served_names_those_that_are():
    assert "LlavaForConditionalGeneration" in (
        engine_problem("Gemma3ForConditionalGeneration", parse_reducer("dart:0.5")) or ""
    )


def test_fingerprints_differ_between_reducers(tmp_path):
    fingerprints = {
        ServedReducer(parse_reducer(text)).fingerprint
        for text in ("dart:0.5", "dart:0.25", "dart:0.5,pivots=5", "random:0.5")
    }
    assert len(fingerprints) == 4


@pytest.mark.engine
def test_a_reduced_architecture_has_the_settings_of_the_plain_one():
    """Qwen3.5's config has the type of its recurrent states; vLLM knows by the architecture's name to look there."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    plugin.register()
    state_types = {}
    for name in ("Qwen3_5ForConditionalGeneration", support.PREFIX + "Qwen3_5ForConditionalGeneration"):
        cache = SimpleNamespace(mamba_ssm_cache_dtype="auto")
        text = SimpleNamespace(hf_text_config=SimpleNamespace(mamba_ssm_dtype="float64"))
        MODELS_CONFIG_MAP[name].verify_and_update_config(SimpleNamespace(cache_config=cache, model_config=text))
        state_types[name] = cache.mamba_ssm_cache_dtype
    assert set(state_types.values()) == {"float64"}


def test_importing_the_plugin_imports_nothing_heavy():
    code = (
        f"import sys, {plugin.__name__}; print(sorted({{'torch', 'transformers', 'vllm', 'numpy'}} & {{*sys.modules}}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


def test_a_longer_table_is_that_of_a_longer_model():
    """Oracle: vLLM's own table, made as long at once."""
    pytest.importorskip("vllm")
    from vlmcompress.engines.vllm.plugin._positions import lengthened

    angles = torch.outer(torch.arange(5000.0), 10000 ** -torch.arange(0, 1, 1 / 32))
    table = 1.7 * torch.cat([angles.cos(), angles.sin()], 1)
    for rows in (2, 700, 2048, 5000):
        longer = lengthened(table[:rows], 5000)
        assert torch.equal(longer[:rows], table[:rows])
        assert (longer - table).abs().max() < 2e-3


def started(folder: Path, reducer: str = "dart:0.5", **options: Any) -> SimpleNamespace:
    """What vLLM tells a model of the engine, as far as it is looked at before the model is made."""
    multimodal = SimpleNamespace(
        is_multimodal_pruning_enabled=lambda: options.get("pruning", False),
        mm_encoder_tp_mode=options.get("encoder", "weights"),
    )
    parallel = {
        "pipeline_parallel_size": options.get("pipeline", 1),
        "use_ubatching": options.get("microbatches", False),
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(
            multimodal_config=multimodal, hf_config=config(reducer, folder, **options.get("block", {}))
        ),
        speculative_config=SimpleNamespace(method=options["draft"]) if "draft" in options else None,
        lora_config=options.get("lora_config"),
    )


VISION = PLAIN["vision_config"]
MERGING = {
    "reducer": f"dymu:thresholds={[0.9] * (VISION['num_hidden_layers'] + PLAIN['vision_feature_layer'] + 1)}",
    "block": {"count": TokenCounter(VISION["patch_size"], (81,), *[(1.0,) * 14] * 3, bias=0.0).plain()},
}
"""A reducer that merges within the demo's encoder, with counts that vLLM needs."""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pipeline": 2}, "use tensor parallelism"),
        ({"microbatches": True}, "leave out --enable-dbo"),
        ({"pruning": True}, "--video-pruning-rate; leave it out"),
        ({"draft": "eagle"}, "or the method ngram"),
        ({"encoder": "data", **MERGING}, "within the encoder; leave it out"),
    ],
)
def test_settings_that_do_not_go_with_a_reducer_are_refused(options, text, tmp_path):
    from vlmcompress.engines.vllm.plugin._positions import OriginalPositions  # imports vLLM

    with pytest.raises(ValueError, match=f"^a checkpoint that carries a reducer .* does not go with .*{text}$"):
        OriginalPositions(vllm_config=started(tmp_path, **options))


@pytest.mark.engine
def test_speculation_with_recurrent_states_is_refused_where_vllm_gets_it_wrong(tmp_path):
    """On its CPU build only."""
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    from vlmcompress.engines.vllm.plugin import _positions

    config = started(tmp_path, draft="ngram")
    _positions._require_settings(config, SimpleNamespace())
    config.model_config.hf_config.get_text_config().layer_types = ["linear_attention", "full_attention"]
    if current_platform.is_cpu():
        with pytest.raises(ValueError, match="where states are recurrent.*leave out --speculative-config$"):
            _positions._require_settings(config, SimpleNamespace())
    else:
        _positions._require_settings(config, SimpleNamespace())


# All cases share one import of vLLM: each is tried in a fork of the process that has it.
PROBE = """
import json, os, sys
import vllm
from vllm.config import ModelConfig
from vllm.plugins import load_general_plugins

for name, case in json.loads(sys.argv[1]).items():
    if os.fork():
        os.wait()
        continue
    if case["plugins"] is not None:
        os.environ["VLLM_PLUGINS"] = case["plugins"]
    vllm.__version__ = case["version"] or vllm.__version__
    vllm.__file__ = case["source"] or vllm.__file__  # where the plugin looks for what it reaches into
    load_general_plugins()
    try:
        ModelConfig(case["folder"], model_impl=case["impl"])
        print("SAID", json.dumps([name, "it was not refused"]), flush=True)
    except Exception as error:
        print("SAID", json.dumps([name, str(error)]), flush=True)
    os._exit(0)
"""


@dataclass(frozen=True)
class Case:
    """A checkpoint that vLLM is to refuse, with words that its message has; `plugins` is `VLLM_PLUGINS`, where it is set.

    `edit`: a file of vLLM's in which a word is replaced, as another version may have it.
    """

    text: str
    reducer: str = "dart:0.5"
    plugins: str | None = None
    version: str = ""
    impl: str = "auto"
    edit: tuple[str, str, str] | None = None


LLAVA = "model_executor/models/llava.py"
CASES = {
    "an older vLLM": Case(
        "serves reduced checkpoints in vLLM 0.32 and 0.33; this is vLLM 0.31.2: install", version="0.31.2"
    ),
    "a newer one": Case("it was not refused", version="0.99.0"),
    "one of its own making": Case("it was not refused", version="dev"),
    "a newer one without what the plugin reaches into": Case(
        "in vLLM 0.99.0 model_executor.models.llava.LlavaForConditionalGeneration._process_image_pixels is gone (tokens are "
        "reduced before the projector or after it): install one of those, or another vlmcompress",
        version="0.99.0",
        edit=(LLAVA, "_process_image_pixels", "_pixels"),
    ),
    "a tested one is not looked at": Case("it was not refused", edit=(LLAVA, "_process_image_pixels", "_pixels")),
    "a newer one without what another family needs": Case(
        "it was not refused", version="0.99.0", edit=("model_executor/models/qwen2_vl.py", "_get_vision_info", "_info")
    ),
    "a newer one without what a fix needs": Case(
        "it was not refused", version="0.99.0", edit=("multimodal/media/connector.py", "_load_data_url", "_load_url")
    ),
    "a method within the language model": Case("vLLM cannot serve 'fastv'", "fastv:0.5"),
    "no plugin": Case("['VlmcompressLlavaForConditionalGeneration'] are not supported", plugins=""),
    "no plugin, transformers' code": Case(
        "'VlmcompressLlavaForConditionalGeneration' is not a registered model", plugins="", impl="transformers"
    ),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> tuple[dict[str, str], str]:
    """Of each case vLLM's message, and its log."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("refused")
    cases = {name: asdict(case) for name, case in CASES.items()}
    for number, case in enumerate(cases.values()):
        case["folder"] = str(reduced(DEMO_LLAVA, folder / str(number), case["reducer"]))
        case["source"] = str(edited(folder / f"vllm-{number}", *case["edit"]) / "__init__.py") if case["edit"] else ""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    env.pop("VLLM_PLUGINS", None)
    run = subprocess.run(
        [forks.python(*forks.VLLM), "-c", PROBE, json.dumps(cases)], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.removeprefix("SAID ") for line in run.stdout.splitlines() if line.startswith("SAID ")]
    return dict(map(json.loads, lines)), run.stdout + run.stderr


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_vllm_refuses_a_bad_checkpoint(name, said):
    """A vLLM that is too old or lacks what the plugin reaches into, a method that engines cannot serve, and a vLLM without the
    plugin, also where it is to run models by transformers' code; a newer one that has it all serves."""
    assert CASES[name].text in said[0][name]


@pytest.mark.engine
def test_vllm_warns_of_untested_versions(said):
    assert (
        "vlmcompress was tested with vLLM 0.32 and 0.33, and this is 0.99.0. All that its plugin reaches into"
        in said[1]
    )
    assert "leaves out bad images of requests: in vLLM 0.99.0 multimodal.media.connector.Media" in said[1]
