#!/usr/bin/env python
"""One measurement of `scripts/measure/bench_compress.py`, in a process of its own; prints one JSON object.

scripts/measure/bench_contender.py build FOLDER --shape 0.3b
scripts/measure/bench_contender.py forward|calibrate|gptq|awq|stock-gptq|stock-awq FOLDER --samples 16 --tokens 256
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary
    "tiny": (256, 512, 4, 4, 2, 512),
    "135m": (576, 1536, 30, 9, 3, 8192),
    "0.3b": (1024, 2816, 24, 16, 4, 8192),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}


def build(shape: str, layers: int | None, folder: Path) -> None:
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
    from vlmcompress import models, quantizers
    from vlmcompress.calibration.block_store import BlockStore
    from vlmcompress.calibration.solve import QuantMethod
    from vlmcompress.runs.quantize_blocks import quantize_blocks

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

    from vlmcompress.calibration.block_inputs import bucket_by_length, collate
    from vlmcompress.calibration.devices import float_products

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

    from vlmcompress.calibration.gradient_pass import gradients as gradient_pass
    from vlmcompress.models import decoder_blocks
    from vlmcompress.runs.calibrate import collect

    class Nowhere:
        def has(self, _layer: int) -> bool:
            return False

        def save(self, *_: object) -> None:
            pass

    with torch.no_grad():
        if gradients:
            gradient_pass(vlm, rows)
        collect(vlm, decoder_blocks(vlm.model, vlm.spec), rows, Nowhere())


def measure(contender: str, folder: Path, count: int, tokens: int, group: int) -> dict:
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
        from vlmcompress.calibration.gradient_pass import gradients

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


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    what = "build, forward, forward-batched, forward-fast, calibrate, calibrate-gradients, gradients, stock-METHOD, METHOD or"
    parser.add_argument("what", help=f"{what} METHOD-BALANCE")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--group", type=int, default=128)
    args = parser.parse_args()
    if args.what == "build":
        build(args.shape, args.layers, args.folder)
    else:
        print(json.dumps(measure(args.what, args.folder, args.samples, args.tokens, args.group)))


if __name__ == "__main__":
    main()
