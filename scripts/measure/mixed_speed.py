#!/usr/bin/env python
"""Speed of mixed traffic: requests per second and time to the first token with tokens on demand, all served in vLLM.

    scripts/measure/mixed_speed.py WORK    # about 30 minutes on two quiet cores; prints a table and one JSON object

A LLaVA of 0.13 B random parameters whose images are 1,024 visual tokens, in LLaVA-1.5's proportions, is sent demo-llava's test
questions in their mixture of ten kinds, by `vlmcompress bench`: the original with all tokens and the checkpoint with
`coverage:0.5,merge=nearest,keep_max=1` in turns. Shares by kind are those of `mixed_traffic.py` (eval/mixed.json).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import numpy as np
from pyarrow import parquet

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "eval/demo/demo-llava"
SIDE, PATCH = 32, 14
TEXT = {"hidden_size": 512, "intermediate_size": 2432, "num_hidden_layers": 28, "num_attention_heads": 8}
TEXT |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}
VISION = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 13, "num_attention_heads": 3}
VISION |= {"patch_size": PATCH, "image_size": PATCH * SIDE}
REDUCER = "coverage:0.5,merge=nearest,keep_max=1"
LOADS = {"one client": ("closed:1", 6), "12 clients": ("closed:12", 12)}


def build(folder: Path) -> Path:
    """Write the model, with demo-llava's tokenizer and chat template."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"] |= TEXT
    config["vision_config"] |= VISION
    config["image_seq_length"] = SIDE * SIDE
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    tower = "vision_tower."
    tensors = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    processor = json.loads((DEMO / "processor_config.json").read_text())
    processor["patch_size"] = PATCH
    for key in ("size", "crop_size"):
        processor["image_processor"][key] = {"height": PATCH * SIDE, "width": PATCH * SIDE}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def rows(work: Path, count: int, shares: dict[str, float]) -> Path:
    """A file of test questions in their mixture, in an order of their own, each with the share of its kind."""
    from vlmcompress.models.data import bundled_data

    source = bundled_data(DEMO, "test")
    assert source is not None
    table = parquet.read_table(source)
    table = table.take(np.random.default_rng(0).permutation(table.num_rows)[:count])
    keep = [shares[kind] for kind in table["family"].to_pylist()]
    file = work / "rows.parquet"
    parquet.write_table(table.append_column("keep", [keep]), file)
    return file


def bench(work: Path, model: Path, out: Path, load: tuple[str, int], shares: dict[str, float]) -> dict[str, Any]:
    """The results of one bench."""
    data = rows(work, 200, shares)
    command = [
        "bench",
        str(out),
        "--baseline",
        str(model),
        "--load",
        load[0],
        "--requests",
        str(load[1]),
        "--data",
        str(data),
    ]
    command += ["--out-tokens", "16", "--repeats", "3", "--max-model-len", "2400", "--json", "--", "--dtype", "float32"]
    command += ["--max-num-seqs", "16", "--no-enable-prefix-caching", "--mm-processor-cache-gb", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "vlmcompress", *command], stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Measure and print."""
    work = Path(sys.argv[1])
    work.mkdir(parents=True, exist_ok=True)
    model, out = work / "model", work / "out"
    if not (model / "processor_config.json").is_file():
        build(model)
    if not out.is_dir():
        command = ["quantize", str(model), "--scheme", "none", "--reduce", REDUCER, "-o", str(out)]
        subprocess.run([sys.executable, "-m", "vlmcompress", *command], check=True)
    measured = [row for row in json.loads((ROOT / "eval/mixed.json").read_text()) if row["model"] == "llava"]
    policies = {"half, for all": dict.fromkeys(measured[0]["shares"], 0.5), "on demand": measured[0]["shares"]}
    results: dict[str, Any] = (
        json.loads((work / "results.json").read_text()) if (work / "results.json").exists() else {}
    )
    for name, load in LOADS.items():
        for policy, shares in policies.items():
            if f"{name}, {policy}" in results:
                continue
            results[f"{name}, {policy}"] = bench(work, model, out, load, shares)
            (work / "results.json").write_text(json.dumps(results, indent=1))
            print(name, policy, file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
