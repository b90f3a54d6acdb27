"""The check for the day a GPU is there: what it keeps, skips, refuses and prints; and all of it with tiny shapes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.places import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from gpu import check, engine

DOOR = ROOT / "scripts" / "gpu_check"
PARTS = '''
"""Parts of a step that tests have written."""
import os, sys, time
from gpu.check import Failed, Skipped

def run(place, what):
    with open(place.work / "calls", "a") as calls:
        calls.write(what + "\\n")
    if what == "slow" and not (place.work / "again").exists():
        (place.work / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    if what == "raises":
        raise ValueError("no such kernel")
    if what == "finds":
        raise Failed("first line\\nthe kernel is another", {"kernel": "Other"})
    if what == "skips":
        raise Skipped("no GPU")
    if what == "dies":
        sys.stderr.write("about to die\\n")
        sys.stderr.flush()
        os._exit(9)
    return {"what": what}
'''
CALL = """
import sys
from gpu.check import Check, Part, Step, run
from pathlib import Path
results, work, *named = sys.argv[1:]
step = Step("made", "nothing", "made_parts:run", [Part(what, 1, (), {"what": what}) for what in named])
print(run(Check(Path(results), Path(work), tiny=True, interpreter=sys.executable), [step]))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of made-up parts that a step's process finds."""
    (tmp_path / "made_parts.py").write_text(PARTS)
    paths = [str(ROOT / "scripts"), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


def made(*named: str, **settings: Any) -> check.Step:
    return check.Step(
        "made", "nothing", "made_parts:run", [check.Part(w, 1, (), {"what": w}) for w in named], **settings
    )


def ran(place: Path, *named: str, **changes: Any) -> tuple[list[str], dict[str, Any]]:
    settings = {"tiny": True, "interpreter": sys.executable} | changes
    left = check.run(check.Check(place / "found.json", place, **settings), [made(*named)])
    return left, check.read(place / "found.json")


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().split()


def door(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(DOOR), *map(str, arguments)], capture_output=True, text=True, check=False)


def test_every_outcome_of_a_part_is_recorded_and_the_others_run(place: Path) -> None:
    _, parts = ran(place, "fine", "raises", "finds", "skips", "dies", "last")
    ends = {name.removeprefix("made/"): part["status"] for name, part in parts.items()}
    assert ends == {"fine": "passed", "raises": "failed", "finds": "failed", "skips": "skipped", "dies": "failed",
                    "last": "passed"}  # fmt: skip
    assert parts["made/fine"]["result"] == {"what": "fine"}
    assert parts["made/raises"]["error"][-1] == "ValueError: no such kernel"
    assert parts["made/finds"]["error"] == ["first line", "the kernel is another"]
    assert parts["made/finds"]["result"] == {"kernel": "Other"}
    assert parts["made/skips"]["reason"] == "no GPU"
    assert parts["made/dies"]["error"] == ["its process ended with exit code 9", "about to die"]


def test_finished_parts_are_not_repeated_and_skipped_ones_are(place: Path) -> None:
    ran(place, "fine", "raises", "skips")
    ran(place, "fine", "raises", "skips", "last")
    assert calls(place) == ["fine", "raises", "skips", "skips", "last"]
    ran(place, "fine", "raises", again=["made/raises"])
    assert calls(place)[5:] == ["raises"]
    ran(place, "fine", "raises", again=["made"])
    assert calls(place)[6:] == ["fine", "raises"]


