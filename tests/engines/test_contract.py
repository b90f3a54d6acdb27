"""The list of what the plugin reaches into in vLLM: it is complete, what vLLM has of it is there, and a break names itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit import lane
from tests.kit.places import ROOT
from tests.kit.vllm_source import edited, package
from vlmcompress.engines.vllm.plugin import _contract
from vlmcompress.engines.vllm.plugin._contract import PARTS, Reach, problems
from vlmcompress.engines.vllm.plugin._source import Source
from vlmcompress.reduction.support import SERVED_FAMILIES

PLUGIN = ROOT / "vlmcompress/engines/vllm/plugin"
ALL = [reach for part in PARTS.values() for reach in part]
# What mixins call of other mixins of the plugin; and types that nothing depends on when it runs.
OURS = {"__init__", "span", "lengths", "_shortened", "_placeholders", "reduced"}
TYPES = {"VllmConfig", "ModelConfig", "CommonAttentionMetadata"}


@pytest.mark.parametrize("folder", [package, lane.package])
def test_vllm_has_every_name_that_the_plugin_uses(folder: Callable[[], Path]) -> None:
    """The one that is installed, and the other one that is supported."""
    place = folder()
    assert {part: lines for part in PARTS if (lines := problems(part, place))} == {}


@pytest.mark.parametrize("folder", [package, lane.package])
def test_names_in_comments_exist_in_vllm(folder: Callable[[], Path]) -> None:
    """`vllm/v1/worker/gpu_model_runner.py::GPUModelRunner.requests` in a comment is a definition in that file, or in one that
    it imports from."""
    source, places = Source(folder()), set()
    for file in PLUGIN.parent.parent.rglob("*.py"):
        comments = " ".join(line.partition("# ")[2] for line in file.read_text().splitlines())
        places |= {(file.name, *place) for place in re.findall(r"vllm/([\w/]+)\.py::([\w.]*\w)", comments)}
    modules = {(name, path.removesuffix("/__init__").replace("/", "."), what) for name, path, what in places}
    assert len(modules) > 50
    assert {place for place in modules if source.find(*place[1:]) is None} == set()


def test_every_served_family_is_part_of_the_contract() -> None:
    assert set(SERVED_FAMILIES.names()) <= set(PARTS)


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(PLUGIN.glob("*.py")):
        yield file, ast.parse(file.read_text())


def test_every_import_from_vllm_is_listed() -> None:
    listed = {(reach.module, re.split(r"[.(]", reach.what)[0]) for reach in ALL}
    modules = {reach.module for reach in ALL}
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                module = str(node.module).removeprefix("vllm.")
                for alias in node.names:
                    inside = (module, alias.name) in listed or f"{module}.{alias.name}" in modules
                    assert inside or alias.name in TYPES, f"{file.name}: {module}.{alias.name}"


def test_every_vllm_method_that_the_plugin_calls_is_listed() -> None:
    """A mixin that changes what vLLM's method does calls it by `super()`."""
    listed = {reach.what.partition("(")[0].rpartition(".")[2] for reach in ALL}
    for file, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            of = node.value
            parent = isinstance(of, ast.Name) and of.id == "parent"
            parent |= isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
            if parent:
                assert node.attr in listed | OURS, f"{file.name}: super().{node.attr}"


HASHES = "def _get_mm_hashes(self, inputs: ProcessorInputs) -> MultiModalHashes:"
WHY = "names of images in caches say which reducer made them"


@pytest.mark.parametrize(
    ("file", "before", "after", "part", "message"),
    [
        (
            "multimodal/processing/processor.py",
            HASHES,
            HASHES.replace("_get_mm_hashes", "hashes_of"),
            "",
            f"multimodal.processing.BaseMultiModalProcessor._get_mm_hashes is gone ({WHY})",
        ),
        (
            "multimodal/processing/processor.py",
            HASHES,
            HASHES.replace("ProcessorInputs", "ProcessorInputs, salt: str | None = None"),
            "",
            f"multimodal.processing.BaseMultiModalProcessor._get_mm_hashes takes 'salt', which is new ({WHY})",
        ),
        (
            "transformers_utils/config.py",
            "def uses_mrope(config: PreTrainedConfig)",
            "def uses_mrope(hf_config: PreTrainedConfig)",
            "",
            "transformers_utils.config.uses_mrope takes no 'config' (plain RoPE runs through M-RoPE)",
        ),
        (
            "model_executor/models/clip.py",
            "self.qkv_proj",
            "self.in_proj",
            "llava",
            "model_executor.models.clip.CLIPAttention.qkv_proj is gone (attention of CLS is heard at this layer)",
        ),
        (
            "multimodal/inputs.py",
            "keep_on_cpu: bool = False",
            "stays: bool = False",
            "",
            "multimodal.inputs.MultiModalFieldConfig.batched takes no 'keep_on_cpu' (an image's fields go with it, and stay on "
            "the CPU)",
        ),
        (
            "v1/spec_decode/llm_base_proposer.py",
            "def _get_positions(self, num_tokens: int)",
            "def _get_positions(self, num_tokens: int, layer: int)",
            "EAGLE drafts in the first model runner",
            "v1.spec_decode.eagle.EagleProposer._get_positions takes 'layer', which is new (the draft's rows and slots)",
        ),
    ],
)
def test_a_broken_contract_names_the_missing_part(
    file: str, before: str, after: str, part: str, message: str, tmp_path: Path
) -> None:
    """A method that is gone or called otherwise, an attribute under another name, a parameter more, also in a parent class."""
    assert problems(part, edited(tmp_path / "vllm", file, before, after))[0] == message


def test_a_parameter_with_a_default_is_no_break(tmp_path: Path) -> None:
    """A function that the plugin calls may take more, where vLLM does not call the plugin's."""
    longer = "def uses_mrope(config: PreTrainedConfig, strict: bool = False)"
    folder = edited(
        tmp_path / "vllm", "transformers_utils/config.py", "def uses_mrope(config: PreTrainedConfig)", longer
    )
    assert problems("", folder) == []


def test_imports_and_parents_are_followed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/__init__.py").write_text("from .a import Child as Grown\nfrom torch import nn\n")
    (tmp_path / "inner/a.py").write_text(
        "from vllm.inner.b import Parent\ntry:\n    import x\nexcept ImportError:\n    late = 1\n"
        "class Child(Parent[int]):\n    def __init__(self, a, *, b=1): self.c, self.d = a, b\n"
    )
    (tmp_path / "inner/b.py").write_text("class Parent:\n    def do(self, x, y=1, *, z, **rest): pass\n")
    source = Source(tmp_path)
    for what in ("Grown(a, b)", "Grown.c", "Grown.d", "Grown.do(x, z, w)", "nn", "nn.Module"):
        expected = "inner.nn.Module is gone (w)" if what == "nn.Module" else None
        assert Reach("inner", what, "w").problem(source) == expected
    assert Reach("inner.a", "late", "w").problem(source) is None
    assert Reach("inner", "Grown.do(x)", "w").problem(source) == "inner.Grown.do takes 'z', which is new (w)"
    assert Reach("inner", "Grown.c(x)", "w").problem(source) == "inner.Grown.c is no function (w)"
    assert Reach("gone", "Anything", "w").problem(source) == "gone.Anything is gone (w)"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("0.32.0", (0, 32)), ("0.33.1rc2+cpu", (0, 33)), ("1.0", (1, 0)), ("dev", ()), ("0.dev1", ())],
)
def test_version_numbers_are_compared(version: str, numbers: tuple[int, ...]) -> None:
    assert _contract.numbers(version) == numbers
