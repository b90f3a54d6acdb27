"""The lane: vLLM's wheel for GPUs, unpacked on a machine that has torch and a GPU and no package index.

scripts/gpu_vllm --pack out/lane      here (network, no GPU): wheels, pruned libraries, questions, checkpoints, and answers of
                                      a CPU, in parts that travel next to a checkout: out/lane/1, out/lane/2, ...
scripts/gpu_vllm --run out/lane/1     there, in the same checkout, once with each part; the last call runs the steps
scripts/gpu_vllm --rehearse WORK      here: the same steps in vLLM's CPU build, with few questions; proves the steps

The kernels of vLLM 0.33 touch torch through its stable C interface alone, so torch 2.11 suffices. After each part of a step
there are $OUT/gpu_vllm.json, of `gpu_check`'s schema, and logs.tar.gz. A later call on the same machine goes on where that one
stopped, and on another machine where gpu_vllm.json lies in the folder of the part. Exit code: 1 if a part failed, 2 for bad
input, else 0.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from vllm_lane import VERSION

from gpu.check import ROOT, STATUSES, BadInput, Check, Part, Step, download, gpu, names, pins, read, run

PYTHON = "3.12"
CAPABILITY = 90  # of the GPU's code that is kept: Hopper
MEMORY = 75 * 1024  # MiB; `served` has three models of 7 B up at once
BROUGHT = (
    "annotated-doc", "annotated-types", "anthropic", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2", "cffi",
    "cloudpickle", "compressed-tensors", "cryptography", "depyf", "docstring-parser", "einops", "fastapi", "gguf", "httpcore2",
    "httpx2", "humming-kernels", "ijson", "interegular", "jiter", "jmespath", "jsonschema", "jsonschema-specifications", "lark",
    "llguidance", "lm-format-enforcer", "loguru", "mcp", "mcp-types", "mistral-common", "model-hosting-container-standards",
    "msgspec", "nvtx", "openai", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions",
    "opentelemetry-semantic-conventions-ai", "orjson", "oss-harmony", "outlines-core", "partial-json-parser",
    "prometheus-fastapi-instrumentator", "py-cpuinfo", "pybase64", "pycountry", "pydantic", "pydantic-core",
    "pydantic-extra-types", "pydantic-settings", "pyjwt", "python-dotenv", "python-json-logger", "python-multipart", "pyzmq",
    "referencing", "rpds-py", "setproctitle", "sniffio", "sse-starlette", "starlette", "supervisor", "typing-extensions",
    "typing-inspection", "uvicorn", "watchfiles", "xgrammar",
)  # fmt: skip
"""What vLLM imports and the machine lacks, or has in another version."""
LEFT_OUT = re.compile(
    r"/vllm-rs$|_vllm_fa2_C|/third_party/(deep_gemm|fmha_sm100)/|\.(cuh|hpp|cu|inl)$"  # FlashAttention 2 has no code for Hopper
    r"|^pycountry/locales/|^mistral_common/.*\.(json|model)$|/tests?/"
)
# FlashAttention 3 has a translation unit for each head size and type: kept are those of the models here
LEFT_OUT_CODE = re.compile(rb"flash_fwd_hdim(64_\d|192|256)\w*|flash_fwd_\w*(_fp16_|softcap)\w*")
TRAVELS = 2**26 - 2**20  # bytes that travel in a call, less what their archive takes
DEMOS = ("llava", "qwen")  # eval/demo/demo-NAME


# --- Here: the pack ---


def entries(library: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Code for GPUs in a shared library: kind (1: PTX, 2: machine code), capability, and where it begins and ends.

    A fat binary is a header (magic number, version, its own size, size of the rest) before entries, each with a header of its
    own (kind, its size, size of the code; the capability at byte 28).
    """
    magic, at = struct.pack("<I", 0xBA55ED50), 0
    while (at := library.find(magic, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        end = at + header + size
        if version != 1 or header != 16 or end > len(library):
            at += 4
            continue
        at += header
        while at < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            if kind not in (1, 2) or header < 32 or at + header + size > end:
                break
            yield kind, struct.unpack_from("<I", library, at + 28)[0], at + header, at + header + size
            at += header + size
        at = end


def pruned(library: bytes, capability: int = CAPABILITY) -> bytes:
    """The library with zeros for all code of other GPUs, and for kernels that no step runs, so that it packs small.

    Raises:
        BadInput: it has code for GPUs, and none of it is kept.
    """
    content, kept, dropped = bytearray(library), 0, 0
    for kind, code_capability, begin, end in entries(library):
        if kind == 2 and code_capability == capability and not LEFT_OUT_CODE.search(library, begin, end):
            kept += end - begin
        else:
            content[begin:end] = bytes(end - begin)
            dropped += end - begin
    if dropped and not kept:
        raise BadInput(
            f"no code for compute capability {capability / 10} is in a library that has {dropped} bytes for others"
        )
    return bytes(content)


def lay_out(wheels: Iterable[Path], site: Path) -> None:
    """Unpack wheels into a folder, without what no step needs; libraries with code for GPUs are pruned."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/") or LEFT_OUT.search(name):
                    continue
                content = archive.read(name)
                if name.startswith("vllm/") and name.endswith(".so") and next(entries(content), None):
                    try:
                        content = pruned(content)
                    except BadInput:
                        continue  # of another generation altogether
                path = site / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    stated = site / "vlmcompress-0.dist-info"  # what announces the plugin
    stated.mkdir()
    ours = distribution("vlmcompress")
    for name in ("METADATA", "entry_points.txt"):
        (stated / name).write_text(ours.read_text(name) or "")


def written(tree: Path, folder: Path, most: int) -> list[Path]:
    """Pack a tree into folders of a part each, `folder/1` and so on. Returns the parts."""
    packed = folder / "packed.tar.xz"
    with tarfile.open(packed, "w:xz", preset=9) as archive:  # whose window of 64 MB sees what checkpoints share
        for child in sorted(tree.iterdir()):
            archive.add(child, child.name)
    size = packed.stat().st_size
    count, made = -(-size // most), time.strftime("%Y%m%d-%H%M%S")
    for stale in folder.glob("[0-9]*"):
        shutil.rmtree(stale)
    parts = []
    with packed.open("rb") as whole:
        for number in range(1, count + 1):
            part = folder / str(number)
            part.mkdir()
            content = whole.read(-(-size // count))
            (part / "part").write_bytes(content)
            about = {"number": number, "of": count, "made": made, "sha256": hashlib.sha256(content).hexdigest()}
            (part / "part.json").write_text(json.dumps(about))
            parts.append(part / "part")
    packed.unlink()
    return parts


def pack(folder: Path, few: bool) -> list[Path]:
    """Make the parts. Wheels, checkpoints and answers are kept in the folder for a later call. Raises `BadInput`."""
    from gpu.lane_steps import prepare

    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    checkout = [ROOT / name for name in filter(None, listing.stdout.split("\0"))]
    most = TRAVELS - sum(file.stat().st_size for file in checkout if file.exists())
    if most < 2**20:
        raise BadInput(f"the checkout takes all of the 64 MiB that travel; remove files, {-most} bytes too many")
    wheels, tree = folder / "wheels", folder / "tree"
    packages = [f"vllm=={VERSION}", *pins(BROUGHT)]
    if not (wheels / "list").exists() or (wheels / "list").read_text().split() != packages:
        shutil.rmtree(wheels, ignore_errors=True)
        download(wheels, PYTHON, packages)
        (wheels / "list").write_text("\n".join(packages))
    prepare(folder / "data", few)
    shutil.rmtree(tree, ignore_errors=True)
    lay_out(sorted(wheels.glob("*.whl")), tree / "site")
    shutil.copytree(folder / "data", tree / "data", ignore=shutil.ignore_patterns(".*"))
    parts = written(tree, folder, most)
    shutil.rmtree(tree)
    return parts


# --- There: the parts ---


def unpacked(part: Path) -> Path | None:
    """Keep a part outside the checkout. Returns the folder with what is in all of them; None while one is missing.

    Raises:
        BadInput: the part is damaged, or this is a Python that the wheels are not for.
    """
    if "{}.{}".format(*sys.version_info) != PYTHON:
        raise BadInput(f"the wheels are for Python {PYTHON}, and this is {sys.version.split()[0]}")
    about, content = json.loads((part / "part.json").read_text()), (part / "part").read_bytes()
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise BadInput(f"{part / 'part'} is damaged; pack again")
    kept = Path(os.environ.get("GPU_VLLM_WORK") or Path(tempfile.gettempdir(), "gpu-vllm"))
    made = kept / about["made"]  # of one packing: parts of another do not mix
    made.mkdir(parents=True, exist_ok=True)
    partial = made / ".partial"
    partial.write_bytes(content)
    partial.rename(made / f"part-{about['number']}")
    if (part / "gpu_vllm.json").exists() and not (made / "gpu_vllm.json").exists():  # results of a machine that is gone
        shutil.copy(part / "gpu_vllm.json", made)
    parts = [made / f"part-{number}" for number in range(1, about["of"] + 1)]
    if absent := [part.name for part in parts if not part.exists()]:
        print(f"part {about['number']} of {about['of']} is here; still to come: {', '.join(absent)}")
        return None
    if not (made / "tree").exists():
        shutil.rmtree(made / ".tree", ignore_errors=True)
        packed = io.BytesIO(b"".join(part.read_bytes() for part in parts))  # below 100 MB
        with tarfile.open(fileobj=packed, mode="r|xz") as archive:
            archive.extractall(made / ".tree", filter="tar")
        (made / ".tree").rename(made / "tree")
    return made


# --- There: the steps, in the order of what they are worth ---

ENGINE = ("torch", "transformers", "vllm", "compressed_tensors")
_FORMATS = {
    "main": ("fp8", "int8", "w4a16", "w4a16-marlin", "w4a16-zero-points", "w4a16-zero-points-marlin", "awq-format",
             "gptq-format"),
    "more": ("w8a16", "fp8-block", "fp8-static", "nvfp4", "w4a8-fp8", "fp8-kv", "fp8-tower", "int8-tower"),
}  # fmt: skip
STEPS = (
    Step("imports", "vLLM and the plugin import; its contract holds", "gpu.lane_steps:imports", [Part("all", 0.5, ENGINE)],
         gpu=False, limit=150),
    Step("built", "vLLM makes every format's layers, and picks which kernels", "gpu.lane_steps:built",
         [Part("all", 0.5, ENGINE)], gpu=False, limit=150),
    Step("answers", "BF16 answers are the CPU's", "gpu.lane_steps:answers", [Part("bf16", 0.7, ENGINE)], limit=120),
    Step("formats", "every format loads, in which kernel, and answers as on a CPU", "gpu.lane_steps:formats",
         [Part(name, 1.0, ENGINE, {"names": of}) for name, of in _FORMATS.items()], limit=120),
    Step("reduced", "reducers keep the CPU's tokens and answer as there", "gpu.lane_steps:reduced",
         [Part("plugin", 1.0, ENGINE)], limit=120),
    Step("compiled", "CUDA graphs and torch.compile", "gpu.lane_steps:compiled", [Part("llava", 0.9, ENGINE)], limit=120),
    Step("drafts", "answers with drafted tokens are those without", "gpu.lane_steps:drafts", [Part("ngram", 0.5, ENGINE)],
         limit=120),
    Step("served", "speed on the shapes of 7 B", "gpu.lane_steps:served",
         [Part(scheme, 2.2, (*ENGINE, "aiohttp"), {"scheme": scheme}) for scheme in ("bf16", "fp8", "rtn")], limit=240),
)  # fmt: skip


@cache
def machine_problem(data: Path) -> str | None:
    """Why the steps can't run on this machine, in a line."""
    from vlmcompress.utils.gpu import forked_engine_problem

    if (here := gpu()) is None:
        return "nvidia-smi names no NVIDIA GPU, and all steps but 'imports' and 'built' need one"
    capability = 10 * here.capability[0] + here.capability[1]
    if capability != CAPABILITY:
        return (
            f"{here.name} has compute capability {capability / 10}, and the parts have code for {CAPABILITY / 10} alone; use "
            "an H100 or H200"
        )
    if here.memory < MEMORY:
        return f"{here.name} has {here.memory / 1024:.0f} GiB of memory; the steps need {MEMORY / 1024:.0f}"
    return forked_engine_problem(data)


def go_on(
    data: Path,
    work: Path,
    only: Sequence[str],
    limit: float,
    again: bool = False,
    tiny: bool = False,
    site: Path | None = None,
) -> int:
    """Run the steps that are left, until the minutes are over; results and logs are in `$OUT` after each part.

    Args:
        only: names of steps and parts; none: all.
        again: run those of `only` although they are done.
        site: folder with the packages; None: those that are installed.
    """
    os.environ["GPU_VLLM_DATA"] = str(data)
    for demo in DEMOS:
        shutil.copytree(ROOT / f"eval/demo/demo-{demo}", data / "checkpoints" / demo, dirs_exist_ok=True)
    began, results = time.monotonic(), work / "gpu_vllm.json"
    work.mkdir(parents=True, exist_ok=True)
    out = Path(os.environ.get("OUT") or work / "out")
    out.mkdir(parents=True, exist_ok=True)
    if unknown := set(only) - {step.name for step in STEPS} - set(names(STEPS)):
        raise BadInput(f"there is no step '{min(unknown)}'; there are {', '.join(names(STEPS))}")
    left = []
    for step in STEPS:
        for part in step.parts:
            if only and not {step.name, f"{step.name}/{part.name}"} & set(only):
                continue
            if step.gpu and not tiny and (problem := machine_problem(data)):
                raise BadInput(problem)
            rest = limit - (time.monotonic() - began) / 60
            check = Check(results, work, tiny, sys.executable, max(rest, 0.01), only if again else (), site)
            left += run(check, [replace(step, parts=[part])])
            if results.exists():
                shutil.copy(results, out / results.name)
            with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
                archive.add(work / "logs", "logs") if (work / "logs").exists() else None
    parts = read(results)
    states = [part["status"] for part in parts.values()]
    print(", ".join(f"{states.count(status)} {status}" for status in STATUSES), f"left: {', '.join(left) or 'none'}")
    return 1 if "failed" in states else 0


def main() -> int:
    """Answer a call and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_vllm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="make the parts; keeps what it has fetched and made there"
    )
    kinds.add_argument("--rehearse", type=Path, metavar="WORK", help="run the steps in the vLLM that is installed here")
    kinds.add_argument("--run", type=Path, metavar="PART", help="take a part; run the steps when all are here")
    parser.add_argument("--few", action="store_true", help="with --pack: one checkpoint and a few questions, to try it")
    parser.add_argument("--only", nargs="+", metavar="STEP", default=[], help="steps, or parts as STEP/PART")
    parser.add_argument("--again", action="store_true", help="run those of --only although they are done")
    parser.add_argument(
        "--limit", type=float, metavar="MINUTES", default=8.5, help="start nothing that would end later"
    )
    args = parser.parse_args()
    try:
        if args.pack:
            parts = pack(args.pack.resolve(), args.few)
            print("\n".join(f"{part.parent}: {part.stat().st_size / 1e6:.1f} MB" for part in parts))
            return 0
        if args.rehearse:
            from gpu.lane_steps import prepare

            data = args.rehearse.resolve() / "data"
            prepare(data, few=True)
            return go_on(data, args.rehearse.resolve() / "work", args.only, 600, args.again, tiny=True)
        made = unpacked(args.run)
        return (
            go_on(made / "tree/data", made, args.only, args.limit, args.again, site=made / "tree/site") if made else 0
        )
    except (BadInput, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
