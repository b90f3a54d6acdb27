"""Base of the engines of llama.cpp and OpenVINO, which take a prompt as text and its images separately.

The text is rendered here, with the checkpoint's own chat template, so that prompts equal those of the other engines:
llama.cpp's chat interface handles an image like a text part, and omits what the template writes around it.
"""

from __future__ import annotations

import importlib.metadata
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from vlmcompress.engines import media_file
from vlmcompress.utils.images import open_raster


def description(engine, name: str, package: str) -> dict:
    """An engine's description of itself."""
    version = importlib.metadata.version(package)
    longest, slots = engine.longest, engine.slots
    return {"name": name, "version": version, "device": "cpu", "max_model_len": longest, "max_num_seqs": slots}


def answers(engine, requests, job: dict):
    """Answer as many requests concurrently as the engine has slots, in order; a refused one yields an exception."""

    def answer(request: dict):
        try:
            return request["id"], engine.answer(request, job["settings"])
        except engine.REFUSALS as error:
            return request["id"], error

    with ThreadPoolExecutor(engine.slots) as pool:
        yield from pool.map(answer, requests)


class Rendered:
    """A checkpoint's family in the engine's format, and the processor that renders prompts.

    `longest` is the context length, `slots` the number of concurrent requests. `answer` returns an exception for a request
    that it refuses, or raises one of `REFUSALS`; any other raised exception means that the engine is broken.

    Args:
        job: see `worker`.
        format: its name in `quantize --format`.
        families: registry of the families in that format.
        files: names of files that the folder must have.

    Raises:
        ValueError: the folder has no checkpoint of that format.
    """

    REFUSALS: tuple[type[Exception], ...] = (Exception,)
    longest: int
    slots = 1

    def __init__(self, job: dict, format: str, families: Any, *files: str):
        from vlmcompress.models import load_processor

        folder = Path(job["model"])
        for name in files:
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}; write it by quantize --format {format}")
        try:
            family = json.loads((folder / "vlmcompress.json").read_text(encoding="utf-8"))["model"]["family"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder} is no checkpoint of ours; write one by quantize --format {format}") from error
        self.family_name, self.family = family, families.get(family)
        self.processor: Any = load_processor(folder)
        self.media = Path(job["media"])

    def encode_image(self, picture: Image.Image) -> Any:
        """Convert an RGB image to the engine's form."""
        raise NotImplementedError

    def prompt(self, messages: list[dict]) -> tuple[str, list]:
        """The text of a conversation, with the family's mark for each image, and the images.

        The beginning-of-text token is left out if the tokenizer adds it. Images are opened as in transformers, as other JPEG
        decoders give other pixels.
        """
        images: list[Any] = []
        conversation = []
        for message in messages:
            content = message["content"]
            parts: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            for at, part in enumerate(parts):
                if part["type"] == "image_url":
                    with open_raster(media_file(part["image_url"]["url"], self.media)) as picture:
                        images.append(self.encode_image(picture.convert("RGB")))
                    parts[at] = {"type": "image"}
            conversation.append(message | {"content": parts})
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        if text.count(self.family.image) != len(images):
            raise ValueError(f"the chat template does not write '{self.family.image}' once for each image")
        tokenizer = self.processor.tokenizer
        begin = tokenizer.bos_token
        if begin and text.startswith(begin) and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
            text = text.removeprefix(begin)
        return text, images
