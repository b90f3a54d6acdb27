"""Convert samples to model inputs and determine the modality of each token.

`encode` applies the model's chat template and processor to one sample at a time and adds `modality [1, tokens]` (uint8):

    0  ignored: padding
    1  text of the prompt: words, template, and the marks around and between the parts of an image
    2  vision: placeholders that the model replaces with visual features
    3  answer: tokens that predict an assistant's turn: the one before each token of the turn, and before its end token

So an answer begins with the prompt's last token, whose output gives the answer's first token, and its end token counts as text:
its output is not used, and no engine ever computes it. For answers of a word or two this matters a lot for everything based on
gradients: in a demo model's upper blocks nine tenths of the squared gradient is at the prompt's last token.

A token is vision if its id is the one that the model's config names for images (`ModelSpec.image_token`) or videos, which the
model replaces by features. Answers are found without knowing the template: the conversation is encoded again with another text
in the assistant's turn, and the tokens that differ belong to the turn. (Leaving the turn out would not work: some templates
render a question differently once it is answered, and some processors tile an image differently once a later turn adds
another.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from PIL import Image
from torch import Tensor

from vlmcompress.models.data import video
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.sources import PLAIN, Reading, bad_samples_message
from vlmcompress.utils.errors import BadSample, UserError
from vlmcompress.utils.messages import error_text, foreign_errors
from vlmcompress.utils.progress import Progress, silent

if TYPE_CHECKING:
    from vlmcompress.models import VLM

Turn = dict[str, Any]  # {"role": ..., "content": [{"type": "image"} or {"type": "text", "text": ...}, ...]}
Media = dict[str, list[Any]]  # "image": images, "video": frames with their metadata, in the order of the conversation
Inputs = dict[str, Tensor]
IGNORED, TEXT, VISION, ANSWER = range(4)
PIXELS = frozenset({"pixel_values", "pixel_values_videos"})  # inputs with what a sample shows
MOST = 2 << 30
"""Most bytes of encoded samples to cache; others are encoded on each access."""
TOKEN = 64
"""Characters of a long token. A text with more than so many for each token of the context is not tokenized at all."""
SKIPPED = 0.1
"""The share of calibration samples that a model may always refuse, in addition to `Reading.skip_bad`."""


def encode(samples: Sequence[Sample], vlm: VLM, *, max_length: int | None = None) -> list[Inputs]:
    """Encode each sample with its answer as a batch of one: model inputs and the mask `modality [1, tokens]`.

    Args:
        max_length: refuse samples with more tokens; None: with more than the model's context. Nothing is truncated, as a model
            cannot read half an image.
    """
    features = Features(vlm)
    return [_encode_one(sample, features, max_length) for sample in samples]


@dataclass(frozen=True)
class Usable:
    """Inputs of the samples that a model accepts, the indices of these, and the skipped ones: name -> reason."""

    samples: list[Inputs]
    numbers: list[int]
    skipped: dict[str, str]


def encode_usable(
    samples: Sequence[Sample],
    vlm: VLM,
    source: str,
    *,
    max_length: int | None = None,
    reading: Reading = PLAIN,
    progress: Progress = silent,
) -> Usable:
    """Encode samples as `encode` does, skipping those that the model, its processor or its context does not accept.

    Args:
        source: name of the samples' source in messages.

    Raises:
        UserError: more than `SKIPPED` of them, and more than `reading` allows, are not accepted; or none is, as the model's own
            files are at fault.
    """
    features = Features(vlm)
    usable = Usable([], [], {})
    for number, sample in enumerate(samples):
        try:
            usable.samples.append(_encode_one(sample, features, max_length))
            usable.numbers.append(number)
        except BadSample as error:
            usable.skipped[sample.name] = str(error)
        progress("encoding samples", number + 1, len(samples))
    bad = len(usable.skipped)
    many = bad > SKIPPED * len(samples) and not reading.allows(bad, len(samples))
    # Samples that all fail alike point to the model's own files; a plain question shows whether these are at fault.
    if bad and (many or not usable.samples):
        try_processor_and_template(vlm)
        raise UserError(bad_samples_message(source, usable.skipped, len(samples), reading.skip_bad))
    return usable


def encode_prompt(sample: Sample, vlm: VLM) -> Inputs:
    """Encode a sample without its answer: model inputs ready for `model.generate`. Raises `BadSample` as `encode` does."""
    _require_short_texts(sample, vlm, None)
    inputs = _process(sample, sample.prompt(), _media(sample, vlm.processor), vlm, generation=True)
    _require_length(sample, inputs, vlm, None)
    _require_placeholders(sample, inputs, Features(vlm))
    return inputs


class Refused(BadSample):
    """A sample for which a part of the model raised an error: `PART` in messages, in the first of `FILES` that exists."""

    PART = ""
    FILES: tuple[str, ...] = ()
    NEEDS = ""


class TemplateRefused(Refused):
    """A sample for which the chat template raised an error."""

    PART = "the chat template"
    FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    NEEDS = ", which has to take content lists"


class ProcessorRefused(Refused):
    """A sample for which the processor raised an error."""

    PART = "the model's processor"
    FILES = ("preprocessor_config.json", "processor_config.json")


def try_processor_and_template(vlm: VLM) -> None:
    """Encode a plain question about a plain image.

    Raises:
        UserError: chat template or processor refuse it, or the processor's settings give another number of placeholders than
            the model has features.
    """
    noise = torch.randint(0, 256, (200, 300, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray(noise.numpy())
    try:
        encode_prompt(Sample("a test image", (image,), "What is shown?", origin="a test image"), vlm)
    except Refused as error:
        file = next((name for name in error.FILES if (vlm.path / name).is_file()), error.FILES[0])
        reason = error_text(error.__cause__ or error)
        raise UserError(
            f"{error.PART} refuses even a plain question about a plain image ({reason}); restore {vlm.path / file}"
            f"{error.NEEDS}"
        ) from error
    except BadSample:
        return  # other images may still work


class Features:
    """A model's numbers of visual features, or its errors for images that it cannot process; cached by shape."""

    def __init__(self, vlm: VLM):
        self.vlm = vlm
        self._results: dict[Any, int | str] = {}

    def __call__(self, inputs: Mapping[str, Tensor]) -> int | str:
        """The number of features for these inputs; a string: why the model cannot process them."""
        from vlmcompress import models  # which brings transformers along

        key = models.visual_shape(self.vlm, inputs)
        if key not in self._results:
            try:
                self._results[key] = models.visual_features(self.vlm, inputs)
            except MemoryError:
                raise
            except Exception as error:  # whatever the model's code raises
                self._results[key] = error_text(error)
        return self._results[key]


