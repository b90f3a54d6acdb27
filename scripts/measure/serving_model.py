"""Make checkpoints for `bench_serving.py`: one model of random weights, quantized or not, with or without a reducer.

LLaVA-1.5's shape at about 0.5 B parameters, with its proportions: the tower has a twentieth of the language model's
parameters (7B: 0.30 of 6.7 billion). Images of 448 x 448 pixels are 1,024 visual tokens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vlmcompress.models.data.sources import bundled_data
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "eval/demo/demo-llava"  # whose tokenizer and chat template it has
SIDE = 32  # visual tokens down and across
PATCH = 14
TEXT = {
    "hidden_size": 1024,
    "intermediate_size": 4864,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
VISION = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 13,  # features are taken before the last one
    "num_attention_heads": 6,
    "patch_size": PATCH,
    "image_size": PATCH * SIDE,
}


@dataclass(frozen=True)
class Variant:
    """A checkpoint. `scheme`: bf16, int8, or rtn, quickly made in the 4-bit format of awq and gptq. `reduce`: "" for none."""

    scheme: str
    reduce: str = ""

    def __str__(self) -> str:
        return f"{self.scheme} {self.reduce or 'full'}"


def build(folder: Path, layers: int) -> None:
    """Write the unquantized model with all tokens."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    from vlmcompress import models

    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"] |= TEXT | {"num_hidden_layers": layers}
    config["vision_config"] |= VISION
    config["image_seq_length"] = SIDE * SIDE
    torch.manual_seed(0)
    with models.quiet_transformers():
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    tower = "vision_tower."  # the hub's checkpoints and vLLM say vision_tower.vision_model
    tensors = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    processor = json.loads((DEMO / "processor_config.json").read_text())
    processor["patch_size"] = PATCH
    for key in ("size", "crop_size"):
        processor["image_processor"][key] = {"height": PATCH * SIDE, "width": PATCH * SIDE}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def prepare(variant: Variant, work: Path, layers: int) -> Path:
    """Return the folder of a variant's checkpoint, which is made if it isn't there."""
    folder = work / f"{layers}" / re.sub(r"[ :/]", "-", str(variant))
    if (folder / "config.json").is_file():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if variant.reduce:
        _with_reducer(prepare(Variant(variant.scheme), work, layers), variant.reduce, partial)
    elif variant.scheme == "bf16":
        build(partial, layers)
    else:
        full = prepare(Variant("bf16"), work, layers)
        _quantize(full, variant.scheme, partial)
    partial.rename(folder)
    return folder


def _with_reducer(full: Path, reduce: str, folder: Path) -> None:
    """Write the checkpoint of `--scheme none --reduce`, with the weights linked instead of copied."""
    folder.mkdir()
    for file in full.iterdir():
        if file.is_file() and file.name != "config.json":
            os.link(file, folder / file.name)
    config = reducer_block.config_with_reducer(json.loads((full / "config.json").read_text()), parse_reducer(reduce))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _quantize(full: Path, scheme: str, folder: Path) -> None:
    command = [sys.executable, "-m", "vlmcompress", "quantize", str(full), "--scheme", scheme, "-o", str(folder)]
    data = [] if scheme == "rtn" else ["--calib", str(bundled_data(DEMO, "calibration")), "--samples", "2"]
    subprocess.run([*command, *data], check=True)
