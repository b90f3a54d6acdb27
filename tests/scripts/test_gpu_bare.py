"""The check's tier `bare`: what its parts need, the wheels for it, and all of it where nothing else can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kit import bare
from tests.kit.imports import imported
from tests.kit.places import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from gpu import check

DOOR = ROOT / "scripts" / "gpu_check"


def door(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(DOOR), *map(str, arguments)], capture_output=True, text=True, check=False)


def third_party(file: Path) -> set[str]:
    """Packages that a file imports, also within functions, but for Python's and this project's own."""
    names = {name.partition(".")[0] for name in imported(file)}
    return names - {*sys.stdlib_module_names} - {"vlmcompress", "gpu", "tests", "eval"}


@pytest.mark.parametrize("tier", ["bare", "engine"])
def test_what_a_part_imports_is_among_its_needs(tier: str) -> None:
    for step in check.of_tier(tier):
        file = ROOT / "scripts" / f"{step.function.partition(':')[0].replace('.', '/')}.py"
        for each in step.parts:
            assert third_party(file) - {"numpy", "tokenizers", "vlmcompress"} <= {*each.needs}, (
                f"{step.name}/{each.name}"
            )


NEEDS = """
import importlib, sys
sys.path[:0] = sys.argv[1:3]
for name in sys.argv[3:]:
    importlib.import_module(name)
"""


def ours(file: Path) -> set[str]:
    """Modules of this project that a file imports, also within functions, and those of the check that it imports."""
    names = set()
    for name in imported(file):
        path = ROOT.joinpath("scripts" if name.startswith("gpu") else "", *name.split("."))
        if name.startswith(("vlmcompress", "gpu")) and (path.with_suffix(".py").exists() or path.is_dir()):
            names.add(name)
    return names


def test_bare_parts_can_be_imported_where_hardly_anything_is(tmp_path: Path) -> None:
    """All modules that they import, in fresh processes: those of torch alone, and those that also take models."""
    modules: dict[bool, set[str]] = {True: set(), False: set()}
    for step in check.of_tier("bare"):
        module = step.function.partition(":")[0]
        names = {module} | ours(ROOT / "scripts" / f"{module.replace('.', '/')}.py")
        modules[all(each.needs == ("torch",) for each in step.parts)] |= names
    running = []
    for alone, names in modules.items():
        output = {"torch"} if alone else {*check.INSTALLED, "pydantic"}
        environment = os.environ | {"PYTHONPATH": bare.hiding(tmp_path / str(alone), output)}
        command = [sys.executable, "-c", NEEDS, str(ROOT / "scripts"), str(ROOT), *sorted(names)]
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, words = process.communicate()
        assert process.returncode == 0, words


def test_the_tier_bare_needs_no_engine_and_no_other_tool() -> None:
    hidden = bare.hidden(check.INSTALLED)
    assert {"vllm", "llmcompressor", "lm_eval", "ray", "compressed_tensors", "sklearn", "pyarrow"} <= hidden
    assert not {"torch", "transformers", "numpy"} & hidden
    assert {name.partition("==")[0].replace("-", "_") for name in check.pins()} >= {*check.BROUGHT}


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> Path:
    """A wheel of one module in the version that the check pins."""
    version = dict(line.split("==") for line in check.pins())[name]
    module = name.replace("-", "_")
    file = folder / f"{module}-{version}-{tag}.whl"
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as content:
        content.writestr(f"{module}/__init__.py", f"tag = {tag!r}\n")
        content.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        content.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        content.writestr(f"{about}/RECORD", "")
    return file


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its index; of pydantic-core those of two Pythons."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in check.WHEELS:
        if name != "pydantic-core":
            wheel(folder, name)
    for version in ("cp311", "cp312"):
        wheel(folder, "pydantic-core", f"{version}-{version}-manylinux2014_x86_64.manylinux_2_17_x86_64")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_wheels_are_fetched_for_another_python_and_found_there(index: Path, tmp_path: Path) -> None:
    folder, site = tmp_path / "wheels", tmp_path / "site"
    files = check.fetch(folder, "3.12")
    assert len(files) == len(check.WHEELS)
    (core,) = folder.glob("pydantic_core-*")
    assert "-cp312-" in core.name
    with pytest.raises(check.BadInput, match="pydantic_core.* is not for cp311"):
        check.unpack(folder, site, "cp311")
    check.unpack(folder, site, "cp312")
    code = "import pydantic, pydantic_core; print(pydantic.__file__, pydantic_core.tag)"
    environment = os.environ | {"PYTHONPATH": str(site)}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == [str(site / "pydantic" / "__init__.py"), core.name.split("-", 2)[2].removesuffix(".whl")]


def test_wheels_that_can_not_be_used_are_one_line(index: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    cases = {
        "--for twelve": ["--fetch", tmp_path / "new", "--for", "twelve"],
        "holds more than wheels": ["--fetch", tmp_path / "kept", "--for", "3.12"],
        "pip can't get the wheels": ["--fetch", tmp_path / "new", "--for", "3.13"],
        "go together": ["--fetch", tmp_path / "new"],
        "holds no wheels": ["--wheels", tmp_path / "kept", "--tier", "bare"],
    }
    for words, arguments in cases.items():
        done = door("--results", tmp_path / "found.json", "--work", tmp_path / "work", *arguments)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert (tmp_path / "kept" / "notes.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bare_part_without_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny shapes, in processes that find what a bare machine has and, of all else, the wheels that are fetched for it."""
    folder, file = tmp_path / "wheels", tmp_path / "found.json"
    try:
        check.fetch(folder, f"{sys.version_info.major}.{sys.version_info.minor}")
    except check.BadInput as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PYTHONPATH", bare.hiding(tmp_path / "hiding", check.INSTALLED, check.BROUGHT))
    settings = ("--wheels", folder, "--work", tmp_path / "work", "--python", sys.executable)
    done = door("--tiny", "--tier", "bare", "--results", file, *settings)
    parts = check.read(file)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-2000:])
    expected = dict.fromkeys(check.names(check.of_tier("bare")), "passed")
    expected |= {} if find_spec("triton") else {"triton/solving": "skipped"}  # which a CPU's environment lacks
    assert {name: part["status"] for name, part in parts.items()} == expected
    text = check.render(parts)
    for words in ("qwen2.5-vl-7b-gptq-plus", "qwen3-vl-8b: solving all blocks", "divprune", "learn-reducer"):
        assert words in text