def chat_template(processor: Any) -> str:
    """The chat template of a processor or its tokenizer. Raises `UserError` if there is none."""
    for owner in (processor, processor.tokenizer):
        template = getattr(owner, "chat_template", None)
        template = template.get("default") if isinstance(template, dict) else template
        if template:
            return template
    raise UserError("the model has no chat template; copy chat_template.jinja of the original into its folder")


def _encode_one(sample: Sample, features: Features, max_length: int | None) -> Inputs:
    vlm = features.vlm
    _require_short_texts(sample, vlm, max_length)
    turns, media = sample.conversation(), _media(sample, vlm.processor)
    inputs = _process(sample, turns, media, vlm, generation=False)
    _require_length(sample, inputs, vlm, max_length)
    _require_placeholders(sample, inputs, features)
    inputs["modality"] = _modality(sample, turns, media, inputs, vlm)
    return inputs


def _limit(vlm: VLM, max_length: int | None) -> tuple[int, str] | None:
    """Most tokens of a prompt, and what says so; None if nothing does."""
    context = getattr(vlm.model.config.get_text_config(), "max_position_embeddings", None)
    if max_length is not None and (context is None or max_length < context):
        return max_length, "max_length"
    return (context, "context") if context else None


def _require_short_texts(sample: Sample, vlm: VLM, max_length: int | None) -> None:
    """Raise `BadSample` for texts that are too long whatever the tokenizer makes of them (`TOKEN`)."""
    count = sum(len(part.get("text", "")) for turn in sample.conversation() for part in turn["content"])
    if (limit := _limit(vlm, max_length)) and count > TOKEN * limit[0]:
        raise BadSample(
            f"{sample.name} has {count:,} characters, more than fit into the {limit[1]} of {limit[0]} tokens; shorten its "
            "text, or drop it"
        )


