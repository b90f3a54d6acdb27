#!/usr/bin/env python
"""Load checkpoints of all formats in transformers and GPTQModel, of any version, and see whether they compute the right thing.

    scripts/measure/other_readers.py --python PYTHON    adds to eval/readers.json what that Python's libraries loaded
    scripts/measure/other_readers.py --render           prints which versions loaded which of them

PYTHON is of an environment of its own, with torch, transformers, compressed-tensors, accelerate and, for AWQ and GPTQ,
gptqmodel and optimum; it needs nothing of vlmcompress. The checkpoints are tiny and random: some families in all formats and
schemes (`CASES`), every family in three (`EVERYWHERE`). "loads" stands where plain `from_pretrained`, or GPTQModel's own
loader, found all tensors and its logits are those of the same weights in 16 bits, within what rounding of activations makes
of them; else the error, or how far off the logits are. `tests/export/readers` compares what is stored with the table that users
are told about. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "readers.json"
WHOLE = ("llava", "qwen3-vl")  # families that are tried in all cases
PACKAGES = ("torch", "transformers", "compressed-tensors", "gptqmodel", "optimum")
CLOSE = 0.25  # of the size of logits: activations in 4 bits move them by 0.14, codes without scales by more than 1
# Format -> cases: names of `schemes`, or of what is made next to them.
CASES = {
    "compressed-tensors": (
        *("w4", "w4 zero points", "w2", "w8", "int8", "fp8", "fp8 fixed", "nvfp4", "mxfp4", "two widths"),
        *("two widths and zero points", "nvfp4 and fp8", "embeddings"),
    ),
    "awq": ("w4", "w4 zero points"),
    "gptq": ("w4", "w8", "two widths"),
    "gptq-v2": ("w4 zero points", "w2", "two widths"),
    "modelopt": ("fp8", "fp8 fixed", "nvfp4"),
    "bf16": ("w4",),
}
EVERYWHERE = (("compressed-tensors", "w4"), ("awq", "w4 zero points"), ("gptq-v2", "w4 zero points"))
TINY = dict.fromkeys(
    ("qwen3-5", "qwen3-5-moe"), {"linear_num_value_heads": 32}
)  # kernels want 32 outputs, as models have


def schemes() -> dict[str, tuple[Any, ...]]:
    """Case -> scheme of all layers, or of most and of the down projections."""
    from tests.kit import rtn
    from vlmcompress.numerics import Format, Scheme

    w4, asymmetric = Scheme(Format("int", 4, 32)), Scheme(Format("int", 4, 32, symmetric=False))
    w8 = Scheme(Format("int", 8, 32))
    fixed = rtn.SCHEMES["fp8-static-tensor"]
    return {
        "w4": (w4,),
        "w4 zero points": (asymmetric,),
        "w2": (Scheme(Format("int", 2, 32)),),
        "w8": (w8,),
        "int8": (rtn.SCHEMES["int8"],),
        "fp8": (rtn.SCHEMES["fp8"],),
        "fp8 fixed": (fixed,),
        "nvfp4": (rtn.SCHEMES["nvfp4"],),
        "mxfp4": (rtn.SCHEMES["mxfp4"],),
        "two widths": (w4, w8),
        "two widths and zero points": (asymmetric, w8),
        "nvfp4 and fp8": (rtn.SCHEMES["nvfp4"], rtn.SCHEMES["fp8"]),
        "embeddings": (w4,),
    }


def write(families: list[str], place: Path) -> Iterator[dict[str, Any]]:
    """Write all checkpoints; yield of each its case, its folder, that of the same weights in 16 bits, and its facts."""
    from dataclasses import asdict

    from tests.kit import rtn, tiny
    from vlmcompress.api import Recipe, quantize
    from vlmcompress.export.convert import convert
    from vlmcompress.export.launch_files import launch_facts

    result = schemes()
    for family in families:
        source = tiny.build(family, place / family / "source", **TINY.get(family, {}))
        for form, cases in CASES.items():
            for case in cases:
                if family not in WHOLE and (form, case) not in EVERYWHERE:
                    continue
                first, plain = (place / family / f"{name}-{case}" for name in ("compressed-tensors", "bf16"))
                if not first.exists() and case == "embeddings":
                    settings = {"scheme": "rtn", "options": {"group_size": 32}, "embeddings": "w8a16", "head": "w4a16"}
                    quantize(Recipe.of(source, first, **settings))
                elif not first.exists():
                    scheme, *others = result[case]
                    rtn.write(source, first, scheme, down=others[0] if others else None)
                out = place / family / f"{form}-{case}"
                for folder, name in ((plain, "bf16"), (out, form)):
                    if not folder.exists():
                        convert(first, folder, name)
                every = asdict(launch_facts(json.loads((out / "config.json").read_text()), {}, "OUT"))
                kept = ("architecture", "method", "groups", "embeddings", "experts", "kept_layers")
                yield {
                    "case": f"{family}: {form}, {case}",
                    "folder": str(out),
                    "plain": str(plain),
                    "facts": {key: every[key] for key in kept},
                }


def load(jobs: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Load each checkpoint in this Python's libraries; yield its case, the library and what came out."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ids = torch.arange(5, 45)[None]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()

    def plainly(folder: str, **options: Any) -> torch.Tensor:
        model, loaded = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype="auto", output_loading_info=True, **options
        )
        keys = ("missing_keys", "mismatched_keys", *(["unexpected_keys"] if not options else []))
        if wrong := [f"{len(loaded[key])} {key.replace('_', ' ')}" for key in keys if loaded.get(key)]:
            raise ValueError(", ".join(wrong))
        return logits(model)

    def dequantized(folder: str) -> torch.Tensor:  # which leaves scales of activations over
        return plainly(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))

    def by_gptqmodel(folder: str) -> torch.Tensor:
        from gptqmodel import BACKEND, GPTQModel

        return logits(GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH).model)

    readers: dict[str, Callable[[str], torch.Tensor]] = {"transformers": plainly, "dequantize=True": dequantized}
    if importlib.util.find_spec("gptqmodel"):
        readers["gptqmodel"] = by_gptqmodel
    right = {}
    for job in jobs:
        model = transformers.AutoModelForImageTextToText.from_pretrained(job["plain"], dtype=torch.float32)
        right[job["case"]] = logits(model)
    for name, read in readers.items():  # GPTQModel's loader last, which changes transformers for the whole process
        formats = {"gptqmodel": ("awq", "gptq"), "dequantize=True": ("compressed-tensors",)}.get(name, ("",))
        for job in jobs:
            if not any(form in job["case"] for form in formats):
                continue
            try:
                apart = float((read(job["folder"]) - right[job["case"]]).norm() / right[job["case"]].norm())
                result = "loads" if apart < CLOSE else f"loads, and its logits are off by {apart:.0%}"
            except BaseException as error:
                lines = [line for line in str(error).splitlines() if line.strip()] or [""]
                lines = ["mismatched sizes"] if "ignore_mismatched_sizes" in lines[0] else lines
                result = f"{type(error).__name__}: {lines[0].replace(job['folder'], 'OUT')[:120]}"
            yield {"case": job["case"], "reader": name, "result": result}


def measure(python: str, families: list[str]) -> dict[str, Any]:
    """Write the checkpoints here, load them there; what came out, with the versions."""
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        jobs = list(write(families, Path(folder)))
        Path(folder, "jobs.json").write_text(json.dumps(jobs))
        command = [python, __file__, "--jobs", f"{folder}/jobs.json"]
        variables = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
        line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"versions"'))
    return json.loads(line) | {"facts": {job["case"]: job["facts"] for job in jobs}}


def stored() -> dict[str, Any]:
    """What was measured so far: facts of the cases, and runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"facts": {}, "runs": []}


