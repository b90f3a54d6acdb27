#!/usr/bin/env python
"""Compare the time of a sweep of some 50 settings with one quantization, on a random-weight Qwen2.5-VL of 0.3 B parameters.

The model has the shape of `bench_compress.py` and the processor of demo-qwen, so that the verbs run as users run them:
`calibrate` once, `sweep` on what it wrote, and `quantize` (GPTQ, without statistics), on random images of 256 visual tokens.
Each is a process of its own, start included; compared are processor times, which other work on the machine disturbs less than
the clock's. The last line is one JSON object.

    scripts/measure/bench_sweep.py                    24 blocks, 128 samples (as quantize takes by default)
    scripts/measure/bench_sweep.py --layers 6
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEMO = Path(__file__).parents[2] / "eval" / "demo"
SIZE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}


def build(folder: Path, layers: int) -> None:
    """Write the random checkpoint."""
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    source = DEMO / "demo-qwen"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    facts = json.loads((source / "config.json").read_text())
    facts["text_config"] |= SIZE | {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    facts["vision_config"]["out_hidden_size"] = SIZE["hidden_size"]
    (folder / "config.json").write_text(json.dumps(facts))
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("layernorm.weight"):
            parameter.data.copy_(torch.randn(parameter.shape).mul(0.7).exp())
    model.save_pretrained(folder)


def images(folder: Path, count: int, tokens: int) -> Path:
    """Write `count` calibration samples, each with an image of noise that becomes about `tokens` visual tokens."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    side = 16 * round(tokens**0.5)
    random = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        for i in range(count):
            Image.fromarray(random.integers(0, 256, (side, side, 3), np.uint8)).save(folder / f"{i}.png")
            row = {"id": str(i), "image": f"{i}.png", "question": "What is at the top left?", "answer": "a red square"}
            file.write(json.dumps(row) + "\n")
    return folder / "data.jsonl"


def timed(*arguments: object) -> dict[str, float]:
    """Run a verb and return its seconds, and the seconds of processor time of the process and its children."""
    command = [sys.executable, "-m", "vlmcompress", *map(str, arguments)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = {"seconds": round(time.perf_counter() - start, 2), "cpu_seconds": round(used, 2)}
    print(f"{arguments[0]:<10}{times}", flush=True)
    return times | ({"settings": len(json.loads(done.stdout)["points"])} if arguments[0] == "sweep" else {})


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="visual tokens of a sample")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model, stats = Path(place) / "model", Path(place) / "stats"
        build(model, args.layers)
        data = ("--calib", images(Path(place) / "images", args.samples, args.tokens), "--samples", args.samples)
        results: dict = {"layers": args.layers, "samples": args.samples, "visual_tokens": args.tokens}
        needs = "absmax,absmean,gram,gradient"
        results["calibrate"] = timed("calibrate", model, "-o", stats, "--needs", needs, *data)
        results["sweep"] = timed("sweep", stats, model, "--json")
        results["quantize"] = timed("quantize", model, "--scheme", "gptq", "-o", Path(place) / "out", *data)
        results["ratio"] = round(results["sweep"]["cpu_seconds"] / results["quantize"]["cpu_seconds"], 4)
        print(json.dumps(results))


if __name__ == "__main__":
    main()