def _require_length(sample: Sample, inputs: Inputs, vlm: VLM, max_length: int | None) -> None:
    length, limit = inputs["input_ids"].shape[1], _limit(vlm, max_length)
    if limit and length > limit[0]:
        vision = int(_visual(inputs["input_ids"], vlm).sum())
        raise BadSample(
            f"{sample.name} has {length} tokens ({vision} of them visual), more than the {limit[1]} of {limit[0]}; "
            f"shrink its {'videos' if sample.videos else 'images'}, shorten its text, or drop it"
        )


def _media(sample: Sample, processor: Any) -> Media:
    """Decode a sample's images, and the frames of its videos that the model gets."""
    if sample.videos:
        video.require_video_support(processor, sample.name, bool(sample.images))
    return {"image": list(sample.images), "video": [media.frames(processor) for media in sample.videos]}


def _render(sample: Sample, turns: list[Turn], processor: Any, *, generation: bool) -> str:
    """Apply the chat template as text, and check that it shows the images, the videos and the texts."""
    marks = {"image": processor.image_token, "video": processor.video_token if sample.videos else None}
    questions = [p["text"] for t in turns if t["role"] == "user" for p in t["content"] if p["type"] == "text"]
    for kind, mark in marks.items():
        if mark and any(mark in text for text in questions):
            raise BadSample(f"{sample.name}: its text contains '{mark}', this model's mark for {kind}s; remove it")
    template = chat_template(processor)
    with foreign_errors(f"{sample.name}: {TemplateRefused.PART} refuses it", "; drop it", TemplateRefused):
        text = processor.apply_chat_template(turns, chat_template=template, add_generation_prompt=generation)
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


def _process(sample: Sample, turns: list[Turn], media: Media, vlm: VLM, *, generation: bool) -> Inputs:
    """Model inputs of some of a sample's turns: chat template and processor, with media in the order of the turns."""
    processor = vlm.processor
    _render(sample, turns, processor, generation=generation)
    rest = {"image": iter(media["image"]), "video": (frames for frames, _ in media["video"])}
    content = [
        {
            **turn,
            "content": [{**p, p["type"]: next(rest[p["type"]])} if p["type"] in rest else p for p in turn["content"]],
        }
        for turn in turns
    ]
    try:
        with foreign_errors(f"{sample.name}: {ProcessorRefused.PART} refuses it", "; drop it", ProcessorRefused):
            inputs = processor.apply_chat_template(
                content,
                chat_template=chat_template(processor),
                add_generation_prompt=generation,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs=video.arguments(media["video"]),
            )
    except BadSample as error:
        if remedy := _wrong_settings(vlm):
            raise UserError(f"{str(error).removesuffix('; drop it')}; {remedy}") from error
        raise
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def _require_placeholders(sample: Sample, inputs: Inputs, features: Features) -> None:
    """Check that all ids have a row in the embedding, and that there are as many placeholders as visual features."""
    vlm, ids = features.vlm, inputs["input_ids"]
    visual = _visual(ids, vlm)
    placeholders, pictures = int(visual.sum()), len(sample.images) + len(sample.videos)
    # Either the template shows no image, or config.json's id is not the one that the processor writes.
    if bool(placeholders) != bool(pictures):
        raise UserError(
            f"{sample.name}: {placeholders} placeholder tokens for {pictures} images or videos; {_image_token_remedy(ids, vlm)}"
        )
    embeddings: Any = vlm.model.get_input_embeddings()
    rows = embeddings.num_embeddings
    if (largest := int(ids.masked_fill(visual, 0).max())) >= rows:
        raise UserError(
            f"{sample.name}: the tokenizer gives id {largest}, and the model's embedding has {rows} rows; tokenizer and "
            "config.json do not belong together"
        )
    # From here on features are counted: the model's own code runs, with zeros for the tower's work (`models._placeholders`).
    if not pictures:
        return
    grids = [inputs[name].prod(-1).sum() for name in ("image_grid_thw", "video_grid_thw") if name in inputs]
    merged = vlm.processor.image_processor.merge_size**2 if len(grids) == 2 else 1
    if len(grids) == 2 and (ids == _image_token_id(vlm)).sum() != grids[0] // merged:
        raise BadSample(
            f"{sample.name} shows images and a video, which {type(vlm.processor).__name__} marks alike; give one of the two"
        )
    count = features(inputs)
    what = "videos" if sample.videos else "image" if pictures == 1 else "images"
    if isinstance(count, str):
        raise BadSample(f"{sample.name}: the model cannot take its {what} ({count}); drop it")
    if count != placeholders:
        problem = f"{sample.name}: {placeholders} placeholder tokens for {count} visual features"
        if remedy := _wrong_settings(vlm):
            raise UserError(f"{problem}; {remedy}")
        raise BadSample(f"{problem}; processor files and config.json do not belong together, or its {what} is too odd")


