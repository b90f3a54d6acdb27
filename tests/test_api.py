"""The Python interface: the examples of docs/python.md run, on a demo model, and what is wrong is a `UserError`."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import vlmcompress
from tests.kit.places import DEMO_LLAVA, DEMOS, ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)

PYTHON = sys.executable  # a new one, not a fork (`quick_engines`) that has imported everything


def test_the_examples_run(tmp_path, monkeypatch, quick_engines):
    """All examples of the page, one after the other, as a reader would paste them; folders and the model are put in."""
    monkeypatch.chdir(tmp_path)
    data = DEMOS / "data" / "llava" / "calibration.parquet"
    questions = str(data.with_name("test.parquet"))
    code = "\n".join(EXAMPLES).replace('"MODEL"', repr(str(DEMO_LLAVA)))
    code = code.replace('"IMAGES"', repr(str(data))).replace('"QUESTIONS"', repr(questions))
    names: dict = {}
    exec(compile(code, "docs/python.md", "exec"), names)
    assert names["done"].manifest["size"]["weights_after"] < names["done"].manifest["size"]["weights_before"]
    assert (tmp_path / "OUT" / "model.safetensors").is_file()
    assert names["results"].suites[0].samples == 40 and names["results"].suites[0].overall.candidate > 0.8
    assert names["vlm"].model.config.model_type == "llava" and len(EXAMPLES) == 3


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"scheme": "awk"}, "unknown scheme 'awk'; did you mean 'awq'?"),
        ({"scheme": "awq", "sample": 3}, "unknown key 'sample'"),
        ({"scheme": "awq", "calibrate": {"samples": "3"}}, "calibrate.samples is"),
        ({"scheme": "awq", "format": "ggml"}, "unknown format 'ggml'"),
    ],
)
def test_bad_keys_are_user_errors(keys, part):
    with pytest.raises(vlmcompress.UserError, match=re.escape(part)):
        vlmcompress.Recipe.of(DEMO_LLAVA, "OUT", **keys)


def test_a_reducer_needs_transformers():
    with pytest.raises(vlmcompress.UserError, match="attaches to transformers models"):
        vlmcompress.evaluate(DEMO_LLAVA, DEMO_LLAVA, reduce="divprune:0.5")


def test_importing_the_package_imports_no_library():
    """vLLM imports the package in every process, and `--help` should be quick."""
    code = "import sys, vlmcompress; assert not {'torch', 'transformers', 'pydantic'} & sys.modules.keys()"
    subprocess.run([PYTHON, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vlmcompress.nothing  # noqa: B018


def test_the_package_lists_its_names():
    """Completion in a notebook finds them before they are imported."""
    assert {*vlmcompress.__all__} <= {*dir(vlmcompress)} and "__version__" in dir(vlmcompress)
