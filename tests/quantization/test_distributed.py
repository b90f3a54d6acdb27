"""Two workers do one run: what they write, and how it ends when one of them cannot go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit import calibration_rows, tiny
from tests.kit.workers import alone, ended, start
from vlmcompress import cli
from vlmcompress.utils import distributed


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    calibration_rows.write(folder, 6, lambda i: f"{i}.png" if i else [])
    tiny.build("qwen2-5-vl", folder / "model")
    return folder


def asked(world: Path, out: Path, *extra: str) -> list[str]:
    return [str(world / "model"), "-o", str(out), "--calib", str(world / "calib.jsonl"), "--samples", "6", *extra]


@pytest.mark.parametrize("scheme", [pytest.param("awq", marks=pytest.mark.slow), "gptq"])
def test_weights_are_those_of_one_worker(world, tmp_path, scheme):
    """Balanced by gradients: all passes are shared out. Sums are added up in another order, so that a few codes tip.

    GPTQ corrects what they change in the blocks after the first, where fewer tokens than inputs leave many codes open.
    """
    call = asked(world, tmp_path / "two", "--scheme", scheme, "--set", "options.balance=mbq", "--json")
    (code, out, err), (other, silent, nothing) = ended(start("quantize", *call))
    assert (code, other) == (0, 0), err + nothing
    assert json.loads(out)["ok"] and not silent and not nothing.strip()
    call[2] = str(tmp_path / "one")
    alone("quantize", *call)
    single, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert single.keys() == two.keys()
    for name, expected in single.items():
        if expected.is_floating_point():
            torch.testing.assert_close(two[name].float(), expected.float(), rtol=0.02, atol=1e-3, msg=name)
        elif scheme == "awq" or ".layers.0." in name:
            assert (two[name] == expected).float().mean() > 0.97, name
        else:  # two codes a byte
            codes, others = (packed.contiguous().view(torch.uint8) for packed in (expected, two[name]))
            equal = [codes % 16 == others % 16, codes // 16 == others // 16]
            assert torch.stack(equal).float().mean() > 0.95, name
    manifests = [json.loads((tmp_path / name / "vlmcompress.json").read_text()) for name in ("one", "two")]
    assert manifests[0]["calibration"] == manifests[1]["calibration"]
    for layer, errors in manifests[0]["errors"].items():
        off = 0.05 if scheme == "awq" or ".layers.0." in layer else 0.15
        assert manifests[1]["errors"][layer] == pytest.approx(errors, rel=off), layer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_bad_input_is_reported_once(world, tmp_path):
    message = ended(start("quantize", *asked(world, tmp_path / "out", "--scheme", "gptq", "--set", "options.bits=99")))
    assert [code for code, _, _ in message] == [2, 2]
    assert message[0][2].startswith("error: ") and message[0][2].count("\n") == 1 and not message[1][2]


def test_a_worker_that_dies(world, tmp_path):
    """The other one ends with one line, OUT is not there, and the same command finishes the work alone."""
    out = tmp_path / "out"
    call = ["quantize", *asked(world, out, "--scheme", "gptq")]
    workers = start(*call)
    until = time.monotonic() + 200
    while not list(tmp_path.glob(".out.work/layer-0000.safetensors")) and time.monotonic() < until:
        time.sleep(0.005)
    workers[1].send_signal(signal.SIGKILL)
    (code, output, err), (killed, _, _) = ended(workers)
    assert killed == -signal.SIGKILL
    if code:  # it may have been past the last block
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 2 and len(lines) == 1 and "another worker" in lines[0] and not output and not out.exists()
        assert "Traceback" not in err
    assert cli.main(call if code else ["check", str(world / "model"), "--scheme", "gptq"]) == 0
    assert out.exists()


def test_a_worker_alone_needs_no_torch():
    """Whether it is alone is read off the environment, in the start of the command line."""
    code = "import sys; from vlmcompress.utils import distributed; assert distributed.world_size() == 1"
    code += " and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(distributed.shard([1, 2, 3])) == [1, 2, 3] and distributed.merge_dicts({1: 2}) == {1: 2}
