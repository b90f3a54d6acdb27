#!/usr/bin/env python
"""Time and memory of quantizing a model, next to llm-compressor and auto-round, as whole processes on one core.

    scripts/measure/peers.py --work DIR --only NAME --layers 4    makes a model there and quantizes it with each, in turn
    scripts/measure/peers.py --render                             prints the docs' table, from eval/peers.json

The model has decoder blocks of Qwen2.5-0.5B's shapes (`--layers`; 24 make the whole) after a tower of 8 small blocks, with
random weights. Each process loads it, reads the same 16 samples with images (but for FP8 and RTN), quantizes the decoder's
linear layers and writes a checkpoint. llm-compressor runs as its examples do, with its presets' names. Memory is the
anonymous part of the resident set, looked at twenty times a second. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from process_cost import process_cost

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "peers.json"
SAMPLES = 16
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT))

DATA_FREE = ("fp8", "rtn")
OURS = {
    "fp8": ["--scheme", "fp8"],
    "rtn": ["--scheme", "rtn", "--set", "options.symmetric=true"],
    "gptq": ["--scheme", "gptq", "--set", "options.symmetric=true"],
    "gptq-plus": ["--scheme", "gptq-plus", "--set", "options.symmetric=true"],
    "awq": ["--scheme", "awq"],
}
ROWS = {  # a row of the table: the peer's process, and ours that are compared with it
    "llm-compressor FP8_DYNAMIC": ["fp8"],
    "llm-compressor GPTQ W4A16": ["gptq", "gptq-plus"],
    "llm-compressor AWQ W4A16_ASYM": ["awq"],
    "auto-round RTN W4A16": ["rtn"],
}


def write_model(folder: Path, layers: int) -> None:
    """Write a checkpoint of so many decoder blocks."""
    import torch
    from gpu import shapes
    from transformers import AutoModelForImageTextToText

    full = shapes.FULL["qwen2.5-vl-7b"]
    text = {**full.text, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": layers}
    text |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [8, 12, 12]}
    sizes = {"depth": 8, "hidden_size": 640, "intermediate_size": 1708, "num_heads": 8, "out_hidden_size": 896}
    shape = shapes.Shape("qwen2_5_vl", text, {**full.vision, **sizes, "fullatt_block_indexes": [7]}, full.patch)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(shapes.config(shape), dtype=torch.bfloat16)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = shapes.END, shapes.PAD
    model.save_pretrained(folder)
    shapes.processor(shape).save_pretrained(folder)


def peer(name: str, model: Path, data: Path, out: Path) -> None:
    """Quantize with llm-compressor or auto-round, in this process."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if name.startswith("auto-round"):
        from auto_round import AutoRound

        AutoRound(str(model), scheme="W4A16", iters=0, disable_opt_rtn=True, device_map="cpu").quantize_and_save(
            output_dir=str(out), format="auto_round"
        )
        return
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    from vlmcompress.models.data import load_samples

    IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None  # raises where there is no accelerator
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype="auto")
    processor = AutoProcessor.from_pretrained(model)
    method, preset = name.split()[1], name.split()[-1]
    options: dict[str, Any] = {"targets": "Linear", "scheme": preset, "ignore": ["re:.*lm_head", "re:.*visual.*"]}
    modifiers: list[Any] = [GPTQModifier(**options)] if method == "GPTQ" else [QuantizationModifier(**options)]
    if method == "AWQ":
        modifiers = [AWQModifier(), *modifiers]
    run: dict[str, Any] = {"model": loaded, "processor": processor, "recipe": modifiers}
    if method in ("GPTQ", "AWQ"):
        rows = []
        for sample in load_samples(data, samples=SAMPLES, seed=0):
            content = [{"type": "image"}, {"type": "text", "text": sample.question}]
            turns = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": sample.answer}]},
            ]
            text = processor.apply_chat_template(turns)
            rows.append(dict(processor(text=[text], images=list(sample.images), return_tensors="pt")))
        loader = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=lambda batch: batch[0])
        run |= {"dataset": loader, "num_calibration_samples": len(rows)}
        run |= {"sequential_targets": ["Qwen2_5_VLDecoderLayer"]}
    oneshot(**run)
    loaded.save_pretrained(out, save_compressed=True)
    processor.save_pretrained(out)


def measure(command: list[str], out: Path) -> dict[str, float]:
    """What a process costs (`process_cost`), and the bytes of weights that it wrote to `out`."""
    shutil.rmtree(out, ignore_errors=True)
    cost = process_cost(command, ROOT)
    weights = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
    if not weights:
        raise SystemExit(f"{command} wrote no weights")
    shutil.rmtree(out)
    processor = cost["user"] + cost["system"]
    return {"seconds": cost["seconds"], "processor": processor, "anonymous": cost["anonymous"], "written": weights}


def render(results: dict[str, list[dict[str, float]]]) -> str:
    """The docs' table: medians of a process's runs; of ours also how many times less they take, lowest to highest."""
    lines = [
        "| process | blocks | processor time | memory at the peak |",
        "|---|---|---|---|",
    ]
    columns = (
        ("layers", "", 1),
        ("processor", " s", 1),
        ("anonymous", " GB", 1e9),
    )
    for name, ours in ROWS.items():
        for row in (name, *ours) if name in results else ():
            cells = []
            for key, unit, scale in columns:
                value = statistics.median(run[key] for run in results[row]) / scale
                text = f"{value:.{2 if scale > 1 else 0}f}{unit}"
                if row != name and key in ("processor", "anonymous"):
                    pairs = zip(results[name], results[row], strict=True)
                    ratios = sorted(theirs[key] / run[key] for theirs, run in pairs)
                    times = dict.fromkeys(f"{ratio:.1f}" for ratio in (ratios[0], ratios[-1]))
                    text += f" ({' to '.join(times)} times less)"
                cells.append(text)
            lines.append(f"| {row if row == name else f'`{row}`'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render; `--peer` is one process of a peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="a place for 5 GB; models are kept there")
    parser.add_argument("--layers", type=int, default=24, help="decoder blocks of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(ROWS), help="peers, each of which is run next to ours")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return peer(args.peer[0], *map(Path, args.peer[1:]))
    results: dict[str, list[dict[str, float]]] = json.loads(RESULTS.read_text())
    if not args.render:
        if args.work is None:
            parser.error("--work DIR is needed")
        from gpu import shapes
        from gpu.part import Place

        model, out = args.work / f"bf16-{args.layers}", args.work / f"out-{os.getpid()}"
        if not (model / "config.json").is_file():
            shutil.rmtree(model, ignore_errors=True)
            write_model(model, args.layers)
        data = shapes.calibration(Place(args.work, False))
        for name in args.only:
            results |= {row: [] for row in (name, *ROWS[name])}
            for number in range(args.rounds):
                for row in (name, *ROWS[name]):
                    command = [sys.executable, __file__, "--peer", row, str(model), str(data), str(out)]
                    if row in OURS:
                        command = ["vlmcompress", "quantize", str(model), "-o", str(out)]
                        command += OURS[row]
                        command += [] if row in DATA_FREE else ["--calib", str(data), "--samples", str(SAMPLES)]
                    results[row].append({"layers": args.layers, **measure(command, out)})
                    print(number + 1, row, results[row][-1], file=sys.stderr)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
