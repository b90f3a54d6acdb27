#!/usr/bin/env python
"""Time, memory and disk of `quantize`, `export`, `doctor` and `push` on a model of 7 billion parameters, without data.

    scripts/measure/full_size.py --work DIR    makes a model with the shapes of Qwen2.5-VL-7B there (17 GB) and runs them
    scripts/measure/full_size.py --render      prints the docs' table, from eval/full_size.json

Weights are random, a window of one drawn tensor each. Each row is a process with one thread of arithmetic; the first is `cp` of
the model, the last a question about an image of 224 x 224 pixels (64 visual tokens) that llama.cpp answers with 8 tokens.
Memory is the anonymous part of the resident sets of the process and its children, looked at twenty times a second: pages of
weights that are mapped from files can be dropped by the kernel. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

from process_cost import process_cost

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "full_size.json"
SCHEMES = ("fp8", "rtn")
CALLS = {  # row of the table -> command; the folders are next to the model
    "`cp` of the model": ["cp", "-r", "bf16", "copy"],
    **{
        f"`quantize --scheme {scheme}`": ["vlmcompress", "quantize", "bf16", "-o", scheme, "--scheme", scheme]
        for scheme in SCHEMES
    },
    "`export --format gguf` of rtn": ["vlmcompress", "export", "rtn", "--format", "gguf", "-o", "gguf"],
    "`export --format awq` of rtn": ["vlmcompress", "export", "rtn", "--format", "awq", "-o", "awq"],
    "`doctor` of fp8": ["vlmcompress", "doctor", "fp8"],
    "`push --dry-run` of fp8": ["vlmcompress", "push", "fp8", "org/name", "--dry-run"],
    "`check --scheme fp8`": ["vlmcompress", "check", "bf16", "--scheme", "fp8"],
    "`quantize --scheme rtn --format gguf`": [
        *("vlmcompress", "quantize", "bf16", "-o", "w4"),
        *("--scheme", "rtn", "--group-size", "32", "--format", "gguf"),
    ],
    "an answer from that in llama.cpp": [sys.executable, str(Path(__file__).resolve()), "--answer", "w4"],
}
KEPT = ("fp8", "rtn", "w4")  # folders that later calls read
DELETED = ("copy", "gguf", "awq")  # and those that none does
sys.path.insert(0, str(ROOT / "scripts"))


def write_model(folder: Path, blocks: int = 28) -> None:
    """Write the checkpoint a shard at a time, so that it takes 2 GB of memory; `blocks`: of the decoder."""
    import torch
    from gpu import shapes
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    shape = shapes.FULL["qwen2.5-vl-7b"]
    shape = dataclasses.replace(shape, text={**shape.text, "num_hidden_layers": blocks})
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


def answer(folder: Path) -> None:
    """Ask the model in `folder` one question about a random image, as `eval --engine llamacpp` does; print the answer."""
    from PIL import Image

    from vlmcompress import engines

    with tempfile.TemporaryDirectory() as media:
        image = Path(media) / "image.png"
        Image.frombytes("RGB", (224, 224), random.Random(0).randbytes(224 * 224 * 3)).save(image)
        parts = [{"type": "image_url", "image_url": {"url": image.as_uri()}}, {"type": "text", "text": "What is this?"}]
        request = engines.Request("one", [{"role": "user", "content": parts}], max_tokens=8)
        settings = engines.EngineSettings(max_model_len=512, max_num_seqs=1)
        run = engines.get_engine("llamacpp").answer(folder, [request], media=media, settings=settings)
    print(json.dumps({"answer": dataclasses.asdict(run.answers["one"]), "seconds": run.seconds}))


def render(rows: list[dict]) -> str:
    """The docs' table."""
    lines = ["| call | time | user, system | memory at the peak | disk read, written |", "|---|---|---|---|---|"]
    for row in rows:
        waited = row["seconds"] > 3 * (row["user"] + row["system"])  # for other processes of the machine
        seconds = "–" if waited else f"{row['seconds']:.0f} s"
        times = f"{seconds} | {row['user']:.0f}, {row['system']:.0f} s"
        disk = f"{row['read'] / 1e9:.1f}, {row['written'] / 1e9:.1f} GB"
        lines.append(f"| {row['call']} | {times} | {row['anonymous'] / 1e9:.1f} GB | {disk} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="a place for 60 GB; the model is kept there")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--answer", type=Path, metavar="FOLDER", help="only ask the GGUF files in FOLDER a question")
    args = parser.parse_args()
    if args.answer:
        return answer(args.answer)
    if not args.render:
        if args.work is None:
            parser.error("--work DIR is needed")
        model = args.work / "bf16"
        if not (model / "config.json").is_file():
            shutil.rmtree(model, ignore_errors=True)
            write_model(model)
        for name in KEPT:
            shutil.rmtree(args.work / name, ignore_errors=True)
        rows = []
        for call, command in CALLS.items():
            rows.append({"call": call, **process_cost(command, args.work)})
            for name in DELETED:
                shutil.rmtree(args.work / name, ignore_errors=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        for name in KEPT:
            shutil.rmtree(args.work / name)
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
