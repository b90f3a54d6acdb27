#!/usr/bin/env python
"""Time, memory and output error of compressing a random-weight Qwen2.5-VL: a plain forward pass, stock llm-compressor, ours.

Every measurement is a process of its own (so that peak memory is its own), and the contenders take turns within one run:
machines drift, ratios hold. Loading the model is left out of the times. The output error is the same for all: the
relative squared change of the last hidden state on held-out samples, after compression, weights only. Ratios are of
processor time, which other work on the machine disturbs less than the clock's.

Random weights have no salient channels, so the norms get a log-normal gain per channel; AWQ has something to find then.

    scripts/measure/bench_compress.py                        0.3 B parameters, for a CPU
    scripts/measure/bench_compress.py --shape 7b             for a GPU
    scripts/measure/bench_compress.py --contenders forward gptq gradients gptq-ratio gptq-auto      what a balance costs
    scripts/measure/bench_compress.py --contenders forward-batched forward-fast calibrate calibrate-gradients      calibration
    scripts/measure/bench_compress.py --shape 135m --group 64    30 narrow blocks
    scripts/measure/bench_compress.py --sweep                ours only: time against samples and against layers

Stock AWQ pins host memory for an accelerator and dies without one; that step is switched off here. Nothing else is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

CONTENDERS = ("forward", "stock-gptq", "gptq", "stock-awq", "awq")
CALIBRATING = ("forward-batched", "forward-fast", "calibrate", "calibrate-gradients")
WEIGHTED = ("gradients", "gptq-ratio", "gptq-auto", "gptq-mbq", "mbq")


SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary
    "tiny": (256, 512, 4, 4, 2, 512),
    "135m": (576, 1536, 30, 9, 3, 8192),
    "0.3b": (1024, 2816, 24, 16, 4, 8192),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}


def write_model(shape: str, layers: int | None, folder: Path) -> None:
    """Write a checkpoint of the given shape; the vision tower is small, as its weights are not what is compressed."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    hidden, intermediate, depth, heads, kv_heads, vocabulary = SHAPES[shape]
    half = hidden // heads // 2
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers or depth,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [1],
        },
        image_token_id=2,
        video_token_id=3,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data.copy_(torch.randn(parameter.shape).mul(0.7).exp())
    model.save_pretrained(folder)


def samples(count: int, tokens: int, seed: int) -> list[dict]:
    """Make encoded samples: an image of random patches, about two thirds of the tokens; the last four are an answer."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = []
    side = 2 * max(1, int((tokens * 2 / 3) ** 0.5))
    visual = (side // 2) ** 2
    for _ in range(count):
        text = torch.randint(8, 500, (max(4, tokens - visual - 2),), generator=generator)
        ids = torch.cat([torch.tensor([4]), torch.full((visual,), 2), torch.tensor([5]), text])[None]
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": (ids == 2).long(),
                "pixel_values": torch.randn(side * side, 1176, generator=generator),
                "image_grid_thw": torch.tensor([[1, side, side]]),
                "modality": torch.cat([torch.where(ids == 2, 2, 1)[:, :-4], torch.full((1, 4), 3)], 1).to(torch.uint8),
            }
        )
    return rows


def _load(folder: Path):
    import llmcompressor  # noqa: F401  # not part of the times
    import torch
    from loguru import logger

    from vlmcompress import models
    from vlmcompress.models import VLM

    logger.remove()
    with models.quiet():
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval().requires_grad_(False)
    spec = models.spec_for(models.read_config(folder))
    return VLM(model.to("cuda" if torch.cuda.is_available() else "cpu"), _tokenizer(), spec, folder)


def _tokenizer():
    """Any tokenizer: llm-compressor asks for one although the samples are encoded."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")), pad_token="x")


