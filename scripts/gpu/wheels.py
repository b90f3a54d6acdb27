"""Bundle the small packages that are missing on a machine with torch and transformers but without a package index.

`fetch` downloads their wheels, in the versions that this project pins, for the Python and processor of that machine; `unpack`
lays them into a folder there, which the parts' processes find before what is installed. No pip is needed there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "loguru",
    "compressed-tensors", "jaxtyping", "wadler-lindig", "beartype", "hypothesis", "sortedcontainers",
)  # fmt: skip
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)  # pip takes wheels of these versions of manylinux only
_PYTHON = re.compile(r"(3\.\d+)(?:-(\w+))?")


class Unfit(Exception):
    """Raised for wheels, or words about them, that can't be used; its text is one line."""


def fetch(folder: Path, machine: str) -> list[Path]:
    """Download the wheels into a folder, which then holds nothing else.

    Args:
        machine: Python's version there, and the processor where it is not x86_64: `3.12`, `3.12-aarch64`.

    Raises:
        Unfit: the words are none, the folder holds something else, or pip can't get a wheel.
    """
    match = _PYTHON.fullmatch(machine)
    if not match:
        raise Unfit(f"--for {machine} should be a version of Python, such as 3.12 or 3.12-aarch64")
    if folder.exists() and any(path.suffix != ".whl" for path in folder.iterdir()):
        raise Unfit(f"{folder} holds more than wheels; name another folder")
    shutil.rmtree(folder, ignore_errors=True)  # two versions of one package would get in each other's way
    version, processor = match.group(1), match.group(2) or "x86_64"
    platforms = [f"--platform=manylinux_2_{number}_{processor}" for number in GLIBC]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp", *platforms]
    done = subprocess.run([*command, "-d", str(folder), *pins()], capture_output=True, text=True, check=False)
    if done.returncode:
        last = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr.strip()[-300:])
        raise Unfit(f"pip can't get the wheels: {last}")
    return sorted(folder.glob("*.whl"))


def pins() -> list[str]:
    """The packages with the versions that `scripts/requirements` pins for a GPU."""
    pinned = dict(
        line.split("==") for line in (ROOT / "scripts/requirements/gpu.txt").read_text().split() if "==" in line
    )
    missing = [name for name in NAMES if name not in pinned]
    assert not missing, f"scripts/requirements/gpu.txt pins no {missing}"
    return [f"{name}=={pinned[name]}" for name in NAMES]


def unpack(folder: Path, site: Path, tag: str) -> None:
    """Lay wheels into the folder `site`, anew.

    Args:
        tag: of the Python that is to import them, such as cp312.

    Raises:
        Unfit: there are no wheels, or they are another Python's.
    """
    files = sorted(folder.glob("*.whl"))
    if not files:
        raise Unfit(f"{folder} holds no wheels; make it by scripts/gpu_check --fetch {folder} --for VERSION")
    if strange := [file for file in files if not _fits(file.name, tag)]:
        raise Unfit(f"{strange[0].name} is not for {tag}; fetch the wheels anew, --for this machine's Python")
    shutil.rmtree(site, ignore_errors=True)
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(site)


def _fits(name: str, tag: str) -> bool:
    """Whether a wheel is for any Python 3, the stable interface, or this very one."""
    python, abi = name.removesuffix(".whl").split("-")[-3:-1]
    tags: Iterable[str] = python.split(".")
    return abi in ("none", "abi3") or tag in tags
