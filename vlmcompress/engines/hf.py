"""transformers' `generate` as an engine: slow, but the reference, and independent of vLLM.

`ENGINE` runs this file in a separate process (`engines/worker.py` loads it there): greedy, in batches padded on the left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmcompress.engines import media_file
from vlmcompress.engines.local import Local

PACKAGE = "transformers"
IN_FLIGHT = 8  # default number of requests in a batch
ENGINE = Local(
    name="hf",
    title="transformers",
    module=Path(__file__),
    advice="pip install vlmcompress there again",
    batch=IN_FLIGHT,
    videos=True,
    shares=True,
)


def start(job: dict):
    """Load the engine; return it with a description."""
    import torch
    import transformers

    engine = Engine(job)
    about = {
        "name": "hf",
        "version": transformers.__version__,
        "device": engine.device,
        "device_name": torch.cuda.get_device_name() if engine.device == "cuda" else "",
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "max_model_len": engine.longest,
        "max_num_seqs": job["settings"]["max_num_seqs"] or IN_FLIGHT,
        "reduce": engine.reduce,
    }
    return engine, about


def answers(engine, requests, job: dict):
    """Answer in batches of requests with equally many images, which some processors require, that keep the same share; requests
    with videos alone."""
    groups: dict[tuple, list[dict]] = {}
    for request in requests:
        # `keep` is what the data have there, of any type; `set_keep` checks it.
        kind = count(request, "image_url"), count(request, "video_url"), repr(request["keep"])
        groups.setdefault(kind, []).append(request)
    for (_, videos, _), group in groups.items():
        size = 1 if videos else job["settings"]["max_num_seqs"] or IN_FLIGHT
        for at in range(0, len(group), size):
            yield from answered(engine, group[at : at + size], job["settings"])


def answered(engine, batch: list[dict], settings: dict) -> list[tuple]:
    """Answer a batch. If it fails, its halves are tried, down to the single request for which processor or model raise."""
    try:
        return list(engine.generate(batch, engine.encode(batch), settings))
    except Exception as error:
        if len(batch) == 1:
            return [(batch[0]["id"], error)]
    half = len(batch) // 2
    return answered(engine, batch[:half], settings) + answered(engine, batch[half:], settings)


def count(request: dict, kind: str) -> int:
    """The number of a request's parts of a type."""
    contents = [message["content"] for message in request["messages"] if isinstance(message["content"], list)]
    return sum(part["type"] == kind for content in contents for part in content)