def run_ours(vlm, rows: list[dict], method: str, options: dict) -> None:
    """Run the part of `vlmcompress quantize` between loading and writing."""
    from vlmcompress import models
    from vlmcompress.quantization import schemes as quantizers
    from vlmcompress.quantization.blocks import quantize_blocks
    from vlmcompress.quantization.calibration.block_store import BlockStore
    from vlmcompress.quantization.calibration.solve import QuantMethod

    module = quantizers.REGISTRY.get(method)
    groups = models.resolve(vlm.model, vlm.spec)
    layers = models.decoder_layers(vlm.model, vlm.spec)
    blocks = [[group for group in groups if group.layer == layer] for layer in range(len(layers))]
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(Path(folder) / "store", "bench", resume=False)
        quantize_blocks(vlm, blocks, QuantMethod(module, module.Options(**options)), rows, store)


def run_forward(vlm, rows: list[dict], kind: str) -> None:
    """Run the plain language model: sample by sample as transformers does, in batches, or in batches and float32."""
    import torch

    from vlmcompress.models.devices import float_products
    from vlmcompress.quantization.calibration.block_inputs import bucket_by_length, collate

    alone = [[index] for index in range(len(rows))]
    wide = float_products(vlm.model) if kind == "forward-fast" else contextlib.nullcontext()
    with torch.inference_mode(), wide:
        for batch in alone if kind == "forward" else bucket_by_length(rows):
            inputs = {k: v.to(vlm.model.device) for k, v in collate([rows[i] for i in batch]).items()}
            inputs.pop("modality")
            vlm.model.model(**inputs)


def run_calibrate(vlm, rows: list[dict], gradients: bool) -> None:
    """Run what `vlmcompress calibrate` runs between loading and writing: all statistics, with gradients if asked for."""
    import torch

    from vlmcompress.models import decoder_blocks
    from vlmcompress.quantization.calibrate import collect
    from vlmcompress.quantization.calibration.gradient_pass import gradients as gradient_pass

    class Nowhere:
        def has(self, _layer: int) -> bool:
            return False

        def save(self, *_: object) -> None:
            pass

    with torch.no_grad():
        if gradients:
            gradient_pass(vlm, rows)
        collect(vlm, decoder_blocks(vlm.model, vlm.spec), rows, Nowhere())


