#!/usr/bin/env python
"""Time and memory of `vlmcompress quantize` on a model of 7 billion parameters, with schemes that need no data.

    scripts/measure/full_size.py --work DIR    makes a model with the shapes of Qwen2.5-VL-7B there (17 GB), quantizes it
    scripts/measure/full_size.py --render      prints the docs' table, from eval/full_size.json

Weights are random, a window of one drawn tensor each. Memory is the anonymous part of the process's resident set, looked
at twenty times a second: pages of weights that are mapped from files can be dropped by the kernel. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "full_size.json"
SCHEMES = ("fp8", "rtn", "w8a16")
sys.path.insert(0, str(ROOT / "scripts"))


def write_model(folder: Path) -> None:
    """Write the checkpoint a shard at a time, so that it takes 2 GB of memory."""
    import torch
    from gpu import shapes
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    shape = shapes.FULL["qwen2.5-vl-7b"]
    config = shapes.config(shape)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        tensors = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).state_dict()
    drawn = torch.randn(max(tensor.numel() for tensor in tensors.values())).mul_(0.02).bfloat16()
    folder.mkdir(parents=True)
    index, shard, size = dict[str, str](), dict[str, torch.Tensor](), 0
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        shard[name] = drawn[: tensor.numel()].reshape(tensor.shape).clone()
        size += shard[name].nbytes
        if size > 1e9 or number == len(tensors):
            file = f"model-{number:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config.save_pretrained(folder)
    shapes.processor(shape).save_pretrained(folder)


def measure(model: Path, scheme: str) -> dict:
    """Quantize once: seconds of the clock and of processors, the peak of anonymous memory, bytes of weights."""
    out = model.with_name(scheme)
    command = [sys.executable, "-m", "vlmcompress", "quantize", str(model), "-o", str(out), "--scheme", scheme]
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *(int(kib) * 1024 for kib in re.findall(r"RssAnon:\s+(\d+)", status))])
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{scheme}: quantize ended with {process.returncode}")
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    sizes = json.loads((out / "vlmcompress.json").read_text())["size"]
    shutil.rmtree(out)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"scheme": scheme, "seconds": round(seconds), "processor": round(processor), "anonymous": peak} | sizes


def render(rows: list[dict]) -> str:
    """The docs' table."""
    lines = ["| scheme | weights | memory at the peak | processor time | time |", "|---|---|---|---|---|"]
    for row in rows:
        weights = f"{row['weights_before'] / 1e9:.1f} -> {row['weights_after'] / 1e9:.1f} GB"
        times = f"{row['processor']} s | {row['seconds']} s"
        lines.append(f"| `{row['scheme']}` | {weights} | {row['anonymous'] / 1e9:.1f} GB | {times} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="a place for 30 GB; the model is kept there")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.render:
        if args.work is None:
            parser.error("--work DIR is needed")
        model = args.work / "bf16"
        if not (model / "config.json").is_file():
            shutil.rmtree(model, ignore_errors=True)
            write_model(model)
        rows = [measure(model, scheme) for scheme in SCHEMES]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
