"""Turn samples into model inputs and tell the modality of each token.

`encode` applies the model's chat template and processor to one sample at a time and adds `modality [1, tokens]` (uint8):

    0  ignored: padding
    1  text of the prompt: words, template, and the marks around and between the parts of an image
    2  vision: placeholders that the model replaces with visual features
    3  answer: where the model writes what the assistant's turns say: the token before each token of the turn, and before
       the one that ends it

So an answer begins with the prompt's last token, from whose output its first token is read, and the token that ends it is
text: nothing is read from it, and no engine ever runs it. With answers of a word or two this decides everything that depends on
gradients: in a demo model's upper blocks nine tenths of the squared gradient is at the prompt's last token.

A token is vision when its id is one that the model's config names for images (`ModelSpec.image_token`) or for videos, for that
is where the model puts features. Answers are found without knowing the template: the conversation is encoded once more with
another text in the assistant's turn, and the turn's tokens are those in which the two differ. (Leaving the turn out would be
no good: there are templates that write other things around a question once it is answered, and processors that cut an image
into other tiles once a later turn brings another.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor

from vlmcompress.common.messages import reason
from vlmcompress.common.progress import Progress, silent
from vlmcompress.data import video
from vlmcompress.data.samples import Sample
from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from vlmcompress.models import VLM

Turn = dict[str, Any]  # {"role": ..., "content": [{"type": "image"} or {"type": "text", "text": ...}, ...]}
Shown = dict[str, list[Any]]  # "image": images, "video": frames with their metadata, in the order of the conversation
Inputs = dict[str, Tensor]
IGNORED, TEXT, VISION, ANSWER = range(4)
PIXELS = frozenset({"pixel_values", "pixel_values_videos"})  # inputs with what a sample shows
MOST = 2 << 30
"""Bytes of encoded samples that are kept; others are encoded on each access."""
PROCESSOR_ERRORS = (ValueError, TypeError, RuntimeError, OverflowError, TemplateError)


def encode(
    samples: Sequence[Sample], vlm: VLM, *, max_length: int | None = None, progress: Progress = silent
) -> list[Inputs]:
    """Encode each sample with its answer as a batch of one: model inputs and the mask `modality [1, tokens]`.

    Args:
        max_length: refuse samples of more tokens; None: of more than the model's context. Nothing is truncated, as no
            model reads half an image.
        progress: called with (label, done, total).
    """
    batches = []
    for sample in samples:
        batches.append(_encode_one(sample, vlm, max_length))
        progress("encoding samples", len(batches), len(samples))
    return batches


def encode_prompt(sample: Sample, vlm: VLM) -> Inputs:
    """Encode a sample without its answer: model inputs ready for `model.generate`."""
    inputs = _process(sample, sample.prompt(), _shown(sample, vlm.processor), vlm.processor, generation=True)
    _check_vision(sample, inputs, vlm)
    return inputs


def render(sample: Sample, processor: Any, *, answer: bool = False) -> str:
    """Render the chat template, placeholders not yet repeated: the prompt up to the answer, or the whole conversation."""
    return _render(sample, sample.conversation() if answer else sample.prompt(), processor, generation=not answer)


def chat_template(processor: Any) -> str:
    """The template of a processor, or of its tokenizer where only that has one."""
    for owner in (processor, processor.tokenizer):
        template = getattr(owner, "chat_template", None)
        template = template.get("default") if isinstance(template, dict) else template
        if template:
            return template
    raise UserError("the model has no chat template; copy chat_template.jinja of the original into its folder")


def _encode_one(sample: Sample, vlm: VLM, max_length: int | None) -> Inputs:
    turns, shown = sample.conversation(), _shown(sample, vlm.processor)
    inputs = _process(sample, turns, shown, vlm.processor, generation=False)
    length = inputs["input_ids"].shape[1]
    context = getattr(vlm.model.config.get_text_config(), "max_position_embeddings", None) or length
    limit = min(context, max_length or context)
    if length > limit:
        vision = int(_visual(inputs["input_ids"], vlm).sum())
        what = "context" if limit == context else "max_length"
        raise UserError(
            f"{sample.name} has {length} tokens ({vision} of them visual), more than the {what} of {limit}; "
            f"shrink its {'videos' if sample.videos else 'images'}, shorten its text, or drop it"
        )
    _check_vision(sample, inputs, vlm)
    inputs["modality"] = _modality(sample, turns, shown, inputs, vlm)
    return inputs


def _shown(sample: Sample, processor: Any) -> Shown:
    """Decode what a sample shows, of videos the frames that the model gets."""
    if sample.videos:
        video.check(processor, sample.name, bool(sample.images))
    return {"image": list(sample.images), "video": [shown.frames(processor) for shown in sample.videos]}


def _render(sample: Sample, turns: list[Turn], processor: Any, *, generation: bool) -> str:
    """Apply the chat template as text, and check that it shows the images, the videos and the texts."""
    marks = {"image": processor.image_token, "video": processor.video_token if sample.videos else None}
    questions = [p["text"] for t in turns if t["role"] == "user" for p in t["content"] if p["type"] == "text"]
    for kind, mark in marks.items():
        if mark and any(mark in text for text in questions):
            raise UserError(f"{sample.name}: its text contains '{mark}', this model's mark for {kind}s; remove it")
    try:
        text = processor.apply_chat_template(
            turns, chat_template=chat_template(processor), add_generation_prompt=generation
        )
    except PROCESSOR_ERRORS as error:
        raise UserError(f"{sample.name}: the chat template refuses it ({reason(error)})") from error
    for kind, mark in marks.items():
        count = sum(part["type"] == kind for turn in turns for part in turn["content"])
        if mark and text.count(mark) != count:
            raise UserError(
                f"{sample.name}: the model's chat template shows {text.count(mark)} of {count} {kind}s; "
                "it has to take OpenAI-style content lists"
            )
    if any(part.strip() not in text for part in questions) or "{'type':" in text:
        raise UserError(f"{sample.name}: the chat template does not show its text; it has to take content lists")
    return text


def _process(sample: Sample, turns: list[Turn], shown: Shown, processor: Any, *, generation: bool) -> Inputs:
    """Model inputs of some of a sample's turns: chat template and processor, with what is shown in the order of the turns."""
    _render(sample, turns, processor, generation=generation)
    rest = {"image": iter(shown["image"]), "video": (frames for frames, _ in shown["video"])}
    content = [
        {
            **turn,
            "content": [{**p, p["type"]: next(rest[p["type"]])} if p["type"] in rest else p for p in turn["content"]],
        }
        for turn in turns
    ]
    try:
        inputs = processor.apply_chat_template(
            content,
            chat_template=chat_template(processor),
            add_generation_prompt=generation,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs=video.arguments(shown["video"]),
        )
    except PROCESSOR_ERRORS as error:
        raise UserError(f"{sample.name}: the model's processor refuses it ({reason(error)}); drop it") from error
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def _check_vision(sample: Sample, inputs: Inputs, vlm: VLM) -> None:
    """Check that placeholders occur where images or videos do, and as many as features if the inputs tell their number."""
    placeholders = int(_visual(inputs["input_ids"], vlm).sum())
    images, features = len(sample.images) + len(sample.videos), None
    if grids := [inputs[name].prod(-1).sum() for name in ("image_grid_thw", "video_grid_thw") if name in inputs]:
        merged = vlm.processor.image_processor.merge_size**2
        features = int(sum(grids)) // merged
        if len(grids) == 2 and (inputs["input_ids"] == _image_token_id(vlm)).sum() != grids[0] // merged:
            raise UserError(
                f"{sample.name} shows images and a video, which {type(vlm.processor).__name__} marks alike; give one of the two"
            )
    if bool(placeholders) != bool(images) or features not in (None, placeholders):
        expected = f"{images} images or videos" if features is None else f"{features} visual features"
        raise UserError(
            f"{sample.name}: {placeholders} placeholder tokens for {expected}; processor files and config.json "
            "do not belong together"
        )


