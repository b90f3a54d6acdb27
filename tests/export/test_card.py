"""A card offers what loads the checkpoint, with what that takes, and why others don't; layers' errors have one name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.kit.launching import FORMATS, QWEN
from vlmcompress.cli import quantize
from vlmcompress.export import card, launch, launch_files, manifest, readers

OUTPUTS = {"model.layers.0.q_proj": {"vision": 0.01, "text": 0.02}}
WEIGHTS = {"model.layers.0.q_proj": {"weight": 0.01}}


def record(errors: dict[str, dict[str, float]]) -> dict:
    """A manifest, as far as cards read it."""
    return {
        "model": {"source": "lab/original", "family": "qwen2-5-vl"},
        "size": {"weights_before": 200, "weights_after": 100},
        "recipe": {"scheme": "rtn", "target": "a100"},
        "created_by": {"vlmcompress": "0.1.0"},
        "calibration": None,
        "errors": errors,
        "seed": 0,
    }


def rendered(folder: Path, form: str, **config: Any) -> tuple[str, dict, readers.LoadFacts]:
    """The card of a made-up checkpoint: its text, its metadata, and what is known of the checkpoint."""
    folder.mkdir()
    content = {"architectures": [QWEN], "model_type": "qwen2_5_vl"} | config
    content |= {"quantization_config": FORMATS[form]} if FORMATS[form] else {}
    (folder / "config.json").write_text(json.dumps(content))
    text = card.render_card(record(WEIGHTS), folder, folder.name)
    return text, yaml.safe_load(text.split("---")[1]), launch_files.launch_facts(content, record({}), folder.name)


LICENCE = "license: other\nlicense_name: tiny\nlicense_link: LICENSE\nlanguage:\n- en\n- de\ntags: [x]"


@pytest.mark.parametrize("original", [LICENCE, "license: [unclosed", "just text", "license: 3\nlanguage: {a: b}", ""])
def test_metadata_is_what_the_hub_reads(original: str, tmp_path: Path) -> None:
    """Oracle: huggingface_hub's own classes. Licence and languages are the original's, if its header is valid."""
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": FORMATS["w4-g128"], "architectures": [QWEN]})
    )
    (tmp_path / card.SOURCE_CARD).write_text(f"---\n{original}\n---\n# original\n")
    text = card.render_card(record(WEIGHTS), tmp_path, "out")
    data = ModelCard(text).data
    kept = {"license": "other", "license_name": "tiny", "license_link": "LICENSE", "language": ["en", "de"]}
    assert data.to_dict() == {
        "base_model": "lab/original",
        "base_model_relation": "quantized",
        "quantized_by": "vlmcompress",
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["vlmcompress", "vllm", "compressed-tensors", "4-bit"],
    } | (kept if original == LICENCE else {})
    assert (data.base_model, data.license_name) == ("lab/original", "tiny" if original == LICENCE else None)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "unheard-of"])
def test_a_card_offers_what_loads(form: str, tmp_path: Path) -> None:
    text, metadata, facts = rendered(tmp_path / "x y", form)
    vllm, transformers = (readers.engine_support(name, facts) for name in ("vllm", "transformers"))
    assert ("vllm serve './x y' --served-model-name x-y" in text) is (vllm.reason is None)
    assert ("vllm" in metadata["tags"]) is (vllm.reason is None)
    loads = transformers.reason is None
    assert ("from_pretrained" in text) is loads
    assert ("AutoModelForImageTextToText.from_pretrained" in text) is (loads and not transformers.loader)
    assert ("open_model(" in text) is transformers.loader
    assert ("library_name" in metadata) is (loads and not transformers.loader)
    for need in transformers.needs if loads else ():
        assert need in text
    if facts.format not in ("gguf", "openvino"):
        for verdict in (vllm, transformers):
            assert verdict.reason is None or f"{verdict.title} does not load it: {verdict.reason}." in text


def test_zero_points_name_the_versions_that_load_them(tmp_path: Path) -> None:
    """transformers 5.23 and 5.24 give them a wrong shape (eval/readers.json)."""
    groups = {"group_0": {**FORMATS["w4-g128"]["config_groups"]["group_0"]}}
    groups["group_0"]["weights"] = {**groups["group_0"]["weights"], "symmetric": False}
    quantization = FORMATS["w4-g128"] | {"config_groups": groups}
    text, *_ = rendered(tmp_path / "out", "bf16", quantization_config=quantization)
    assert "pip install 'transformers>=5.15,<5.23' compressed-tensors" in text and "dequantize=True" in text
    plain, *_ = rendered(tmp_path / "plain", "w4-g128")
    assert "pip install 'transformers>=5.15' compressed-tensors" in plain and "dequantize" not in plain


@pytest.mark.parametrize("form", ["gguf", "mlx", "openvino"])
def test_cards_of_other_engines_do_not_mention_vllm(form: str, tmp_path: Path) -> None:
    block = {"quant_method": form, "bits": 4, "group_size": 64}
    text, metadata, facts = rendered(tmp_path / "out", "bf16", quantization_config=block)
    page = launch.render_launch_files(facts)["README.md"]
    assert form in metadata["tags"] and "vllm" not in metadata["tags"] and "library_name" not in metadata
    assert "vllm serve" not in text and "AutoModel" not in text
    assert "vllm.sh" not in page and "Flags are for" not in page and "grafana" not in page


def test_unchanged_layers_are_listed(tmp_path: Path) -> None:
    text, *_ = rendered(tmp_path / "out", "embeddings")
    assert "Left as they were: norms." in text
    block = {**FORMATS["gguf"], "modules_to_not_convert": ["model.visual", "lm_head"]}
    text, *_ = rendered(tmp_path / "gguf", "bf16", quantization_config=block)
    assert "Left as they were: embeddings, norms, `model.visual`, `lm_head`." in text
    text, *_ = rendered(tmp_path / "gptq", "gptq-mixed")
    assert "Left as they were: embeddings, norms, `.*visual.*`." in text


@pytest.mark.parametrize(
    ("errors", "words"), [(WEIGHTS, "weights relative to the weights"), (OUTPUTS, "output relative to the output")]
)
def test_the_error_of_layers_has_one_name(errors: dict, words: str, tmp_path: Path) -> None:
    """Of a scheme that saw no data it is the weights', in the card, on the terminal and in reports alike."""
    (tmp_path / "config.json").write_text("{}")
    text = card.render_card(record(errors), tmp_path, "out")
    done = dict.fromkeys(("reduce", "resize", "kv_cache", "bits", "visual_tokens", "measured_on"))
    done |= {"weights_before": 2, "weights_after": 1, "devices": [1], "out": "out", "seconds": 1, "warnings": []}
    output = quantize.text(done | {"worst_layers": quantize.worst_layers(errors), "next": [], "timing": {}})
    for page in (text, output, manifest.errors_text(errors)):
        assert words in page and ("calibration data were seen" in page) is (errors is WEIGHTS)
