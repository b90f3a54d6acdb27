"""The head for multi-token prediction that Qwen3.5's published checkpoints have next to the model, under `mtp.`."""

from __future__ import annotations

import torch
import transformers as T

CONFIG = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}  # of the text config, as published


def head(model: T.PreTrainedModel, layer: int) -> dict[str, torch.Tensor]:
    """Random tensors of a head of one decoder block that is like block `layer` of the model, one with attention."""
    config = model.config.get_text_config()
    block = type(model.model.language_model.layers[layer])(config, layer).to(model.dtype)
    for parameter in block.parameters():
        if parameter.dim() > 2:  # fused experts, which come without values
            torch.nn.init.normal_(parameter, std=0.02)
    tensors = {f"layers.0.{name}": value for name, value in block.state_dict().items()}
    hidden = config.hidden_size
    for name, shape in {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
    }.items():
        tensors[f"{name}.weight"] = torch.randn(shape, dtype=model.dtype) / 10
    return {f"mtp.{name}": value for name, value in tensors.items()}