def _modality(sample: Sample, turns: list[Turn], shown: Shown, inputs: Inputs, vlm: VLM) -> Tensor:
    """The mask [1, tokens] that the module docstring describes."""
    ids = inputs["input_ids"][0]
    mask = torch.full_like(ids, TEXT, dtype=torch.uint8)
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            start, end = _answer_span(sample, turns, index, shown, ids, vlm)
            mask[start - 1 : end - 1] = ANSWER
    if sample.answer and sample.answer.strip() and not (mask == ANSWER).any():
        raise UserError(f"{sample.name}: the model's chat template does not show the answer; check the template")
    mask[_visual(ids, vlm)] = VISION
    if "attention_mask" in inputs:
        mask[inputs["attention_mask"][0] == 0] = IGNORED
    return mask[None]


def _answer_span(sample: Sample, turns: list[Turn], index: int, shown: Shown, ids: Tensor, vlm: VLM) -> tuple[int, int]:
    """First position and end, in `ids [tokens]`, of the text of turn `index` with the end-of-turn token that follows it."""
    text = "".join(part["text"] for part in turns[index]["content"] if part["type"] == "text")
    other = next(letter for letter in map(chr, range(ord("A"), 0x10000)) if letter not in text)
    altered = [*turns[:index], {**turns[index], "content": [{"type": "text", "text": other}]}, *turns[index + 1 :]]
    changed = _process(sample, altered, shown, vlm.processor, generation=False)["input_ids"][0]
    start = _agreement(ids, changed)
    end = len(ids) - min(_agreement(ids.flip(0), changed.flip(0)), len(ids) - start)
    if start == len(ids) == len(changed):
        return 0, 0  # the template does not show this turn
    ends = _end_ids(vlm)
    for position in range(end, len(ids)):
        if int(ids[position]) in ends:
            return start, position + 1
        if vlm.processor.tokenizer.decode(ids[position : position + 1]).strip():
            break
    return start, end


