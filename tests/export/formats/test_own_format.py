"""A format is one file: one that stands elsewhere and joins by an entry point is planned, written and read by transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.kit import forks
from tests.kit.places import DEMO_LLAVA
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.numerics import Format, Scheme, round_to_nearest

PLAIN = '''"""Weights rounded as the scheme says and stored in 16 bits: any engine reads them, and nothing gets smaller."""

from typing_extensions import override

from vlmcompress.export.formats import Writer
from vlmcompress.utils.tensor_headers import Spec


class Plain(Writer):
    METHOD = "plain"

    @override
    def storage(self, scheme):
        return "dense"

    @override
    def specs(self, scheme, rows, columns, dtype):
        return {"weight": Spec(dtype, (rows, columns))}

    @override
    def tensors(self, qt, scheme, input_scale=None):
        return {"weight": qt.dequantize(qt.scale.dtype)}


FORMAT = Plain()
'''


@pytest.fixture
def joined(tmp_path) -> dict[str, str]:
    """The environment of a process in which the format `plain` is installed."""
    (tmp_path / "plain_format.py").write_text(PLAIN)
    about = tmp_path / "plain_format-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-format\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vlmcompress.export.formats]\nplain = plain_format\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_a_third_partys_format_is_one_file(joined, tmp_path):
    out = tmp_path / "out"
    command = [forks.python(*forks.OURS), "-m", "vlmcompress", "quantize", str(DEMO_LLAVA), "-o", str(out), "--json"]
    command += ["--scheme", "rtn", "--set", "format=plain"]
    done = subprocess.run(command, env=joined, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_after"] == json.loads(done.stdout)["weights_before"]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    name = "language_model.model.layers.0.mlp.down_proj.weight"
    before, after = (load_file(Path(folder) / "model.safetensors")[name] for folder in (DEMO_LLAVA, out))
    expected = round_to_nearest(before, Format("int", 4, 128), scale_dtype=before.dtype)
    assert torch.equal(after, expected.dequantize(before.dtype)) and not torch.equal(after, before)
    model, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_the_bundled_format_has_what_a_format_needs():
    scheme = Scheme(Format("int", 4, 128))
    assert compressed_tensors.FORMAT.METHOD == "compressed-tensors"
    config = compressed_tensors.quantization_config([(scheme, ["Linear"])], [])
    group = compressed_tensors.group_of(config, "model.layers.0.mlp.down_proj")
    assert compressed_tensors.scheme_of(config["config_groups"][group]) == scheme