def measure_here(contender: str, folder: Path, count: int, tokens: int, group: int) -> dict:
    """Measure seconds, peak memory and output error of one contender."""
    import torch

    vlm = _load(folder)
    rows = samples(count, tokens, seed=1)
    held_out = samples(2, tokens, seed=2)
    device = vlm.model.device

    def hidden() -> list:
        keep = [{k: v.to(device) for k, v in row.items() if k != "modality"} for row in held_out]
        with torch.inference_mode():
            return [vlm.model.model(**row).last_hidden_state.float() for row in keep]

    before = hidden()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start, start_cpu = time.perf_counter(), time.process_time()
    if contender.startswith("forward"):
        run_forward(vlm, rows, contender)
    elif contender.startswith("calibrate"):
        run_calibrate(vlm, rows, contender == "calibrate-gradients")
    elif contender.startswith("stock"):
        from stock_methods import run_stock

        method = contender.removeprefix("stock-")
        run_stock(vlm, rows, method, group_size=group, symmetric=method == "gptq")
    elif contender == "gradients":
        from vlmcompress.quantization.calibration.gradient_pass import gradients

        gradients(vlm, rows)
    else:
        method, _, balance = contender.partition("-")
        options = {"group_size": group} | ({"symmetric": False} if method == "awq" else {})
        run_ours(vlm, rows, method, options | ({"balance": balance} if balance else {}))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    after = hidden()
    error = sum((a - b).square().sum() for a, b in zip(after, before, strict=True)) / sum(
        b.square().sum() for b in before
    )
    result = {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "peak_mb": round(peak / 1024),
        "loaded_mb": round(resident / 1024),
        "error": float(error),
    }
    if torch.cuda.is_available():
        result["gpu_peak_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return result


def in_a_process(*arguments: object) -> str:
    """Run this script with arguments and return what it printed."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def build(folder: Path, shape: str, layers: int | None) -> None:
    """Write the random checkpoint."""
    in_a_process("--one", "build", folder, "--shape", shape, *(("--layers", layers) if layers else ()))


def measure(name: str, folder: Path, args: argparse.Namespace, samples: int | None = None) -> dict:
    """Run one measurement in a process of its own."""
    flags = ("--samples", samples or args.samples, "--tokens", args.tokens, "--group", args.group)
    return json.loads(in_a_process("--one", name, folder, *flags).strip().splitlines()[-1])


def compare(args: argparse.Namespace, folder: Path) -> dict:
    """Measure all contenders in turn, `repeats` times; medians and ratios."""
    build(folder, args.shape, args.layers)
    measured: dict[str, list[dict]] = {name: [] for name in args.contenders}
    for turn in range(args.repeats):
        for name in args.contenders:
            measured[name].append(measure(name, folder, args))
            print(f"{turn + 1}/{args.repeats} {name:<12}{measured[name][-1]}", flush=True)
    table = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in measured.items()
    }
    print(f"\n{'':<12}{'seconds':>10}{'CPU s':>10}{'/forward':>10}{'peak MB':>10}{'output error':>15}")
    floor = next(row["cpu_seconds"] for name, row in table.items() if name.startswith("forward"))
    for name, row in table.items():
        error = f"{row['error']:.6f}" if row["error"] else ""
        times = f"{row['seconds']:>10.1f}{row['cpu_seconds']:>10.1f}{row['cpu_seconds'] / floor:>10.1f}"
        print(f"{name:<12}{times}{row['peak_mb']:>10.0f}{error:>15}")
    summary = {
        "shape": args.shape,
        "layers": args.layers,
        "samples": args.samples,
        "tokens": args.tokens,
        "runs": table,
    }
    for ours in ("gptq", "awq"):
        stock = f"stock-{ours}"
        if {ours, stock} <= table.keys():
            summary[f"{ours}_speedup"] = round(table[stock]["cpu_seconds"] / table[ours]["cpu_seconds"], 2)
            summary[f"{ours}_error_ratio"] = round(table[ours]["error"] / table[stock]["error"], 3)
            summary[f"{ours}_peak_ratio"] = round(table[ours]["peak_mb"] / table[stock]["peak_mb"], 3)
    for name in {"calibrate", "calibrate-gradients"} & table.keys():
        for forward in {"forward", "forward-batched", "forward-fast"} & table.keys():
            summary[f"{name}_of_{forward}"] = round(table[name]["cpu_seconds"] / table[forward]["cpu_seconds"], 2)
    for name in set(WEIGHTED) & table.keys() if "gptq" in table else ():
        summary[f"{name}_of_gptq"] = round(table[name]["cpu_seconds"] / table["gptq"]["cpu_seconds"], 3)
    return summary


def sweep(args: argparse.Namespace, folder: Path) -> dict:
    """Measure ours over samples and layers: the time should grow linearly in both."""
    rows = []
    for layers, count in ((4, 8), (4, 16), (4, 32), (8, 8), (16, 8)):
        place = folder / f"layers-{layers}"
        if not place.exists():
            build(place, args.shape, layers)
        result = measure("awq", place, args, count)
        rows.append({"layers": layers, "samples": count, "cpu_seconds": result["cpu_seconds"]})
        print(rows[-1], flush=True)
    return {"shape": args.shape, "tokens": args.tokens, "sweep": rows}


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.3b")
    parser.add_argument("--layers", type=int, help="fewer or more decoder blocks than the shape has")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sample, two thirds of them visual")
    parser.add_argument("--group", type=int, default=128, help="columns that share a scale")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS + CALIBRATING + WEIGHTED, default=list(CONTENDERS)
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.one:
        what, folder = args.one[0], Path(args.one[1])
        if what == "build":
            write_model(args.shape, args.layers, folder)
        else:
            print(json.dumps(measure_here(what, folder, args.samples, args.tokens, args.group)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps((sweep if args.sweep else compare)(args, Path(folder))))


if __name__ == "__main__":
    main()