def _agreement(a: Tensor, b: Tensor) -> int:
    """Length of the longest common prefix of two sequences of ids."""
    shorter = min(len(a), len(b))
    differ = (a[:shorter] != b[:shorter]).nonzero()
    return int(differ[0]) if len(differ) else shorter


def _end_ids(vlm: VLM) -> set[int]:
    """Token ids at which generation stops: those of the model's two configs and of its tokenizer."""
    end_ids = {vlm.processor.tokenizer.eos_token_id}
    for config in (vlm.model.generation_config, vlm.model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        end_ids |= set(ids) if isinstance(ids, list) else {ids}
    return end_ids - {None}


def _visual(ids: Tensor, vlm: VLM) -> Tensor:
    """Where ids stand for features of images or videos."""
    video_ids = [getattr(vlm.model.config, name, None) for name in ("video_token_id", "video_token_index")]
    return torch.isin(ids, ids.new_tensor([_image_token_id(vlm), *filter(None, video_ids)]))


def _image_token_id(vlm: VLM) -> int:
    return getattr(vlm.model.config, vlm.spec.image_token)


class Encoded(Sequence[Inputs]):
    """The inputs of samples, as `encode` makes them, encoded on access, as those of a long run do not all fit into memory.

    Args:
        max_length: see `encode`.
        most: bytes of inputs that are kept in memory.
    """

    def __init__(self, samples: Sequence[Sample], vlm: VLM, *, max_length: int | None = None, most: int = MOST) -> None:
        self._samples, self._vlm, self._max_length = samples, vlm, max_length
        self._room, self._kept = most, dict[int, Inputs]()

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Inputs: ...
    @overload
    def __getitem__(self, index: slice) -> list[Inputs]: ...
    def __getitem__(self, index: int | slice) -> Inputs | list[Inputs]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if index < 0 or index >= len(self):
            raise IndexError(index)
        inputs = self._kept.get(index)
        if inputs is None:
            inputs = encode([self._samples[index]], self._vlm, max_length=self._max_length)[0]
            size = sum(value.nbytes for value in inputs.values())
            if size <= self._room:
                self._room -= size
                self._kept[index] = inputs
        return inputs

    def __iter__(self) -> Iterator[Inputs]:
        return (self[index] for index in range(len(self)))