def keep(measured: dict[str, Any]) -> None:
    """Add a measurement to the file, to that of the same versions."""
    content = stored()
    runs, versions = content["runs"], measured["versions"]
    if all(run["versions"] != versions for run in runs):
        runs.append({"versions": versions, "results": {}})
    run = next(run for run in runs if run["versions"] == versions)
    for reader, results in measured["results"].items():
        run["results"][reader] = run["results"].get(reader, {}) | results
    runs.sort(key=lambda run: [int(part) for part in run["versions"]["transformers"].split(".")])
    RESULTS.write_text(dump({"facts": content["facts"] | measured["facts"], "runs": runs}))


def dump(content: dict[str, Any]) -> str:
    """Write as JSON, facts and results with a case a line."""

    def lines(entries: dict[str, Any], indent: str) -> str:
        return "{\n" + ",\n".join(f"{indent} {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items()) + "}"

    runs = []
    for run in content["runs"]:
        results = ",\n".join(f"   {json.dumps(k)}: {lines(v, '   ')}" for k, v in run["results"].items())
        runs.append(f'  {{"versions": {json.dumps(run["versions"])},\n  "results": {{\n{results}}}}}')
    facts = lines(content["facts"], " ")
    return f'{{"facts": {facts},\n"runs": [\n' + ",\n".join(runs) + "\n]}\n"


def render(content: dict[str, Any]) -> str:
    """A line for each case: the versions of each reader that loaded it, and that did not."""
    lines = []
    for case in content["facts"]:
        texts = []
        for reader in ("transformers", "dequantize=True", "gptqmodel"):
            package = "gptqmodel" if reader == "gptqmodel" else "transformers"
            results = {
                run["versions"][package]: run["results"][reader][case]
                for run in content["runs"]
                if case in run["results"].get(reader, {})
            }
            loads = [version for version, result in results.items() if result == "loads"]
            fails = [version for version in results if version not in loads]
            texts += [f"{reader} {', '.join(loads)} loads"] if loads else []
            texts += [f"{reader} {', '.join(fails)}: {results[fails[-1]]}"] if fails else []
        lines.append(f"{case}: {'; '.join(texts)}")
    return "\n".join(lines)


def main() -> None:
    """Measure, render, or be the part that runs in the other Python."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--python", help="interpreter of the environment whose libraries load")
    parser.add_argument("--families", help="with commas; default: all")
    parser.add_argument("--render", action="store_true", help="print what was measured")
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs:
        results: dict[str, dict[str, str]] = {}
        for row in load(json.loads(Path(args.jobs).read_text())):
            print(f"{row['reader']} {row['case']}: {row['result']}", file=sys.stderr, flush=True)
            results.setdefault(row["reader"], {})[row["case"]] = row["result"]
        there = [name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))]
        versions = {name: importlib.metadata.version(name) for name in there}
        print(json.dumps({"versions": versions, "results": results}))
        return
    if args.python:
        sys.path.insert(0, str(ROOT))
        from tests.kit.families import FAMILIES

        keep(measure(args.python, args.families.split(",") if args.families else FAMILIES))
    content = stored()
    print(render(content))
    results = [result for run in content["runs"] for cases in run["results"].values() for result in cases.values()]
    print(json.dumps({"loaded": results.count("loads"), "did_not": len(results) - results.count("loads")}))


if __name__ == "__main__":
    main()
