"""Extensions of lm-eval: a model whose answers come from one of our engines, and a task of plain conversations.

lm-eval builds prompts and scores answers; `EngineLM` passes its requests to an engine as chat messages. It differs from
lm-eval's own models in three ways: the engine applies the chat template (a "rendered" prompt is the list of messages as
JSON), images are placed at `<image>` in the text, and a request is identified by our sample id, not by a hash of the
document. Only `generate_until` works: log-likelihoods of texts about images are undefined in most engines, so multiple
choice is answered in words and parsed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from PIL import Image

from vlmcompress.engines import Answer, Request
from vlmcompress.evaluation.accuracy import benchmarks, local_data
from vlmcompress.evaluation.accuracy.thoughts import UNFINISHED, Thoughts
from vlmcompress.models.data.provenance import HASH
from vlmcompress.models.data.samples import MARK, Sample
from vlmcompress.models.data.video import Video
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.identity import image_digest

MAX_TOKENS = 256  # lm-eval's default
Ask = Callable[[Sequence[Request]], Mapping[str, Answer]]


class EngineLM(LM):
    """A model for lm-eval whose answers come from one of our engines.

    Args:
        ask: function that answers requests greedily, by id.
        identify: function from a request of lm-eval to its sample id.
        media: folder to which each image is written once.
        thoughts: how the model thinks.

    Attributes:
        requests, answers: all requests and answers so far, by sample id; answers are without thoughts, and cut at the task's
            stop strings.
        pictures: hashes of each sample's images, as in a manifest's calibration data.
    """

    MULTIMODAL = True

    def __init__(self, ask: Ask, identify: Callable[[Instance], str], media: Path, thoughts: Thoughts | None = None):
        super().__init__()
        self._ask, self._identify, self._media, self._thoughts = ask, identify, media, thoughts or Thoughts()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.pictures: dict[str, frozenset[str]] = {}

    @property
    def tokenizer_name(self) -> str:
        return (
            "vlmcompress"  # a key of lm-eval's request cache, which `evaluate` asks for where a chat template applies
        )

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """Render messages as JSON, which `generate_until` parses again."""
        if not add_generation_prompt:
            raise UserError("a task with gen_prefix can't be asked: chat engines start the answer; remove gen_prefix")
        return json.dumps(chat_history)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Answers in the order of requests; equal ids (lm-eval's `repeats`) are asked once."""
        ids = [self._identify(instance) for instance in requests]
        stops = {}
        for identity, instance in zip(ids, requests, strict=True):
            stops[identity], request = self._request(identity, *instance.args)
            self.requests[identity] = replace(request, keep=instance.doc.get("keep"))
        answers = self._ask([self.requests[identity] for identity in dict.fromkeys(ids)])
        # A server's chat template is unknown: it opens thoughts if some answers only close them.
        begun = any(self._thoughts.ends_without_beginning(answer.text) for answer in answers.values())
        self.answers |= {identity: cut(self._answer(answers[identity], begun), stops[identity]) for identity in ids}
        return [self.answers[identity].text for identity in ids]

    def _answer(self, answer: Answer, begun: bool) -> Answer:
        """The answer without thoughts; without text, and `UNFINISHED`, if they do not end."""
        if not answer.text:
            return answer
        text = self._thoughts.answer(answer.text, begun and answer.finish == "length")
        return replace(answer, text="", finish=UNFINISHED) if text is None else replace(answer, text=text)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise UserError(f"task {requests[0].task_name} compares log-likelihoods; only output_type generate_until works")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise UserError(f"task {requests[0].task_name} measures perplexity; only output_type generate_until works")

    def _request(
        self, identity: str, prompt: str, options: dict, media: dict | None = None
    ) -> tuple[list[str], Request]:
        """The task's stop strings, and lm-eval's request as one for the engine."""
        if options.get("do_sample") or options.get("temperature"):
            raise UserError(f"sample '{identity}': its task samples; set do_sample: false and temperature: 0.0")
        visuals = list((media or {}).get("visual") or ())
        videos = [video.save(self._media) for video in visuals if isinstance(video, Video)]
        images = [write_image(image, self._media) for image in visuals if not isinstance(image, Video)]
        self.pictures[identity] = frozenset(
            image_digest(image.convert("RGB")).hex()[:HASH] for image in visuals if not isinstance(image, Video)
        )
        stops = options.get("until") or []
        return (
            [stops] if isinstance(stops, str) else list(stops),
            Request(
                identity,
                place(json.loads(prompt), images, identity, videos),
                int(options.get("max_gen_toks", MAX_TOKENS)),
            ),
        )