def _wrong_settings(vlm: VLM) -> str | None:
    from vlmcompress import models  # which brings transformers along

    return models.wrong_settings(vlm)


def _image_token_remedy(ids: Tensor, vlm: VLM) -> str:
    """Advice for a prompt with an image but without the placeholder that config.json names."""
    key, expected = vlm.spec.image_token, _image_token_id(vlm)
    for owner in (vlm.processor.tokenizer, vlm.processor):
        token = getattr(owner, "image_token_id", None)
        if isinstance(token, int) and token != expected and (ids == token).any():
            return f"the processor writes {token}, config.json's {key} is {expected}; set {key} to {token}"
    return "processor files and config.json do not belong together"


def _modality(sample: Sample, turns: list[Turn], media: Media, inputs: Inputs, vlm: VLM) -> Tensor:
    """The mask [1, tokens] that the module docstring describes."""
    ids = inputs["input_ids"][0]
    mask = torch.full_like(ids, TEXT, dtype=torch.uint8)
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            start, end = _answer_span(sample, turns, index, media, ids, vlm)
            # Position i predicts token i + 1, so the answer's positions are one to the left of its tokens.
            mask[start - 1 : end - 1] = ANSWER
    if sample.answer and sample.answer.strip() and not (mask == ANSWER).any():
        raise UserError(f"{sample.name}: the model's chat template does not show the answer; check the template")
    mask[_visual(ids, vlm)] = VISION
    if "attention_mask" in inputs:
        mask[inputs["attention_mask"][0] == 0] = IGNORED
    return mask[None]


def _answer_span(sample: Sample, turns: list[Turn], index: int, media: Media, ids: Tensor, vlm: VLM) -> tuple[int, int]:
    """First position and end, in `ids [tokens]`, of the text of turn `index` with the end-of-turn token that follows it."""
    # The conversation again, with a text in the turn that has no letter of the true one: what differs is the turn.
    text = "".join(part["text"] for part in turns[index]["content"] if part["type"] == "text")
    other = next(letter for letter in map(chr, range(ord("A"), 0x10000)) if letter not in text)
    altered = [*turns[:index], {**turns[index], "content": [{"type": "text", "text": other}]}, *turns[index + 1 :]]
    changed = _process(sample, altered, media, vlm, generation=False)["input_ids"][0]
    start = _agreement(ids, changed)
    end = len(ids) - min(_agreement(ids.flip(0), changed.flip(0)), len(ids) - start)
    if start == len(ids) == len(changed):
        return 0, 0  # the template does not show this turn
    # The model has to learn to stop, so the end token belongs to the answer; only blanks may precede it.
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
    """Mask of the ids that are placeholders of images or videos."""
    video_ids = [getattr(vlm.model.config, name, None) for name in ("video_token_id", "video_token_index")]
    return torch.isin(ids, ids.new_tensor([_image_token_id(vlm), *filter(None, video_ids)]))


def _image_token_id(vlm: VLM) -> int:
    return getattr(vlm.model.config, vlm.spec.image_token)


class Encoded(Sequence[Inputs]):
    """A sequence of samples' inputs as from `encode`, encoded on access, as a long run's inputs may not fit into memory.

    Args:
        max_length: see `encode`.
        most: most bytes of inputs to cache in memory.
    """

    def __init__(self, samples: Sequence[Sample], vlm: VLM, *, max_length: int | None = None, most: int = MOST) -> None:
        self._samples, self._features, self._max_length = samples, Features(vlm), max_length
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
            inputs = _encode_one(self._samples[index], self._features, self._max_length)
            # The first samples stay in memory; a cache that replaced them would never hit in passes from first to last.
            size = sum(value.nbytes for value in inputs.values())
            if size <= self._room:
                self._room -= size
                self._kept[index] = inputs
        return inputs

    def __iter__(self) -> Iterator[Inputs]:
        return (self[index] for index in range(len(self)))