class Engine:
    """A model with its processor. `ends` are the tokens that end an answer, `longest` is the context length."""

    def __init__(self, job: dict):
        import torch

        from vlmcompress.models import VLM, load_processor, open_model, quiet_transformers, read_config, spec_for
        from vlmcompress.models.data.encode import try_processor_and_template
        from vlmcompress.models.devices import accelerator
        from vlmcompress.reduction.choice import parse_reducer
        from vlmcompress.reduction.hooks import attach_carried

        settings, folder, device = job["settings"], job["model"], accelerator()
        self.device = "cuda" if device and device.type == "cuda" else "cpu"
        torch.manual_seed(settings["seed"])
        opened: Any = open_model(folder, dtype=settings["dtype"], attn_implementation="sdpa", trust_remote_code=False)
        model, loaded = opened
        if lacking := sorted(map(str, {*loaded["missing_keys"], *loaded["mismatched_keys"]})):
            # transformers would only warn and initialize them randomly
            raise ValueError(f"the checkpoint lacks {len(lacking)} tensors that the model needs, such as {lacking[0]}")
        self.model = model.to(self.device).eval()
        self.processor = load_processor(folder)
        self.tokenizer = self.processor.tokenizer
        self.tokenizer.padding_side = "left"
        # `generate` stops only at the generation config's end tokens, vLLM also at the tokenizer's.
        ends = model.generation_config.eos_token_id
        self.ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}
        positions, limit = model.config.get_text_config().max_position_embeddings, settings["max_model_len"]
        self.longest = positions if limit < 0 else min(positions, limit)
        self.media = Path(job["media"])
        names = [f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")]
        ids = [getattr(model.config, name, None) for name in names]
        self.visual = torch.tensor([token for token in ids if token is not None])
        if job.get("images_per_prompt") and (family := spec_for(read_config(folder))):
            with quiet_transformers():
                try_processor_and_template(VLM(self.model, self.processor, family, Path(folder)))
        # by default the checkpoint's reducer, if any
        reduce = parse_reducer(job["reduce"]) if job.get("reduce") else None
        self.attached = attach_carried(self.model, self.processor, folder, reduce)
        self.reduce = None if self.attached is None else str(self.attached.chosen)

    def encode(self, batch: list[dict]):
        """Encode a batch as inputs of the model: tokens [batch, longest prompt] and pixels."""
        from vlmcompress.models.data import video

        decoded: list = []
        conversations = [
            [message | {"content": self._parts(message["content"], decoded)} for message in request["messages"]]
            for request in batch
        ]
        if self.attached:
            self.attached.set_keep(batch[0]["keep"])
        inputs = self.processor.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, **video.arguments(decoded)},
        )
        if (length := inputs["input_ids"].shape[1]) >= self.longest:
            raise ValueError(f"the prompt has {length} tokens and the maximum context length is {self.longest}")
        return inputs.to(self.device, dtype=self.model.dtype)

    def _parts(self, content, decoded: list) -> list[dict]:
        """Convert a message's content for processors: in parts, images as Pillow images, videos as the frames of `decoded`."""
        from vlmcompress.models.data import video
        from vlmcompress.utils.images import open_raster

        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        parts = []
        for part in content:
            if part["type"] == "image_url":
                with open_raster(media_file(part["image_url"]["url"], self.media)) as image:
                    part = {"type": "image", "image": image.convert("RGB")}
            elif part["type"] == "video_url":
                images = any(other["type"] == "image_url" for other in content)
                video.require_video_support(self.processor, "the request", images)
                file = media_file(part["video_url"]["url"], self.media)
                decoded.append(video.Video(file, "the request").frames(self.processor))
                part = {"type": "video", "video": decoded[-1][0]}
            parts.append(part)
        return parts

    def generate(self, batch: list[dict], inputs, settings: dict):
        """Generate the answers to a batch, each cut at its first end token or its own limit."""
        import torch

        from vlmcompress.models.devices import float_products

        padded = inputs["input_ids"].shape[1]
        prompts = inputs["attention_mask"].sum(1).tolist()
        visual = torch.isin(inputs["input_ids"], self.visual.to(self.device)).sum(1).tolist()
        limits = [request["max_tokens"] or settings["max_tokens"] for request in batch]
        first = FirstToken(settings["logprobs"])
        with torch.inference_mode(), float_products(self.model):
            tokens = self.model.generate(
                **inputs,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                max_new_tokens=min(max(limits), self.longest - padded),
                eos_token_id=sorted(self.ends),
                pad_token_id=min(self.ends, default=0),
                logits_processor=[first],  # `output_logits` would keep those of every step
            )[:, padded:]
        dropped = [0] * len(batch)
        for unit in self.attached.reduced_units if self.attached and count(batch[0], "image_url") else ():
            dropped[unit.row] += len(unit.reduction.target) - len(unit.reduction.anchor)
        for row, (request, limit) in enumerate(zip(batch, limits, strict=True)):
            answer = tokens[row, :limit].tolist()
            end = next((at for at, token in enumerate(answer) if token in self.ends), None)
            answer = answer if end is None else answer[: end + 1]
            fields = {
                "text": self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                "finish": "length" if end is None else "stop",
                "prompt_tokens": prompts[row] - dropped[row],
                "visual_tokens": visual[row] - dropped[row],
                "output_tokens": len(answer),
                "first": [[self.tokenizer.decode([token]), value] for token, value in first.top(row)] or None,
            }
            yield request["id"], fields


class FirstToken:
    """A logits processor that changes nothing and stores the most likely tokens of the first step."""

    def __init__(self, most: int):
        self.most = most
        self.best = None

    def __call__(self, tokens, logits):
        if self.most and self.best is None:
            self.best = logits.float().log_softmax(-1).topk(min(self.most, logits.shape[-1]))
        return logits

    def top(self, row: int) -> list[tuple[int, float]]:
        if self.best is None:
            return []
        return list(zip(self.best.indices[row].tolist(), self.best.values[row].tolist(), strict=True))
