"""Start of the lane on the machine with the GPU: `python3 FOLDER/go`, once with each folder of `scripts/gpu_vllm --pack`.

A call keeps its part; the call that brings the last one unpacks all and runs the steps, with the arguments that it was given.
The standard library of Python 3.12 suffices.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path

WORK = Path(os.environ.get("GPU_VLLM_WORK") or Path(tempfile.gettempdir(), "gpu-vllm"))


class Joined(io.RawIOBase):
    """Parts, read as the one file that they were."""

    def __init__(self, parts):
        self.files = [open(part, "rb") for part in parts]  # noqa: SIM115 - closed at their ends

    def readable(self):
        return True

    def readinto(self, buffer):
        while self.files:
            if count := self.files[0].readinto(buffer):
                return count
            self.files.pop(0).close()
        return 0


def unpack(parts, folder):
    """Unpack parts into a folder, which is there with everything or not at all."""
    partial = folder.with_name(f".{folder.name}.partial")
    with tarfile.open(fileobj=io.BufferedReader(Joined(parts), 1 << 20), mode="r|xz") as archive:
        archive.extractall(partial, filter="tar")
    partial.rename(folder)


def main():
    """Keep the part of this folder, and go on when all are there. Ends with exit code 2 if a part is damaged."""
    here = Path(__file__).resolve().parent
    about = json.loads((here / "part.json").read_text())
    made = WORK / about["made"]  # of one packing: parts of another do not mix
    made.mkdir(parents=True, exist_ok=True)
    content = (here / "part").read_bytes()
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        sys.exit(f"error: {here / 'part'} is damaged; pack again")
    aside = made / f".{about['number']}"
    aside.write_bytes(content)
    aside.rename(made / f"part-{about['number']}")
    parts = [made / f"part-{number}" for number in range(1, about["of"] + 1)]
    if lacking := [part.name for part in parts if not part.exists()]:
        print(f"{about['number']} of {about['of']} parts is here; still to come: {', '.join(lacking)}")
        return
    tree = made / "tree"
    if not tree.exists():
        unpack(parts, tree)
    repository, site = tree / "repository", tree / "site"
    earlier = here / "gpu_vllm.json"  # results of a machine that is gone
    if earlier.exists() and not (made / "gpu_vllm.json").exists():
        (made / "gpu_vllm.json").write_bytes(earlier.read_bytes())
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(repository / "scripts"), str(repository)])
    command = [sys.executable, "-m", "gpu.lane", "--run", str(tree / "data"), "--work", str(made), *sys.argv[1:]]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
