"""Checkpoints of floats in blocks in vLLM's CPU build, by emulations of the kernels, against transformers and our own
arithmetic."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.kit import forks, vllm_answers
from tests.kit.engine import SETTINGS, asked
from tests.kit.inputs import encode
from tests.kit.places import DEMO_LLAVA, DEMOS, EMULATION
from tests.kit.rtn import SCHEMES
from vlmcompress import models
from vlmcompress.engines import EngineSettings, Request, get_engine
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.models.data.sources import load_samples
from vlmcompress.numerics import NVFP4, find_global_scale, round_activations, round_to_nearest
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve

pytestmark = pytest.mark.engine
QUESTIONS = 40
LOOK = """
import sys
import torch
from safetensors.torch import load_file, save_file
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel
sys.path.insert(0, sys.argv[3])
from emulation import register

def chosen(use_a16=False):
    try:
        return init_nvfp4_linear_kernel(use_a16=use_a16)
    except ValueError:
        return None

assert chosen() is None
register(), register()
assert chosen(use_a16=True) is None
layer, given = torch.nn.Module(), load_file(sys.argv[1])  # what vLLM's class makes of the stored tensors
layer.weight, layer.weight_scale = given["weight_packed"], given["weight_scale"]
layer.weight_global_scale, layer.input_global_scale_inv = 1 / given["weight_global_scale"], given["input_global_scale"]
kernel = chosen()
kernel.process_weights_after_loading(layer)
save_file({"y": kernel.apply_weights(layer, given["x"])}, sys.argv[2])
"""


def made(out: Path, scheme: str = "nvfp4", **options) -> Path:
    recipe = {"model": str(DEMO_LLAVA), "out": str(out), "scheme": scheme, "options": options}
    quantize(resolve(recipe | {"calibrate": {"samples": 8}}).recipe)
    return out


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_answers_like_transformers(scheme, tmp_path):
    """Oracle: transformers with compressed-tensors' arithmetic. The engine's tokens, up to the end, are its best ones."""
    folder = made(tmp_path / "out", scheme, rounding="rtn" if scheme == "mxfp8" else "gptq")
    (answers,) = asked("answers", vllm_answers.jobs([folder], max_tokens=6))
    assert "error" not in answers, answers["error"]
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    vlm = models.VLM(model, AutoProcessor.from_pretrained(folder), models.spec_for(models.read_config(folder)), folder)
    for images, got in enumerate(answers["answers"], start=1):
        batch, answer = encode(vlm, images), got["answer"]
        assert got["prompt"] == batch["input_ids"][0].tolist()
        answer = answer[: 1 + (answer.index(2) if 2 in answer else len(answer))]
        assert vllm_answers.gap(model, batch, answer) < 0.1


@pytest.mark.slow
def test_unmixed_types_answer_like_transformers(tmp_path, monkeypatch, quick_engines):
    """As `vlmcompress eval` asks. Inputs of 4 bits: two orders of additions tip over some that were unsure."""
    monkeypatch.setenv("PYTHONPATH", str(EMULATION), prepend=":")
    folder = made(tmp_path / "out", mixed=False, rounding="rtn")
    samples = load_samples(DEMOS / "data" / "llava" / "validation.parquet", samples=QUESTIONS, seed=0)
    requests = []
    for number, sample in enumerate(samples):
        content = []
        for at, image in enumerate(sample.images):
            file = tmp_path / f"{number} {at}.png"
            image.save(file)
            content.append({"type": "image_url", "image_url": {"url": file.as_uri()}})
        content.append({"type": "text", "text": sample.question})
        requests.append(Request(str(number), [{"role": "user", "content": content}]))
    runs = [
        get_engine(name).answer(folder, requests, media=tmp_path, settings=EngineSettings(max_tokens=8))
        for name in ("vllm", "hf")
    ]
    texts = [[run.answers[str(n)].text.strip() for n in range(len(samples))] for run in runs]
    right = [sum(a == sample.answer for a, sample in zip(each, samples, strict=True)) for each in texts]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 0.85 * len(samples), texts
    assert min(right) > 0.7 * len(samples), right


def test_the_emulation_computes_our_products(tmp_path):
    """Oracle: vLLM's own choice of a kernel (with 16-bit activations it takes Marlin, which CPUs lack), and the product of
    our rounded inputs and weights."""
    pytest.importorskip("vllm")
    generator = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, 256, generator=generator) for n in (64, 40))  # not bfloat16, of which many lie halfway
    qt, shared = round_to_nearest(w, NVFP4), find_global_scale([x[:20]])
    stored = compressed_tensors.FORMAT.tensors(qt, SCHEMES["nvfp4"], shared)
    save_file(stored | {"x": x}, tmp_path / "given")
    command = [forks.python(*forks.VLLM), "-c", LOOK, str(tmp_path / "given"), str(tmp_path / "got"), str(EMULATION)]
    done = subprocess.run(command, env=os.environ | SETTINGS, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    activations = SCHEMES["nvfp4"].activations
    expected = round_activations(x, activations, shared) @ qt.dequantize(torch.float32).T
    torch.testing.assert_close(load_file(tmp_path / "got")["y"], expected, rtol=1e-4, atol=1e-4)
