#!/usr/bin/env python
"""What a prompt and a token cost in vLLM's CPU build, llama.cpp and OpenVINO, with 16, 8 and 4 bits.

    scripts/measure/engines_speed.py build/engines-speed --model random     # Qwen2.5-VL of 0.4 B random parameters
    scripts/measure/engines_speed.py build/engines-speed --model demo-qwen --requests 100 --repeats 2    # or demo-llava

Each engine answers one request at a time with one thread. Counted are the processor seconds of its process and of its
children: what a core is busy for, whatever else the machine does. Requests come in pairs about different images of the same
size, for one token and for many: the first takes what a prompt costs, the difference is the tokens'. The variants take turns,
each in a process of its own, and all is repeated; medians of the turns are given, with their extremes. Each turn is kept in
FOLDER, so that a run that was ended goes on; `--minutes` ends it. The demo models' prompts take a tick of the clock, so that
many are needed, and their answers are two tokens long, which says nothing of tokens.

Weights are 4 bits in groups of 32, symmetric, and 8 bits per row. In vLLM's CPU build the 8 bits are those of inputs, too, as
it has no other kernel. llama.cpp's 4 bits are Q4_0, for which it rounds inputs to 8 bits; OpenVINO does so where the processor
has instructions for it. Prints a table, and as its last line all as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
from PIL import Image

from vlmcompress import engines
from vlmcompress.cli import main as vlmcompress
from vlmcompress.engines import Request, Settings
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import size as text_size
from vlmcompress.utils.text import table

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "eval/demo/demo-qwen"  # whose tokenizer and chat template the random model has
TEXT = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention"] * 24,
    "max_window_layers": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
}
VISION = {
    "patch_size": 14,
    "depth": 12,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_heads": 6,
    "out_hidden_size": 896,
    "window_size": 112,
    "fullatt_block_indexes": [2, 5, 8, 11],
}
FOUR = ("--scheme", "rtn", "--set", "options.group_size=32", "--set", "options.symmetric=true")
EIGHT = ("--scheme", "w8a16")


@dataclass(frozen=True)
class Variant:
    """A checkpoint in an engine; `flags` of `quantize` make it, None: it is the source."""

    engine: str
    bits: int
    flags: tuple[str, ...] | None

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.bits}"


def variants(calibration: Path) -> list[Variant]:
    """All that are measured. `calibration`: images, for vLLM's 8 bits."""
    gguf, openvino = ("--format", "gguf"), ("--format", "openvino")
    return [
        Variant("vllm", 16, None),
        Variant("llamacpp", 16, ("--scheme", "none", *gguf)),
        Variant("openvino", 16, ("--scheme", "none", *openvino)),
        Variant("vllm", 8, ("--scheme", "int8", "--calib", str(calibration), "--samples", "4")),
        Variant("llamacpp", 8, (*EIGHT, *gguf)),
        Variant("openvino", 8, (*EIGHT, *openvino)),
        Variant("vllm", 4, FOUR),
        Variant("llamacpp", 4, (*FOUR, *gguf)),
        Variant("openvino", 4, (*FOUR, *openvino)),
    ]


def build_random(folder: Path, layers: int) -> None:
    """Write the random model."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"] |= TEXT | {"num_hidden_layers": layers, "layer_types": TEXT["layer_types"][:layers]}
    config["vision_config"] |= VISION
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in DEMO.iterdir():
        if file.name not in ("config.json", "model.safetensors", "README.md"):
            (folder / file.name).write_bytes(file.read_bytes())
    processor = json.loads((folder / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        if part in processor:
            processor[part] |= {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024}}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def make(variant: Variant, source: Path, folder: Path) -> Path | None:
    """The variant's checkpoint, made where it is not there; None where the engine lacks the model, which is said."""
    if variant.flags is None:
        return source
    out = folder / variant.name
    if not out.exists() and vlmcompress(["quantize", str(source), *variant.flags, "-o", str(out)]):
        return None
    return out


def requests(folder: Path, side: int, count: int, tokens: int, first: int) -> list[Request]:
    """Pairs of requests about images of their own, for one token and for many, behind one that is not measured."""
    noise, made = random.Random(first), []
    for number in range(-1, 2 * count):
        path = folder / f"{first + number}.png"
        small = Image.frombytes("RGB", (8, 8), noise.randbytes(192))
        small.resize((side, side), Image.Resampling.BICUBIC).save(path)
        image = {"type": "image_url", "image_url": {"url": path.resolve().as_uri()}}
        text = {"type": "text", "text": "What is at the top left?"}
        message = {"role": "user", "content": [image, text]}
        made.append(Request(str(number), [message], max_tokens=tokens if number % 2 else 1))
    return made


def processor_seconds() -> float:
    """Those of all processes below this one."""
    times = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return sum(time.user + time.system for time in times)