def test_a_killed_check_continues_at_the_killed_part(place: Path) -> None:
    (place / "call.py").write_text(CALL)
    command = [sys.executable, str(place / "call.py"), str(place / "found.json"), str(place), "fine", "slow", "last"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    until(lambda: (place / "pid").exists() and (place / "pid").read_text())
    inside = int((place / "pid").read_text())
    running.send_signal(signal.SIGKILL)
    running.wait()
    until(lambda: not alive(inside))  # its standard input closed
    assert list(check.read(place / "found.json")) == ["made/fine"]
    (place / "again").touch()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert calls(place) == ["fine", "slow", "slow", "last"]
    assert {part["status"] for part in check.read(place / "found.json").values()} == {"passed"}


def until(holds: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_part_that_takes_too_long_fails(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TINY_LIMIT", 3.0)
    _, parts = ran(place, "slow", "last")
    assert parts["made/slow"]["error"][0] == "not done after 0.05 minutes"
    assert parts["made/last"]["status"] == "passed"
    assert not alive(int((place / "pid").read_text()))


def test_no_part_starts_that_would_end_after_the_limit(place: Path) -> None:
    left, parts = ran(place, "fine", "last", limit=0.5)
    assert left == ["made/fine", "made/last"] and not parts
    left, parts = ran(place, "fine", limit=1.5)
    assert not left and parts["made/fine"]["status"] == "passed"


def test_a_part_that_cannot_run_is_skipped_with_the_reason(place: Path) -> None:
    settings = check.Check(place / "found.json", place, tiny=False, interpreter=sys.executable)
    fine, lacking = check.Part("fine", 1, ()), check.Part("lacking", 1, ("json", "no_such_package", "vllm_none"))
    assert check.unable(settings, made(), fine, has_gpu=False) == "no NVIDIA GPU: nvidia-smi names none"
    assert check.unable(settings, made(), fine, has_gpu=True) is None
    reason = check.unable(settings, made(), lacking, has_gpu=True)
    assert reason == f"{sys.executable} lacks no_such_package, vllm_none; scripts/setup, or pip install ."


def test_a_skipped_part_replaces_none_that_ran(tmp_path: Path) -> None:
    file, ran_there = tmp_path / "found.json", {"status": "passed", "device": "NVIDIA H200", "result": {}}
    assert check.add(file, "a/b", ran_there)
    assert not check.add(file, "a/b", {"status": "skipped", "reason": "no GPU"})
    assert check.read(file) == {"a/b": ran_there}
    assert check.is_done(check.read(file), "a/b", "NVIDIA H200")
    assert not check.is_done(check.read(file), "a/b", "NVIDIA H100 80GB HBM3")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize("content", ["{", '{"schema": 2, "parts": {}}', "\xff\xfe"])
def test_a_broken_file_of_results_is_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "gpu.json"
    file.write_bytes(content.encode("latin-1"))
    done = door("--results", file, "--work", tmp_path / "work", "--render")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {file}") and len(done.stderr.splitlines()) == 1
    assert file.read_bytes() == content.encode("latin-1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny"], "--tiny needs --results FILE"),
        (["--tiny", "--results", str(ROOT / "eval" / "gpu.json")], "--tiny can't write eval/gpu.json"),
        (["--only", "kernel"], "there is no step 'kernel'"),
        (["--python", "/no/such/python", "--tiny", "--only", "environment", "--results", "RESULTS"], "/no/such/python"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    arguments = [word.replace("RESULTS", str(tmp_path / "found.json")) for word in arguments]
    done = door("--work", tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_docs_have_the_table_of_the_results() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    (section,) = re.findall(r"<!-- gpu -->\n(.*?)\n<!-- /gpu -->", text, re.DOTALL)
    assert section.strip() == check.render(check.read(check.RESULTS)), (
        "put scripts/gpu_check --render into docs/results.md"
    )


def test_kernels_are_read_from_vllms_log() -> None:
    log = """(EngineCore pid=7) INFO 11-22 [__init__.py:923] Using MacheteLinearKernel for mixed-precision linear
INFO 11-22 [compressed_tensors_wNa16.py:138] Using MacheteLinearKernel for CompressedTensorsWNA16
INFO 11-22 [__init__.py:797] Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8
INFO 11-22 [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].
INFO 11-22 [x.py:1] Using max model len 1024"""
    assert engine.named(log) == {
        "logged": {"MacheteLinearKernel": ["mixed-precision linear", "CompressedTensorsWNA16"],
                   "CutlassFP8ScaledMMLinearKernel": ["CompressedTensorsW8A8Fp8"]},
        "backends": ["FLASH_ATTN"],
    }  # fmt: skip
    broken = "INFO 1 x\n(EngineCore pid=1) ERROR 11-22 [core.py:9] ValueError: Failed to find a kernel\nclean up"
    assert engine.errors(broken) == ["(EngineCore pid=1) ERROR 11-22 [core.py:9] ValueError: Failed to find a kernel"]
    assert engine.errors("one\n\ntwo") == ["one", "two"]


@pytest.mark.parametrize(
    ("expected", "kernel", "fits"),
    [
        ("Machete, else Humming", "MacheteLinearKernel", True),
        ("Machete, else Humming", "MarlinLinearKernel", False),
        ("CUTLASS FP8", "CutlassFP8ScaledMMLinearKernel", True),
        ("CUTLASS FP8", "CutlassFp8BlockScaledMMKernel", False),
    ],
)
def test_a_kernel_is_compared_with_the_targets_table(expected: str, kernel: str, fits: bool) -> None:
    loaded = {"logged": {kernel: ["CompressedTensors"]}, "layers": {"layers.*.qkv_proj": [kernel]}}
    assert engine.fits(expected, kernel) == fits
    assert ("wrong" in engine.judged("w4a16", expected, loaded)) != fits


def test_every_kernel_that_a_target_names_is_known() -> None:
    from vlmcompress.recipe import targets

    for name in targets.REGISTRY.names():
        target = targets.get_target(name)
        for key in map(engine.format_key, check.SCHEMES):
            if target.format_problem(key) is None:
                assert engine.patterns(str(target.kernel(key))), f"{name}: {key}"


def test_classes_of_kernels_exist_in_vllm() -> None:
    """Each pattern stands for a class in the installed vLLM's own list of linear engine."""
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "model_executor" / "kernels" / "linear" / "__init__.py").read_text()
    classes = set(re.findall(r"\b\w+Kernel\b", source))
    for word, pattern in engine.CLASSES.items():
        assert any(re.fullmatch(pattern, name) for name in classes), word


def test_a_gpu_has_a_target() -> None:
    from vlmcompress.recipe import targets

    targets_of = [check.target(name, memory, capability) for name, memory, capability in (
        ("NVIDIA H200", 143771, (9, 0)), ("NVIDIA H100 80GB HBM3", 81559, (9, 0)), ("NVIDIA A100-SXM4-80GB", 81920, (8, 0)),
        ("NVIDIA A100-PCIE-40GB", 40960, (8, 0)), ("NVIDIA GeForce RTX 4090", 24564, (8, 9)), ("NVIDIA L4", 23034, (8, 9)),
        ("NVIDIA B200", 183359, (10, 0)), ("NVIDIA GB200", 189471, (10, 0)), ("NVIDIA A10G", 23028, (8, 6)),
        ("NVIDIA GeForce RTX 5090", 32607, (12, 0)), ("NVIDIA Thor", 125772, (11, 0)), ("Orin", 62841, (8, 7)))]  # fmt: skip
    assert (
        ",".join(targets_of) == "h200,h100,a100,a100-40gb,rtx4090,l40s,b200,gb200,a10g,rtx5090,jetson-thor,jetson-orin"
    )
    assert set(targets_of) <= targets.TARGETS.keys()


TINY = {
    "humming": ["humming/2-bit"],
    "serve": ["serve/bf16", "serve/awq"],
    "tests": ["tests/models-1-2", "tests/engines-3-3"],
}
"""Step -> the parts that stand for it."""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(7200)
def test_every_engine_step_with_tiny_shapes(tmp_path: Path) -> None:
    """All steps with vLLM's CPU build; parts that only repeat another's way with other numbers are left out."""
    file, before = tmp_path / "found.json", check.read(check.RESULTS)
    only = ["setup", *(name for step in check.of_tier("engine") for name in TINY.get(step.name, [step.name]))]
    arguments = ("--tiny", "--results", file, "--work", tmp_path / "work", "--python", sys.executable, "--only", *only)
    done = door(*arguments)
    parts = check.read(file)
    ends = {name: part["status"] for name, part in parts.items()}
    failed = {name: part["error"] for name, part in parts.items() if part["status"] == "failed"}
    assert done.returncode == 0 and not failed, (failed, done.stdout[-2000:], done.stderr[-2000:])
    assert list(ends) == check.names(check.chosen(only))
    assert [name for name, status in ends.items() if status == "skipped"] == ["setup/venv"]
    assert check.read(check.RESULTS) == before
    text = check.render(parts)
    for words in ("CPUWNA16LinearKernel", "awq, quarter"):
        assert words in text
