"""llama.cpp as an engine: the server of the package `xllamacpp`, on a folder with `model.gguf` and `mmproj.gguf`.

`ENGINE` runs this file in a separate process (`engines/worker.py` loads it there). Prompts come from `rendered`, with a marker
for each image. llama.cpp resizes images, as it does for its users.
"""

from __future__ import annotations

import base64
import io
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image

from vlmcompress.engines import llamacpp_server
from vlmcompress.engines.local import Local
from vlmcompress.engines.rendered import Rendered, answers, description

__all__ = ["ENGINE", "PACKAGE", "answers", "start"]
PACKAGE = "xllamacpp"
MARKER = "<__media__>"
ENGINE = Local(
    name="llamacpp",
    title="llama.cpp",
    module=Path(__file__),
    advice="pip install '.[llamacpp]' in the checkout of vlmcompress",
)


def start(job: dict):
    """Load the engine; return it with a description."""
    engine = Engine(job)
    return engine, description(engine, "llamacpp", "xllamacpp")


class Engine(Rendered):
    """A server in this process; if `answer` raises an error, the server has died."""

    REFUSALS = ()

    def __init__(self, job: dict):
        from vlmcompress.export.gguf import REGISTRY
        from vlmcompress.export.launch_files import token_limits

        if job.get("reduce"):
            raise ValueError("llama.cpp runs no reducer of visual tokens; use --engine hf")
        super().__init__(job, "gguf", REGISTRY, *llamacpp_server.FILES)
        folder, settings = Path(job["model"]), job["settings"]
        self.slots = settings["max_num_seqs"] or 1
        limit = settings["max_model_len"]
        self.longest = min(llamacpp_server.positions(folder), limit if limit > 0 else llamacpp_server.LONGEST)
        os.environ["LLAMA_MEDIA_MARKER"] = MARKER  # a random one otherwise
        import xllamacpp

        params = llamacpp_server.parameters(
            folder,
            context=self.longest,
            slots=self.slots,
            limits=token_limits(folder, self.processor),
        )
        if settings["dtype"] == "float32":
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server = xllamacpp.Server(params)

    def answer(self, request: dict, settings: dict):
        """Answer one request; returns an exception if it is refused."""
        try:
            prompt, images = self.prompt(request["messages"])
            if MARKER in prompt:
                raise ValueError(f"the prompt contains {MARKER}, llama.cpp's marker for an image")
            prompt = prompt.replace(self.family.image, self.family.marker.format(MARKER))
        except Exception as error:
            return error
        body = {
            "prompt": {"prompt_string": prompt, "multimodal_data": images} if images else prompt,
            "n_predict": request["max_tokens"] or settings["max_tokens"],
            "temperature": 0.0,
            # llama-server's /completion: `n_probs` tokens of the whole distribution, before any sampler where temperature is 0.
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
        # The server omits tokens that are part of a character, so the first entry may belong to a later token.
        tops = probabilities.get("top_logprobs") or [] if tokens[:1] == [probabilities.get("id")] else []
        return {
            "text": self.processor.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            "finish": "length" if reply["stop_type"] == "limit" else "stop",
            "prompt_tokens": reply["tokens_evaluated"],
            "output_tokens": reply["tokens_predicted"],
            "first": [[self.processor.tokenizer.decode([top["id"]]), top["logprob"]] for top in tops] or None,
        }

    def encode_image(self, picture: Image.Image) -> str:
        """An image as base64 of a PNG file."""
        buffer = io.BytesIO()
        picture.save(buffer, "PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode()
