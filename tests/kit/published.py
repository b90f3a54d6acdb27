"""Tiny checkpoints with what engines take for granted, as published ones have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.kit.float_models import edit
from vlmcompress.models import read_config, spec_for

ENDS = [258, 257]  # `<|im_end|>`, and `<|endoftext|>`, which llama.cpp takes for an end by its name
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}  # in another order in ggml than in transformers
LARGE = {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
LARGE |= {"final_logit_softcapping": 30.0}
VARIANTS: dict[str, dict] = {
    # by the width llama.cpp knows that an image's tokens see those before them alone; large weights would be too sure of one
    "gemma4": {"hidden_size": 1536, "initializer_range": 0.002},
    "gemma4-moe": LARGE,  # as 26B-A4B
    "qwen3-5": HEADS,
    "qwen3-5-moe": HEADS,
    "qwen3-vl-moe": {"mlp_only_layers": ()},
}
"""Values of `tests.kit.tiny.build` for llama.cpp."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # as Ministral 3 has it
EPS = {"text_config": {"rms_norm_eps": 1e-12}}  # llama.cpp's `qwen2vl` of 2026-10 does not read it and takes 0
CONFIGS: dict[str, dict] = {
    "mistral3": {"text_config": {"rope_parameters": YARN}},
    "qwen2-vl": EPS,
    "qwen2-5-vl": EPS | {"vision_config": {"window_size": 112}},
}
SPLITS = {"idefics3": ["\n\n"]}  # a token that llama.cpp's processor of the family asks for by name
MLX: dict[str, dict[str, Any]] = {"mistral3": {"vision_config": {"hidden_act": "silu"}}}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
TOKENS, CONTEXT = 512, 8192
TILES = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]  # the usual choice, of tiles of 56 pixels
LIMITS: dict[str, dict[str, Any]] = {
    "cohere2-vision": {"max_patches": 12},
    "gemma4": {"max_soft_tokens": 280},
    "gemma4-moe": {"max_soft_tokens": 280},
    "gemma4-unified": {"max_soft_tokens": 280},
    "granite4-vision": {"image_grid_pinpoints": TILES},
    "idefics3": {"size": {"longest_edge": 224}},
    "internvl": {"max_patches": 12},
    "internvl3-5": {"max_patches": 12},
    "lfm2-vl": {
        "max_image_tokens": 256,
        "min_image_tokens": 64,
        "max_num_patches": 1024,
        "max_tiles": 10,
        "tile_size": 512,
    },
    "llava-next": {"image_grid_pinpoints": TILES},
    "llava-onevision": {"image_grid_pinpoints": TILES},
    "mistral3": {"size": {"longest_edge": 1540}},
}
"""Settings of image processors for `with_real_limits`, where they are no limits of pixels."""
POSITIONS = 1024  # rows of Gemma 4's tables; a strip of 64 x 8960 needs some 600


def for_vllm(family: str, folder: Path) -> Path:
    """A tiny checkpoint, with what vLLM reads of config.json beyond transformers, as `quantize` writes it."""
    config = read_config(folder)
    (folder / "config.json").write_text(json.dumps(spec_for(config).completed(config)))
    return folder


def for_llamacpp(family: str, folder: Path) -> Path:
    """A tiny checkpoint, with what llama.cpp counts on."""
    edit(folder, "generation_config.json", eos_token_id=ENDS)
    edit(folder, "config.json", **CONFIGS.get(family, {}))
    _add_tokens(folder / "tokenizer.json", SPLITS.get(family, []))
    return folder


def _add_tokens(path: Path, tokens: list[str]) -> None:
    content = json.loads(path.read_text())
    first = 1 + max(entry["id"] for entry in content["added_tokens"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [{"id": first + i, "content": token, **plain} for i, token in enumerate(tokens)]
    path.write_text(json.dumps(content))


def as_llama_cpp_computes(family: str, model) -> None:
    """What llama.cpp of 2026-10 does otherwise: LLaVA's CLS token comes after the patches, and the features are all but the
    first token's."""
    if family == "llava":
        embeddings = model.model.vision_tower.embeddings
        original = embeddings.forward
        embeddings.forward = lambda *args, **kwargs: original(*args, **kwargs).roll(-1, 1)


def for_openvino(family: str, folder: Path) -> Path:
    """A tiny checkpoint, with what OpenVINO's pipeline counts on."""
    if family == "internvl":
        edit(folder, "processor_config.json", image_processor={"max_patches": 12})
    if family.startswith("llava"):  # the pipeline writes a line break after an image, as LLaVA's own template does
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text().replace("<image>", "{{ '<image>\\n' }}"))
    return folder


def for_mlx(family: str, folder: Path) -> Path:
    """A tiny checkpoint, with what mlx-vlm takes for granted."""
    edit(folder, "config.json", **MLX.get(family, {}))
    if family == "internvl3-5":
        edit(folder, "processor_config.json", image_processor=IMAGENET)
    return folder


def with_real_limits(family: str, folder: Path) -> Path:
    """A tiny checkpoint whose processor makes hundreds of tokens of a large image: up to `TOKENS`, or the usual tiles."""
    processor = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    limits, config = dict(LIMITS.get(family, {})), dict[str, Any]()
    if merge := processor.get("merge_size"):
        frames = 2 if processor["image_processor_type"].startswith("Glm") else 1  # GLM counts the pixels of both
        area = (processor["patch_size"] * merge) ** 2 * frames
        limits["size"] = {"shortest_edge": 4 * area, "longest_edge": TOKENS * area}
    if tokens := limits.get("max_soft_tokens"):
        edit(folder, "processor_config.json", image_seq_length=tokens)
        read_by_vllm, rows = ("default_output_length", "position_embedding_size")
        if family == "gemma4-unified":
            read_by_vllm, rows = ("num_soft_tokens", "mm_posemb_size")
        config["vision_config"] = {read_by_vllm: tokens, rows: POSITIONS}
        tensors = load_file(folder / "model.safetensors")
        name = next(
            name for name in tensors if name.endswith(("position_embedding_table", "vision_embedder.pos_embedding"))
        )
        axis = tensors[name].shape.index(2) ^ 1  # x and y come before the rows; without a tower after them
        copies = [tensors[name].roll(shift, axis) for shift in range(POSITIONS // tensors[name].shape[axis])]
        save_file(tensors | {name: torch.cat(copies, axis)}, folder / "model.safetensors", metadata={"format": "pt"})
    if "image_grid_pinpoints" in limits:
        config["image_grid_pinpoints"] = TILES
    if family == "mistral3":
        config["vision_config"] = {"image_size": 1540}
    text = {"max_position_embeddings": CONTEXT}
    inner = json.loads((folder / "config.json").read_text())
    edit(folder, "processor_config.json", image_processor=limits)
    edit(folder, "config.json", **config, **({"text_config": text} if "text_config" in inner else text))
    edit(folder, "tokenizer_config.json", model_max_length=CONTEXT)
    return folder
