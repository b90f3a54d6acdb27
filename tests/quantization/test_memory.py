"""Memory of a run: a model of twice the memory that it may take is quantized."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit import calibration_rows, tiny
from tests.kit.tiny import llava
from tests.kit.tiny._text import TEXT

# Quantizes a small model first, so that all libraries are loaded; then stops itself when anonymous memory, which no system can
# drop, grows by more than allowed.
RUN = """
import os, sys, threading, time
from vlmcompress import cli

def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def watch(limit):
    peak = 0
    while True:
        peak = max(peak, anonymous())
        if peak > limit:
            os.write(2, f"over by {peak - limit:,} bytes".encode())
            os._exit(9)
        time.sleep(0.002)

allowed, small, *call = sys.argv[1:]
assert cli.main([call[0], small, "-o", small + "-out", *call[4:]]) == 0
allowed = int(allowed)
threading.Thread(target=watch, args=(anonymous() + allowed,), daemon=True).start()
sys.exit(cli.main(call))
"""


SHAPE = {**TEXT, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 64, "num_attention_heads": 16}


@pytest.mark.slow
def test_half_of_the_model(tmp_path, monkeypatch):
    """Weights of a block at a time, mapped from the file until they are changed, and let go when the next block begins."""
    small = tiny.build("llava", tmp_path / "small")
    monkeypatch.setattr(llava, "TEXT", SHAPE | {"num_key_value_heads": 16})
    monkeypatch.setattr(tiny, "_made", tiny._made.__wrapped__)  # which keeps the small one
    model = tiny.build("llava", tmp_path / "model")
    calibration_rows.write(tmp_path, 4)
    weights = (model / "model.safetensors").stat().st_size
    call = ["quantize", str(model), "-o", str(tmp_path / "out"), "--scheme", "gptq"]
    call += ["--calib", str(tmp_path / "calib.jsonl"), "--samples", "4"]

    def run(allowed: int) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", RUN, str(allowed), str(small), *call, "--overwrite"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(weights // 2)
    assert done.returncode == 0, f"of {weights // 2:,} bytes: {done.stderr[-500:]}"
    assert (tmp_path / "out" / "vlmcompress.json").exists()
    stopped = run(weights // 20)
    assert stopped.returncode == 9 and "over by" in stopped.stderr, "the limit is none"