def place(
    turns: list[dict[str, Any]], images: Sequence[Path], name: str, videos: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """OpenAI-style messages with an image at each `<image>` of a text and at each part of type `image`; videos likewise.

    Without such placeholders they come first in the last user turn, videos after images.

    Raises:
        UserError: the number of placeholders differs from that of images or videos.
    """
    split = []
    for turn in turns:
        parts: list[dict[str, Any]] = turn["content"]
        if isinstance(turn["content"], str):
            parts = []
            for index, text in enumerate(turn["content"].split(MARK)):
                parts += [{"type": "image"}] if index else []
                parts += [{"type": "text", "text": text}] if text else []
        split.append(turn | {"content": parts})
    turns = split
    for kind, files in (("video", videos), ("image", images)):
        places = sum(part["type"] == kind for turn in turns for part in turn["content"])
        if files and not places:
            last = [turn for turn in turns if turn["role"] == "user"][-1]
            last["content"] = [{"type": kind} for _ in files] + last["content"]
        elif places != len(files):
            raise UserError(f"sample '{name}': {places} placeholders for {kind}s in the prompt, {len(files)} {kind}s")
        rest, address = iter(files), f"{kind}_url"
        for turn in turns:
            turn["content"] = [
                {"type": address, address: {"url": next(rest).as_uri()}} if part["type"] == kind else part
                for part in turn["content"]
            ]
    return turns


def cut(answer: Answer, stops: Sequence[str]) -> Answer:
    """Cut an answer at the first stop string in it."""
    text = answer.text
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return answer if text == answer.text else replace(answer, text=text, finish="stop")


def write_image(image: Image.Image, folder: Path) -> Path:
    """Write an image as a PNG file in `folder`, named by its content."""
    encoded = local_data.png(image)
    file = folder / f"{hashlib.sha256(encoded).hexdigest()[:32]}.png"
    if not file.exists():
        try:
            file.write_bytes(encoded)
        except OSError as error:
            raise UserError(f"can't write images for the engine to {folder} ({error.strerror}); set TMPDIR") from error
    return file


class Documents(list):
    """Rows with the part of the interface of `datasets.Dataset` that lm-eval uses; images are decoded on access."""

    @property
    def features(self) -> dict[str, Any]:
        return dict.fromkeys(self[0])

    def __getitem__(self, key: Any) -> Any:
        """A row by number, or a column by name."""
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def select(self, indices: Sequence[int]) -> Documents:
        return Documents(self[index] for index in indices)


class Conversations(ConfigurableTask):
    """A task whose prompts are the samples' turns, unchanged; scored by exact match, until `free_answers` scores them.

    Args:
        samples: the samples, each with an answer.
        ids: their ids in the data; None for samples without an id.
    """

    def __init__(self, name: str, samples: Sequence[Sample], ids: Sequence[str | None]):
        rows = Documents(
            {
                "id": identity,
                "family": sample.family,
                "question": sample.question,
                "answer": sample.answer,
                "references": list(sample.references) or [sample.answer or ""],
                "images": sample.images,
                "videos": sample.videos,
                "keep": sample.keep,
                "turns": sample.prompt(),
            }
            for sample, identity in zip(samples, ids, strict=True)
        )
        longest = max(len(sample.answer or "") for sample in samples)
        super().__init__(
            config={
                "task": name,
                "custom_dataset": lambda **_: {"test": rows},
                "test_split": "test",
                "doc_to_text": "question",
                "doc_to_target": "references",
                "doc_to_image": local_data.row_media,
                "process_results": benchmarks.exact,
                "generation_kwargs": {
                    "until": [],
                    "max_gen_toks": max(32, longest),
                    "do_sample": False,
                    "temperature": 0.0,
                },
                "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            }
        )

    def fewshot_context(self, doc: dict[str, Any], *_: Any, chat_template: Callable[..., str], **__: Any) -> str:
        """A sample's turns rendered, with a system prompt and earlier answers if the data have them."""
        return chat_template(doc["turns"])
