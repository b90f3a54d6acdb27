"""mlx-vlm, the engine that `engines/worker.py` loads for `mlx`. Imports the standard library and what mlx-vlm brings.

Prompts are rendered with the checkpoint's own chat template and encoded by mlx-vlm's processor of the family, one at a time.
mlx-vlm's own way there is not taken: `apply_chat_template` moves images to the beginning of a message, and `prepare_inputs`
pads even a single prompt, with an option that the image processor of LLaVA refuses (mlx-vlm 0.7.10 with transformers 5.24).
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from urllib.parse import unquote, urlparse

PACKAGE = "mlx_vlm"


def start(job: dict):
    """Load the engine; return it with a description."""
    import mlx.core as mx
    import mlx_vlm

    engine = Engine(job)
    about = {
        "name": "mlx",
        "version": mlx_vlm.__version__,
        "device": "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu",
        "max_model_len": engine.longest,
        "max_num_seqs": 1,
    }
    return engine, about


def answers(engine, requests, job: dict):
    """Answer one request after the other; a refused one yields an exception."""
    for request in requests:
        try:
            yield request["id"], engine.answer(request, job["settings"])
        except Exception as error:
            yield request["id"], error


class Engine:
    """A model with its processor. `longest` is the context length.

    Raises:
        ValueError: mlx-vlm can't load the folder, or its reducer is not for MLX.
    """

    def __init__(self, job: dict):
        import mlx.core as mx
        import mlx_vlm

        folder, settings = Path(job["model"]), job["settings"]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        reducers = runpy.run_path(str(Path(__file__).with_name("mlx_reducers.py")))
        if problem := reducers["problem"](config):
            raise ValueError(problem)
        try:
            self.model, self.processor = mlx_vlm.load(str(folder))
        except Exception as error:
            remedy = "" if "quantization" in config else "; write it by vlmcompress export --format mlx"
            raise ValueError(f"{' '.join(str(error).split())[:300]}{remedy}") from error
        reducers["attach"](self.model, config)
        self.requested = lambda keep: reducers["requested"](keep, config)
        if settings["dtype"] != "auto":
            self.model.set_dtype(getattr(mx, settings["dtype"]))
        self.media = Path(job["media"])
        text = config.get("text_config") or config
        positions, limit = text.get("max_position_embeddings") or 8192, settings["max_model_len"]
        self.longest = min(positions, limit) if limit > 0 else positions

    def answer(self, request: dict, settings: dict) -> dict:
        """Answer one request greedily."""
        import mlx.core as mx
        from mlx_vlm.generate import generate_step, generation_stream, wired_limit

        prompt, images = self.prompt(request["messages"])
        tokenizer = self.processor.tokenizer
        self.model.keep = None if request["keep"] is None else self.requested(request["keep"])
        if images:
            encoded = self.processor(text=[prompt], images=images, return_tensors="mlx")
            inputs = {name: mx.array(value) if hasattr(value, "dtype") else value for name, value in encoded.items()}
        else:
            inputs = dict(tokenizer([prompt], return_token_type_ids=False))
        tokens, mask = (mx.array(inputs.pop(name)) for name in ("input_ids", "attention_mask"))
        length, most = tokens.shape[1], request["max_tokens"] or settings["max_tokens"]
        if length >= self.longest:
            raise ValueError(f"the prompt has {length} tokens and the maximum context length is {self.longest}")
        pixels, most = inputs.pop("pixel_values", None), min(most, self.longest - length)
        answer: list[int] = []
        first, ended = None, False
        with wired_limit(self.model, [generation_stream]):
            steps = generate_step(tokens, self.model, pixels, mask, max_tokens=most, temperature=0.0, **inputs)
            for token, logprobs in steps:
                if settings["logprobs"] and not answer:
                    logprobs = logprobs.astype(mx.float32)
                    logprobs -= mx.logsumexp(logprobs)  # theirs is of the model's type
                    best = mx.argsort(-logprobs)[: settings["logprobs"]].tolist()
                    first = [[tokenizer.decode([token]), logprobs[token].item()] for token in best]
                answer.append(token)
                if ended := tokenizer.stopping_criteria(token):
                    break
        return {
            "text": tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "finish": "stop" if ended else "length",
            "prompt_tokens": length - getattr(self.model, "dropped", 0),
            "output_tokens": len(answer),
            "first": first,
        }

    def prompt(self, messages: list[dict]) -> tuple[str, list]:
        """The text of a conversation, and its images. The beginning-of-text token is left out if the tokenizer adds it."""
        from PIL import Image

        images: list = []
        conversation = []
        for message in messages:
            content = message["content"]
            parts: list = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            for at, part in enumerate(parts):
                if part["type"] == "image_url":
                    address = part["image_url"]["url"]
                    path = Path(unquote(urlparse(address).path)).resolve()
                    if not address.startswith("file://") or not path.is_relative_to(self.media):
                        raise ValueError(f"{address[:80]} is not a file in {self.media}")
                    with Image.open(path, formats=["PNG"]) as picture:
                        images.append(picture.convert("RGB"))
                    parts[at] = {"type": "image"}
            conversation.append(message | {"content": parts})
        tokenizer = self.processor.tokenizer
        text = self.processor.apply_chat_template(
            conversation,
            chat_template=self.processor.chat_template or tokenizer.chat_template,
            add_generation_prompt=True,
            tokenize=False,
        )
        begin = tokenizer.bos_token
        if begin and text.startswith(begin) and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
            text = text.removeprefix(begin)
        return text, images
