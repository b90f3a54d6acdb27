"""The output of `check` about attention: an FP8 KV cache by target and model, FP8 in the vision tower."""

from __future__ import annotations

import pytest

from tests.kit import tiny
from vlmcompress.models import Source
from vlmcompress.quantization.plan.examine import examine
from vlmcompress.quantization.plan.kv_cache import normalizes
from vlmcompress.recipe import resolve

NORMALIZED = {"gemma3", "lfm2-vl", "qwen3-vl"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("attention")
    return {name: tiny.build(name, base / name) for name in ("llava", "qwen2-5-vl", "qwen3-vl", "gemma3", "lfm2-vl")}


def said(model, name: str, **settings) -> tuple[bool, str]:
    recipe = resolve({"model": str(model), "scheme": "awq", **settings}, strict=False).recipe
    (finding,) = (finding for finding in examine(recipe, "vllm").findings if finding.name == name)
    return finding.ok, finding.detail


def test_qk_norm_is_found_by_the_skeleton(folders):
    assert {name for name, folder in folders.items() if normalizes(Source.of(folder).meta_model)} == NORMALIZED


@pytest.mark.parametrize(
    ("model", "settings", "has", "lacks"),
    [
        ("qwen3-vl", {"target": "h100"}, "--kv-cache fp8 halves it with scales from the calibration", "QK norm"),
        ("qwen2-5-vl", {"target": "h100"}, "no QK norm", "int8_per_token_head"),
        ("qwen2-5-vl", {"target": "h100", "kv_cache": "fp8"}, "FlashAttention 3. This model does not", "int8_per"),
        ("llava", {"target": "b200", "kv_cache": "fp8"}, "never serve it with fp8_e5m2", "int8_per"),
        ("qwen3-vl", {"target": "b200", "kv_cache": "fp8"}, "vLLM has computed none itself since 0.28", "fp8_e5m2"),
        ("llava", {"target": "a100"}, "serve with --kv-cache-dtype int8_per_token_head", "--kv-cache fp8 "),
        (
            "qwen3-vl",
            {"target": "a100", "kv_cache": "fp8"},
            "Better there: serve with --kv-cache-dtype int8",
            "QK norm",
        ),
        ("llava", {"target": "cpu", "scheme": "none"}, "16 bits", "--kv-cache"),
    ],
)
def test_the_kv_cache(folders, model, settings, has, lacks):
    ok, detail = said(folders[model], "vllm: KV cache", **settings)
    assert ok and has in detail and lacks not in detail


def test_the_towers_attention(folders):
    setting = {"vision_attention": "fp8"}
    assert said(folders["qwen3-vl"], "vllm: vision attention", target="b200", **setting)[0]
    ok, detail = said(folders["qwen3-vl"], "vllm: vision attention", target="h100", **setting)
    assert not ok and "leave --vision-attention out" in detail
    ok, detail = said(folders["llava"], "plan", target="b200", **setting)
    assert not ok and "no FP8 attention for the vision tower of llava, only for qwen2-5-vl, qwen3-5, " in detail
