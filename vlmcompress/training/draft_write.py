"""Write a trained draft head as the folder that vLLM loads: weights, config, facts, a card and a launch file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vlmcompress import models
from vlmcompress.export import draft_folder, draft_images, launch_files, manifest
from vlmcompress.export.launch import REGISTRY
from vlmcompress.training import eagle3, medusa
from vlmcompress.training.draft_lessons import Lessons
from vlmcompress.training.eagle3 import DraftShape
from vlmcompress.utils import hub, json_files


def write_draft(folder: Path, lessons: Lessons, best: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the draft's files into an empty folder."""
    tensors = {name: tensor.contiguous() for name, tensor in best.items()}
    total, ids = len(lessons.head), lessons.vocabulary.cpu()
    if len(ids) < total and lessons.kind == "medusa":
        tensors["token_map"] = ids
    elif len(ids) < total:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(total, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / draft_folder.WEIGHTS, {"format": "pt"})
    model = lessons.target.model
    config = medusa.config(lessons.shape, len(lessons.head), model) if lessons.kind == "medusa" else _eagle3(lessons)
    target = lessons.target.path
    record = json_files.read(target / manifest.MANIFEST) if (target / manifest.MANIFEST).is_file() else {}
    served = launch_files.facts(models.read_config(target), record, facts["target"].get("name") or target.name)
    texts = REGISTRY.get("vllm").drafted(served, lessons.kind, eagle3.STEPS)
    texts = {f"{launch_files.FOLDER}/{place}": text for place, text in texts.items()}
    draft_folder.write(folder, config, facts, texts)


def _eagle3(lessons: Lessons) -> dict[str, Any]:
    """The config.json of an EAGLE-3 draft, in the form of the `speculators` library."""
    shape, target = lessons.shape, lessons.target.model.config
    assert isinstance(shape, DraftShape)
    dtype, images = str(lessons.target.model.dtype).removeprefix("torch."), lessons.images
    layer = {
        "model_type": "llama",
        "vocab_size": len(lessons.head),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": target.get_text_config().max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(shape.taps),  # vLLM takes three for granted where this is missing
        "dtype": dtype,
        **({} if images.plain else {draft_images.KEY: images.settings()}),
    }
    return {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3" if images.plain else draft_images.SPECULATOR,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": eagle3.STEPS}],
            "verifier": {
                "name_or_path": hub.shown(lessons.target.path),
                "architectures": list(target.architectures or []),
            },
        },
        "draft_vocab_size": shape.vocabulary,
        "target_hidden_size": shape.hidden,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "transformer_layer_config": layer,
        "dtype": dtype,
    }
