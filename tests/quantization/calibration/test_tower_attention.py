"""Scales of the vision tower's attention, against plain hooks, and as vLLM itself reads them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.kit import tiny
from tests.kit.engine import asked
from vlmcompress import models
from vlmcompress.engines.vllm import serve
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.models.data import encode, load_samples
from vlmcompress.quantization.calibration import tower_attention
from vlmcompress.quantization.plan.plan import make_plan
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError

ABLE = ("qwen2-5-vl", "qwen3-vl")


@pytest.fixture(scope="module", params=ABLE)
def source(request, tmp_path_factory) -> Path:
    return tiny.build(request.param, tmp_path_factory.mktemp("tower") / request.param)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Four images of different sizes, so that windows and batches differ."""
    folder, random = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    rows = []
    for index, (height, width) in enumerate(((60, 80), (120, 56), (90, 90), (64, 140))):
        pixels = torch.randint(0, 256, (height, width, 3), generator=random, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")
        rows.append({"id": str(index), "image": f"{index}.png", "question": "what is it", "answer": "red"})
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def samples(vlm, data: Path) -> list:
    return encode(load_samples(str(data), samples=4, seed=0), vlm)


def given(source: Path, data: Path, out: Path, **overrides) -> dict:
    return {
        "model": str(source),
        "out": str(out),
        "calibrate": {"data": str(data)},
        "vision_attention": "fp8",
    } | overrides


def hooked(vlm, batches: list) -> dict[str, list[float]]:
    """The same maxima by hooks on the projections, with RoPE done here, one image at a time."""
    by_name: dict[str, list[float]] = {}
    code = importlib.import_module(type(vlm.model).__module__)

    def look(name: str, module):
        def hook(_module, args, kwargs):
            x, (cos, sin) = (args or (kwargs["hidden_states"],))[0], kwargs["position_embeddings"]
            q, k, v = module.qkv(x).view(len(x), 3, module.num_heads, -1).unbind(1)
            q, k = code.apply_rotary_pos_emb_vision(q, k, cos, sin)
            largest = by_name.setdefault(name, [0.0, 0.0, 0.0])
            by_name[name] = [max(old, state.abs().max().item()) for old, state in zip(largest, (q, k, v), strict=True)]

        return hook

    handles = [
        block.attn.register_forward_pre_hook(look(f"visual.blocks.{index}.attn.attn", block.attn), with_kwargs=True)
        for index, block in vlm.model.get_submodule(vlm.spec.vision_layers).named_children()
    ]
    for batch in batches:
        with torch.no_grad():
            vlm.model(**{key: value for key, value in batch.items() if key != "modality"})
    for handle in handles:
        handle.remove()
    return by_name


def test_scales_are_those_of_plain_hooks(source, data):
    vlm = models.load(source)
    before = vlm.model.config.vision_config._attn_implementation
    batches = samples(vlm, data)
    scales = tower_attention.attention_scales(vlm, batches)
    assert vlm.model.config.vision_config._attn_implementation == before
    expected = hooked(vlm, batches)
    assert list(scales) == list(expected) and len(scales) == 2
    for layer, maxima in expected.items():
        targets = [1.5 * maximum / 448 for maximum in maxima]
        assert [scales[layer][part] for part in "qkv"] == pytest.approx(targets, rel=2e-2)  # the oracle's are rounded


def test_of_several_samples_the_largest_counts(source, data):
    vlm = models.load(source)
    batches = samples(vlm, data)
    alone = [tower_attention.attention_scales(vlm, [batch]) for batch in batches]
    for layer, parts in tower_attention.attention_scales(vlm, batches).items():
        for part, scale in parts.items():
            assert scale == pytest.approx(max(layer_scales[layer][part] for layer_scales in alone), rel=1e-2)


@pytest.mark.parametrize("scheme", ["none", "rtn"])
def test_the_checkpoint_has_the_file(source, data, tmp_path, scheme):
    """Also where nothing is quantized, and without a difference in anything else."""
    out = tmp_path / "out"
    manifest = quantize(resolve(given(source, data, out, scheme=scheme)).recipe).manifest
    written = json.loads((out / serve.VISION_SCALES).read_text())
    vlm = models.load(source)
    assert written == tower_attention.attention_scales(vlm, samples(vlm, data))
    assert serve.VISION_SCALES in manifest["files"] and manifest["recipe"]["vision_attention"] == "fp8"
    assert not [check.detail for check in doctor.diagnose(out, source) if not check.ok]
    assert any(serve.VISION_SCALES_FLAG in line for line in serve.remarks(serve.arguments_of(out)))
    flags = serve.arguments_of(out, extra=serve.vision_attention_flags(out))
    assert not any(serve.VISION_SCALES_FLAG in line for line in serve.remarks(flags))


def test_images_are_read_even_with_stored_statistics(source, data, tmp_path):
    from vlmcompress.quantization.calibrate import calibrate

    base = {"model": str(source), "scheme": "awq", "calibrate": {"data": str(data)}}
    calibrate(resolve(base | {"out": str(tmp_path / "stats")}).recipe)
    keys = {"calibrate": {"data": str(data), "stats": str(tmp_path / "stats")}}
    quantize(resolve(given(source, data, tmp_path / "out", scheme="awq") | keys).recipe)
    vlm = models.load(source)
    written = json.loads((tmp_path / "out" / serve.VISION_SCALES).read_text())
    assert written == tower_attention.attention_scales(vlm, samples(vlm, data))


@pytest.mark.slow
@pytest.mark.engine
def test_vllm_reads_the_file(source, data, tmp_path):
    quantize(resolve(given(source, data, tmp_path / "out", scheme="none")).recipe)
    file = tmp_path / "out" / serve.VISION_SCALES
    (read,) = asked("tower_scales", [{"file": str(file)}])
    assert read == json.loads(file.read_text())


def test_unsupported_towers_are_refused(data, tmp_path):
    llava = tiny.build("llava", tmp_path / "llava")
    with pytest.raises(
        UserError,
        match="no FP8 attention for the vision tower of llava, only for qwen2-5-vl, qwen3-5, qwen3-5-moe, "
        "qwen3-vl, qwen3-vl-moe;",
    ):
        make_plan(resolve(given(llava, data, tmp_path / "out", scheme="rtn")).recipe)
    with pytest.raises(
        UserError, match="H100 has no FP8 attention for vision towers in vLLM; leave --vision-attention"
    ):
        resolve(given(llava, data, tmp_path / "out", scheme="fp8", target="h100"))
    qwen = tiny.build("qwen3-vl", tmp_path / "qwen")
    with pytest.raises(UserError, match="transformers does not read its scales"):
        make_plan(resolve(given(qwen, data, tmp_path / "out", scheme="rtn", engine="transformers")).recipe)
    resolve(given(qwen, data, tmp_path / "out", scheme="fp8", target="b200"))
    with pytest.raises(UserError, match="vision_attention needs calibration images; name some with --calib"):
        quantize(resolve({"model": str(qwen), "out": str(tmp_path / "out"), "scheme": "none",
                          "vision_attention": "fp8"}).recipe)  # fmt: skip
    text = tmp_path / "text.jsonl"
    turns = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "red"}]
    text.write_text(json.dumps({"id": "0", "messages": turns}) + "\n")
    with pytest.raises(UserError, match="vision_attention needs images, and the calibration data have none"):
        quantize(resolve(given(qwen, text, tmp_path / "out", scheme="none")).recipe)
    assert not (tmp_path / "out").exists()


def test_families_are_those_whose_class_in_vllm_can():
    """vLLM's vision towers that can have an FP8 attention ask for its padded size; nothing of vLLM is imported for this.

    A class that has its tower from another file of vLLM's has what that one has.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.origin).parent / "model_executor" / "models"
    for name in models.REGISTRY.names():
        code = folder / f"{name.replace('-', '_')}.py"
        if code.exists():
            text = code.read_text()
            imports = re.findall(r"^from \.(\w+) import (\([^)]*\)|.*)$", text, re.MULTILINE)
            files = [code, *(folder / f"{file}.py" for file, names in imports if "VisionTransformer" in names)]
            able = any("get_fp8_padded_hidden_size" in file.read_text() for file in files)
            assert able == bool(models.REGISTRY.get(name).SPEC.tower.attention), name
