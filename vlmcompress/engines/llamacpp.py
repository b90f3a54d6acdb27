"""llama.cpp as an engine: the server of the package `xllamacpp`, on a folder with `model.gguf` and `mmproj.gguf`.

`ENGINE` runs this file in a process of its own (`engines/worker.py` loads it there). Prompts are rendered here, by the
checkpoint's own chat template, and go to the server as text with a marker for each image, so that they are those of the
other engines: llama.cpp's chat interface puts an image where a text part stands, and leaves out what a template writes around
it. Images are resized by llama.cpp, as they are for its users.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vlmcompress.engines import llamacpp_server, media_file
from vlmcompress.engines.local import Local

PACKAGE = "xllamacpp"
MARKER = "<__media__>"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ENGINE = Local(
    name="llamacpp",
    title="llama.cpp",
    module=Path(__file__),
    interpreter=lambda: sys.executable,
    environment=lambda: {**ENVIRONMENT, **os.environ},
    advice="pip install '.[llamacpp]' in the checkout of vlmcompress",
)


def start(job: dict):
    """Load the engine; return it with a description."""
    began = time.monotonic()
    engine = Engine(job)
    about = {
        "name": "llamacpp",
        "version": importlib.metadata.version("xllamacpp"),
        "device": "cpu",
        "max_model_len": engine.longest,
        "max_num_seqs": engine.slots,
        "start_seconds": round(time.monotonic() - began, 2),
    }
    return engine, about


def answers(engine, requests, job: dict):
    """Answer as many requests at once as the server has slots, in their order."""
    with ThreadPoolExecutor(engine.slots) as pool:
        yield from pool.map(lambda request: (request["id"], engine.answer(request, job["settings"])), requests)


class Engine:
    """A server in this process, with the processor that renders prompts. `slots`: requests at once."""

    def __init__(self, job: dict):
        from transformers import AutoProcessor

        from vlmcompress.export.gguf import REGISTRY

        folder, settings = Path(job["model"]), job["settings"]
        if job.get("reduce"):
            raise ValueError("llama.cpp runs no reducer of visual tokens; use --engine hf")
        try:
            family = json.loads((folder / "vlmcompress.json").read_text(encoding="utf-8"))["model"]["family"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder} is no checkpoint of ours; write one by quantize --format gguf") from error
        for name in ("model.gguf", "mmproj.gguf"):
            if not (folder / name).is_file():
                raise ValueError(f"{folder} has no {name}; write it by quantize --format gguf")
        self.family = REGISTRY.get(family).FAMILY
        self.processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.tokenizer = self.processor.tokenizer
        self.media = Path(job["media"])
        self.slots = settings["max_num_seqs"] or 1
        limit = settings["max_model_len"]
        self.longest = min(llamacpp_server.positions(folder), limit if limit > 0 else llamacpp_server.LONGEST)
        self.server = self._serve(folder, settings)

    def _serve(self, folder: Path, settings: dict):
        os.environ["LLAMA_MEDIA_MARKER"] = MARKER  # a random one otherwise
        import xllamacpp

        params = llamacpp_server.parameters(
            folder,
            context=self.longest,
            slots=self.slots,
            limits=llamacpp_server.token_limits(self.processor.image_processor),
        )
        if settings["dtype"] == "float32":
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return xllamacpp.Server(params)

    def answer(self, request: dict, settings: dict):
        """Answer one request; an exception says that it is refused."""
        try:
            prompt, images = self._prompt(request["messages"])
        except Exception as error:
            return error
        body = {
            "prompt": {"prompt_string": prompt, "multimodal_data": images} if images else prompt,
            "n_predict": request["max_tokens"] or settings["max_tokens"],
            "temperature": 0.0,
            "n_probs": settings["logprobs"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        data = json.dumps(body).encode()
        call = urllib.request.Request(
            f"{self.server.listening_address}/completion", data, {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(call) as response:
                reply = json.load(response)
        except urllib.error.HTTPError as error:
            return ValueError(json.load(error).get("error", {}).get("message", str(error)))
        tokens, probabilities = reply["tokens"], (reply.get("completion_probabilities") or [{}])[0]
        # The server leaves out tokens that are a part of a character: what comes first may be a later one's.
        tops = probabilities.get("top_logprobs") or [] if tokens[:1] == [probabilities.get("id")] else []
        return {
            "text": self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "finish": "length" if reply["stop_type"] == "limit" else "stop",
            "prompt_tokens": reply["tokens_evaluated"],
            "output_tokens": reply["tokens_predicted"],
            "first": [[self.tokenizer.decode([top["id"]]), top["logprob"]] for top in tops] or None,
        }

    def _prompt(self, messages: list[dict]) -> tuple[str, list[str]]:
        """The text of a conversation with markers for its images, and these as base64 of PNG files."""
        images: list[str] = []
        conversation = [message | {"content": self._parts(message["content"], images)} for message in messages]
        text = self.processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        if MARKER in text:
            raise ValueError(f"the prompt has {MARKER} in it, which stands for an image in llama.cpp")
        if text.count(self.family.image) != len(images):
            raise ValueError(f"the chat template does not write '{self.family.image}' once for each image")
        text = text.replace(self.family.image, self.family.marker.format(MARKER))
        begin = self.tokenizer.bos_token
        if begin and text.startswith(begin) and self.tokenizer("a")["input_ids"][0] == self.tokenizer.bos_token_id:
            text = text.removeprefix(begin)  # the server adds it
        return text, images

    def _parts(self, content, images: list[str]) -> list[dict]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        parts = []
        for part in content:
            if part["type"] == "image_url":
                images.append(self._encoded(part["image_url"]["url"]))
                part = {"type": "image"}
            parts.append(part)
        return parts

    def _encoded(self, address: str) -> str:
        """An image as transformers opens it: other decoders of JPEG give other pixels."""
        from PIL import Image

        buffer = io.BytesIO()
        with Image.open(media_file(address, self.media)) as picture:
            picture.convert("RGB").save(buffer, "PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode()
