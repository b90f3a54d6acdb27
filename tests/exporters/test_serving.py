"""The real vLLM engine loads our checkpoints and answers as transformers does with the same files.

Three engines, chosen so that between them they read every storage format: zero points and a mixed-precision config with an
FP8 tower; INT8 with FP8 key and value scales; 4-bit weights with INT8 activations, beside biases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.kit import rtn
from tests.kit.inputs import encode
from tests.kit.places import ROOT
from tests.kit.tiny import build
from vlmcompress import models

pytestmark = pytest.mark.engine
CASES = {
    "llava": ("w4-asymmetric", "fp8", False),
    "qwen2-5-vl": ("int8", None, True),
    "qwen2-vl": ("w4a8", None, False),
}


def served(folder: Path) -> dict:
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "tests.kit.serve_probe", str(folder)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in run.stdout.splitlines() if line.startswith("PROBE ")]
    assert lines, run.stderr[-3000:]
    return json.loads(lines[0].removeprefix("PROBE "))


@pytest.mark.parametrize("family", CASES)
def test_answers_like_transformers(tmp_path, family):
    """Oracle: transformers on the same checkpoint. Each token of the engine is its best one (BF16 leaves near-ties)."""
    scheme, vision, kv_cache = CASES[family]
    source = build(family, tmp_path / "source")
    rtn.write(source, tmp_path / "out", rtn.SCHEMES[scheme], rtn.SCHEMES.get(vision), kv_cache=kv_cache)
    got = served(tmp_path / "out")
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    spec = models.spec_for(models.read_config(source))
    vlm = models.VLM(model, AutoProcessor.from_pretrained(tmp_path / "out"), spec, tmp_path / "out")
    batch = encode(vlm, 1)
    assert got["prompt"] == batch["input_ids"][0].tolist()
    answer = torch.tensor([got["answer"]])
    batch["input_ids"] = torch.cat([batch["input_ids"], answer], 1)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "mm_token_type_ids" in batch:
        batch["mm_token_type_ids"] = torch.cat([batch["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    with torch.no_grad():
        logp = model(**batch).logits[0, -len(got["answer"]) - 1 : -1].float().log_softmax(-1)
    assert (logp.max(-1).values - logp.gather(1, answer.T)[:, 0]).max() < 0.05
    if kv_cache:
        assert got["kv_scales"] and all(pair == pytest.approx([0.02, 0.03], rel=2**-8) for pair in got["kv_scales"])