def measure(variant: Variant, model: Path, folder: Path, options: argparse.Namespace, turn: int) -> dict[str, float]:
    """Ask a variant; return what it needs for a prompt and for a token, in processor seconds, and the prompt's tokens."""
    marks: dict[str, tuple[float, int, int]] = {}
    clock: Callable[[engines.Answer], None] = lambda answer: marks.update(  # noqa: E731
        {answer.id: (processor_seconds(), answer.prompt_tokens, answer.output_tokens)}
    )
    questions = requests(folder, options.side, options.requests, options.tokens, 10**4 * turn)
    settings = Settings(max_num_seqs=1, max_model_len=2048 if options.model == "random" else -1)
    engines.get(variant.engine).answer(model, questions, media=folder, settings=settings, on_answer=clock)
    seconds = [0.0, 0.0]  # of requests for one token, of those for many
    produced = 0
    for number in range(2 * options.requests):
        (before, *_), (after, length, tokens) = (marks[str(number + step)] for step in (-1, 0))
        seconds[number % 2] += after - before
        produced += tokens - 1
    short, long = seconds
    return {"prompt": short / options.requests, "token": (long - short) / produced, "length": length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models and images")
    parser.add_argument("--model", default="random", choices=["random", "demo-llava", "demo-qwen"])
    parser.add_argument("--layers", type=int, default=24, help="of the random model")
    parser.add_argument("--side", type=int, help="of the images, in pixels")
    parser.add_argument("--requests", type=int, default=4, help="pairs in a turn")
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no turn after so many")
    options = parser.parse_args()
    options.side = options.side or {"random": 448, "demo-llava": 144, "demo-qwen": 96}[options.model]
    folder = options.folder / options.model
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    source = folder / "source" if options.model == "random" else ROOT / "eval/demo" / options.model
    if not source.exists():
        build_random(source, options.layers)
    chosen = {
        v: made for v in variants(ROOT / "eval/demo/data/qwen/calibration.parquet") if (made := make(v, source, folder))
    }
    turns = taken(chosen, images, options, folder / "turns.jsonl")
    rows = [
        row(variant, model, [turn for turn in turns if turn["variant"] == variant.name])
        for variant, model in chosen.items()
    ]
    head = ("engine", "bits", "files", "prompt tokens/s", "extremes", "tokens/s", "extremes")
    print(table([head, *(shown(row) for row in rows)]))
    length = max(turn.get("length", 0) for turn in turns)
    print(json.dumps({"model": options.model, "processor": processor(), "prompt_tokens": length, "rows": rows}))


def taken(chosen: dict[Variant, Path], images: Path, options: argparse.Namespace, path: Path) -> list[dict]:
    """The turns, which are kept in a file. One that failed has an `error`, and its variant no further turns."""
    turns = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done, began = {(turn["turn"], turn["variant"]) for turn in turns}, time.monotonic()
    for turn, (variant, model) in itertools.product(range(options.repeats), chosen.items()):
        failed = any(turn["variant"] == variant.name and "error" in turn for turn in turns)
        if failed or (turn, variant.name) in done:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            raise SystemExit("there are more turns to measure; run again")
        try:
            result = measure(variant, model, images, options, turn + 1)
        except UserError as error:
            result = {"error": str(error)}
        turns.append({"turn": turn, "variant": variant.name} | result)
        print(turns[-1], file=sys.stderr, flush=True)
        with path.open("a") as file:
            file.write(json.dumps(turns[-1]) + "\n")
    return turns


def processor() -> str:
    """The processor's name."""
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    return next(names, platform.processor())


def row(variant: Variant, model: Path, turns: list[dict]) -> dict:
    """The rates of a variant, turn by turn."""
    files = sum(file.stat().st_size for file in model.iterdir() if file.suffix in (".safetensors", ".gguf", ".bin"))
    about = {"engine": variant.engine, "bits": variant.bits, "bytes": files}
    if errors := [turn["error"] for turn in turns if "error" in turn]:
        return about | {"error": errors[0]}
    prompt = [turn["length"] / turn["prompt"] for turn in turns]
    token = [1 / turn["token"] if turn["token"] else 0.0 for turn in turns]
    return about | {"prompt": prompt, "token": token}


def shown(row: dict) -> tuple[str, ...]:
    """A row of the table."""
    cells = [row["engine"], str(row["bits"]), text_size(row["bytes"])]
    if "error" in row:
        return (*cells, row["error"], "", "", "")
    for rates in (row["prompt"], row["token"]):
        slowest, fastest = min(rates), max(rates)
        clear = 0 < fastest < 2 * slowest  # else the clock's ticks of 10 ms hide it
        cells += [f"{statistics.median(rates):.0f}", f"{slowest:.0f} to {fastest:.0f}"] if clear else ["", "not clear"]
    return tuple(cells)


if __name__ == "__main__":
    main()
