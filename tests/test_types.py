"""Types, by mypy: as a test, so that it takes its turn with the others and is not a third process on two cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.places import ROOT

# Reading these takes nine tenths of mypy's time. Unread, all that comes of them has any type.
LARGE = (
    *("transformers", "vllm", "datasets", "lm_eval", "llmcompressor", "compressed_tensors", "ray", "openai", "sklearn"),
    *(
        "chardet",
        "aiohttp",
        "httpx",
        "mcp",
        "rich",
        "cryptography",
        "gguf",
        "pandas",
        "scipy",
        "sympy",
        "openvino",
        "mlx",
        "mlx_vlm",
    ),
    *("pyarrow", "peft", "accelerate", "IPython", "_pytest", "mlflow"),
    *("torch._inductor", "torch._dynamo", "torch._export", "torch._functorch", "torch._refs", "torch.fx.experimental"),
    *("torch.onnx", "torch.testing"),
)
UNREAD = f"""
[[tool.mypy.overrides]]
module = {[f"{name}.*" for name in LARGE]}
follow_imports = "skip"
"""


@pytest.mark.parametrize("libraries", ["unread", pytest.param("read", marks=pytest.mark.slow)])
def test_mypy_finds_no_problem(libraries: str, tmp_path) -> None:
    options = []
    if libraries == "unread":
        config = tmp_path / "pyproject.toml"
        config.write_text((ROOT / "pyproject.toml").read_text() + UNREAD)
        # What is ignored there is no error here, and a base class of any type tells nothing of its attributes.
        options = [f"--config-file={config}", "--no-warn-unused-ignores", "--disable-error-code=has-type"]
    done = subprocess.run([sys.executable, "-m", "mypy", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
