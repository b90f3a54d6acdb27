"""Write a demo model as a checkpoint that transformers and vLLM load, under the names that hub checkpoints have."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import ProcessorMixin

from .architectures import build_processor

# (name in memory, name on disk): the first prefix that fits is replaced.
RENAMES = {
    "qwen": (("model.language_model.", "model."), ("model.visual.", "visual.")),
    "llava": (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ),
}


def disk_name(kind: str, name: str) -> str:
    """The hub's name of a tensor."""
    for prefix, replacement in RENAMES[kind]:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name


def export(
    kind: str, model: nn.Module, tokenizer, folder: Path, card: str, processor: ProcessorMixin | None = None
) -> None:
    """Write the checkpoint to a temporary sibling in BF16, then put it in place. `processor`: by default the world's."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {disk_name(kind, k): v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors[disk_name(kind, "lm_head.weight")]
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "bfloat16"
        part.pop("_name_or_path", None)
    (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    model.generation_config.save_pretrained(temporary)
    (processor or build_processor(kind, tokenizer)).save_pretrained(temporary)
    (temporary / "README.md").write_text(card)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
