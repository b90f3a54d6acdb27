"""What vLLM's own processor makes of prompts for reduced checkpoints, without an engine; runs where `engine_worker.py` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (144, 144, 3), dtype=np.uint8))
BLANK = Image.new("RGB", (144, 144), "white")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"folders": {name: folder}, "films": {name: folder}, "tiles": folder, "pixels": {name: folder}, "room": tokens}`
    -> findings.

    Of each of `folders` what becomes of prompts about `IMAGE`; under "films" what a prompt of `room` tokens holds of a video
    next to the largest image; under "tiles" how many tokens the largest image has; under "pixels" how many tokens of an
    image memory is reserved for, and how many the largest has that is nowhere flat.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    lengths = {name: prompts(folder) for name, folder in job["folders"].items()}
    lengths["films"] = {name: largest(folder, job["room"]) for name, folder in job["films"].items()}
    lengths["tiles"] = tiles(job["tiles"])
    lengths["pixels"] = {name: reserved(folder) for name, folder in job["pixels"].items()}
    return lengths


def made(folder: str, **settings: Any) -> Any:
    """The processor of a checkpoint."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    return MULTIMODAL_REGISTRY.create_processor(ModelConfig(folder, **settings))


def applied(processor: Any, prompt: list[int], media: dict[str, Any], **arguments: Any) -> Any:
    """What the processor makes of a prompt."""
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs

    inputs = ProcessorInputs(prompt, processor.info.parse_mm_data(media), hf_processor_mm_kwargs=arguments)
    return processor.apply(inputs, TimingContext(enabled=False))


def prompts(folder: str) -> dict[str, dict[str, Any]]:
    """One prompt, again, another, two about a blank image, some that set a share, one too
    long, and one of embeddings; and how many tokens of an image memory is reserved for."""
    from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item

    processor = made(folder, limit_mm_per_prompt={"image": 40}, enable_mm_embeds=True, max_model_len=1024)
    return {
        "plain": ask(processor, "what is red ?"),
        "again": ask(processor, "what is red ?"),
        "other": ask(processor, "how many ?"),
        "blank": ask(processor, "what is red ?", [BLANK]),
        "both": ask(processor, "what is red ?", [BLANK, IMAGE]),
        "more": ask(processor, "what is red ?", keep=0.75),
        "own share": ask(processor, "what is red ?", keep=0.5),
        "seven": ask(processor, "what is red ?", keep=7),
        "a thousand": ask(processor, "what is red ?", keep=1000),
        "too much": ask(processor, "what is red ?", keep=0.8),
        "reserved": get_mm_max_toks_per_item(processor, {"image": 1}, None)["image"],
        "long": ask(processor, "what ?", [IMAGE] * 30),
        "embeds": ask(processor, "what ?", torch.zeros(1, 81, 256)),
    }


def ask(processor: Any, text: str, images: Any = (IMAGE,), **arguments: Any) -> dict[str, Any]:
    """How many tokens a prompt gains by its images, and the first one's name in caches; or why it is refused."""
    tokenizer = processor.info.get_tokenizer()
    prompt = tokenizer.encode("<image>" * len(images) + text, add_special_tokens=False)
    media = images if isinstance(images, torch.Tensor) else list(images)
    try:
        out = applied(processor, prompt, {"image": media}, **arguments)
    except ValueError as error:
        return {"error": str(error)}
    return {"prompt": len(out["prompt_token_ids"]) - len(prompt), "name": out["mm_hashes"]["image"][0]}


def largest(folder: str, room: int) -> dict[str, Any]:
    """Frames and tokens of the longest video in `room` tokens; tokens of it next to the largest image, and of one
    frame more."""
    from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item

    processor, counts = made(folder, max_model_len=room), {"image": 1, "video": 1}
    info = processor.info
    prompt = info.get_tokenizer().encode(info.get_hf_processor().image_token + "<video>", add_special_tokens=False)
    image = Image.new("RGB", tuple(info.get_image_size_with_most_features()))

    def tokens(frames: int) -> int | str:
        try:
            out = applied(processor, prompt, {"image": image, "video": np.zeros((frames, 64, 64, 3), np.uint8)})
        except ValueError as error:
            return str(error)
        return len(out["prompt_token_ids"])

    frames, most = (
        info.get_num_frames_with_most_features(room, counts),
        get_mm_max_toks_per_item(processor, counts, None),
    )
    return {"frames": frames, "video": most["video"], "tokens": tokens(frames), "more": tokens(frames + 1)}


def reserved(folder: str) -> list[int]:
    """Tokens of an image that memory is reserved for, and those of a noisy image of the size with most."""
    from vllm.multimodal.encoder_budget import get_mm_max_toks_per_item

    processor = made(folder, limit_mm_per_prompt={"image": 1}, max_model_len=2048)
    info = processor.info
    width, height = info.get_image_size_with_most_features()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))
    prompt = info.get_tokenizer().encode(info.get_hf_processor().image_token, add_special_tokens=False)
    tokens = len(applied(processor, prompt, {"image": noise})["prompt_token_ids"]) - len(prompt) + 1
    return [get_mm_max_toks_per_item(processor, {"image": 1}, None)["image"], tokens]


def tiles(folder: str) -> dict[str, int]:
    """Tokens of the image that should have most, of the one of all sizes that has most, and of a square one."""
    info = made(folder, limit_mm_per_prompt={"image": 1}, max_model_len=1024).info

    def tokens(width: int, height: int) -> int:
        return info.get_num_image_tokens(image_width=width, image_height=height)

    return {
        "largest": tokens(*info.get_image_size_with_most_features()),
        "all": max(tokens(width, height) for width in range(1, 400, 5) for height in range(1, 400, 5)),
        "first": tokens(1153, 944),
    }
