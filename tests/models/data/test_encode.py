"""Masks of every family against what the model does with the tokens, and what users get to read when it can't be done."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from tests.kit.families import FAMILIES
from tests.kit.pictures import film, picture, refused
from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data.encode import ANSWER, TEXT, VISION, encode, encode_prompt, encode_usable
from vlmcompress.models.data.provenance import provenance
from vlmcompress.models.data.samples import Sample
from vlmcompress.models.data.video import FRAMES_FILE, Video

pytestmark = pytest.mark.representatives

PAIR = (picture(90, 60), picture(50, 70))
PART = {"type": "image"}


def turn(role: str, *parts: str | dict) -> dict:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


SAMPLES = [
    Sample("two images", PAIR, "what?", "cat"),
    Sample("no answer", PAIR[:1], "what?"),
    Sample("text only", (), "2+2?", "4"),
    Sample("empty answer", PAIR[:1], "say nothing", ""),
    Sample("image last", PAIR[:1], "", "dog", messages=[turn("user", "look: ", PART)]),
    Sample(
        "several turns",
        PAIR,
        "now?",
        "assistant\n",  # like the mark of a turn
        messages=[
            turn("system", "be brief"),
            turn("user", PART, "first"),
            turn("assistant", "yes"),
            turn("user", "now?", PART),
        ],
    ),
    Sample("unusual text", PAIR[:1], "größe\n\n  日本 ", " é "),
]


def with_template(vlm: VLM, template: str | None) -> VLM:
    """The same model with another chat template."""
    import copy

    processor = copy.copy(vlm.processor)
    processor.chat_template = template
    processor.tokenizer = copy.deepcopy(vlm.processor.tokenizer)
    processor.tokenizer.chat_template = None
    return dataclasses.replace(vlm, processor=processor)


def visual_positions(vlm: VLM, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Oracle [tokens]: where the decoder is fed something else than the embedding of the token."""
    positions: list[torch.Tensor] = []
    decoder = (
        vlm.model.model.language_model if hasattr(vlm.model.model, "language_model") else vlm.model.model.text_model
    )
    hook = decoder.register_forward_pre_hook(
        lambda _module, _args, kwargs: positions.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    try:
        vlm.model(**inputs)
    finally:
        hook.remove()
    plain = vlm.model.get_input_embeddings()(inputs["input_ids"])
    return (positions[0] != plain).any(-1)[0]


def answer_positions(vlm: VLM, ids: torch.Tensor) -> torch.Tensor:
    """Oracle [tokens]: read token by token; between the header of an assistant's turn and the token that ends it."""
    inside, header, positions = False, "", []
    for index in ids.tolist():
        piece = vlm.processor.tokenizer.decode([index])
        positions.append(inside)
        if piece == "<|im_end|>":
            inside = False
        elif piece == "<|im_start|>":
            header = piece
        elif header:
            header += piece
            if piece == "\n":
                inside, header = header == "<|im_start|>assistant\n", ""
    return torch.tensor(positions)


def test_masks(family, loaded):
    vlm = loaded(family)
    for sample, batch in zip(SAMPLES, encode(SAMPLES, vlm), strict=True):
        mask = batch.pop("modality")
        assert mask.dtype == torch.uint8 and mask.shape == batch["input_ids"].shape, sample.id
        assert ((mask[0] == VISION) == visual_positions(vlm, batch)).all(), sample.id
        answers = answer_positions(vlm, batch["input_ids"][0])
        assert not answers[0] and ((mask[0] == ANSWER) == answers.roll(-1)).all(), sample.id  # each is read one before
        assert answers.any() == (sample.answer is not None)
        assert ((mask == TEXT) | (mask == VISION) | (mask == ANSWER)).all()


FRAMES = 12  # at 8 a second; no processor's rule takes them all
TOLD = dict.fromkeys(("qwen2-5-vl", "qwen2-vl", "exaone4-5"), {"fps": 2}) | dict.fromkeys(
    ("llava-onevision", "internvl", "gemma4", "gemma4-moe", "gemma4-unified"), {"num_frames": FRAMES}
)  # settings that a processor needs; Gemma 4's would take more frames than there are


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=() if name in ("llava", "qwen2-5-vl") else pytest.mark.slow) for name in FAMILIES]
)
def test_videos(kind, loaded, tmp_path):
    """Oracles: the processor itself, given all frames to choose from, with vLLM's rate or number where it has none. And
    what the decoder is fed: the mask covers videos, in files or as frames, next to images or without."""
    vlm, file = loaded(kind), film(tmp_path / "film.mp4", FRAMES)
    videos = [Video(file, "x"), Video(file.read_bytes(), "x"), Video([picture(84, 56, seed) for seed in range(4)], "x")]
    samples = [Sample("a", (), "what?", "cat", videos=(video,)) for video in videos]
    mixed = Sample("b", PAIR[:1], "what?", "cat", videos=tuple(videos[:1]))
    if getattr(vlm.processor, "video_processor", None) is None:
        return refused(lambda: encode(samples, vlm), f"sample 'a' shows a video, which {type(vlm.processor).__name__}")
    if kind in ("smolvlm", "glm-ocr") or kind.startswith("glm4v"):
        refused(lambda: encode([mixed], vlm), "shows images and a video", "give one of the two")
    else:
        samples.append(mixed)
    encoded = encode(samples, vlm)
    assert all((encoded[0][name] == value).all() for name, value in encoded[1].items())
    content = [{"type": "video", "video": np.stack(read(file))}, {"type": "text", "text": "what?"}]
    turns = [turn("user"), turn("assistant", "cat")]
    turns[0]["content"] = content
    metadata = VideoMetadata(FRAMES, fps=8.0, width=84, height=56, duration=FRAMES / 8)
    expected = vlm.processor.apply_chat_template(
        turns,
        chat_template=vlm.processor.chat_template,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"do_sample_frames": True, "video_metadata": [metadata], **TOLD.get(kind, {})},
    )
    for name, value in expected.items():
        torch.testing.assert_close(encoded[0][name], value, msg=name)
    for sample, batch in zip(samples, encoded, strict=True):
        mask = batch.pop("modality")[0]
        assert ((mask == VISION) == visual_positions(vlm, batch)).all() and (mask == VISION).any(), sample.id
        assert (mask == ANSWER).any()


def test_a_list_of_frames_is_a_file_for_engines(tmp_path):
    """It holds the same pixels, as a frame a second, under the name of its content."""
    video = Video([picture(84, 56, seed) for seed in range(4)], "x")
    file = video.save(tmp_path)
    assert file == video.save(tmp_path) and file.suffix == FRAMES_FILE and file.stem == video.digest().hex()[:32]
    frames, metadata = video.frames(None)
    again, _ = Video(file, "x").frames(None)
    assert (frames == again).all() and frames.shape == (4, 56, 84, 3) and metadata.sampled_fps == 1
    refused(lambda: Video([picture(8, 8, 0)] * 33, "x").save(tmp_path), "x: video has 33 frames, and engines take 32")
    refused(lambda: Video([picture(8, 8, 0), picture(9, 8, 0)], "x").save(tmp_path), "2 frames, not of one size")
    refused(lambda: Video([], "x").save(tmp_path), "0 frames")


def read(file: Path) -> list[np.ndarray]:
    """All frames of a video, in RGB."""
    video = cv2.VideoCapture(str(file))
    frames = [cv2.cvtColor(video.read()[1], cv2.COLOR_BGR2RGB) for _ in range(FRAMES)]
    assert not video.read()[0]
    return frames


def test_long_videos_are_thinned_as_vllm_does(loaded, tmp_path):
    """Of a processor without a rule. Oracle: the brightness of the frames, which shows where in the video they are."""
    frames, metadata = Video(film(tmp_path / "film.mp4", 100), "x").frames(loaded("llava-onevision").processor)
    assert len(frames) == 32 and metadata.frames_indices == np.linspace(0, 99, 32, dtype=int).tolist()
    assert [round((pixels[0, -1].mean() - 20) / 2) for pixels in frames] == pytest.approx(
        metadata.frames_indices, abs=2
    )


def test_videos_that_cannot_be_shown(loaded, tmp_path, monkeypatch):
    vlm, damaged = loaded("qwen3-vl"), tmp_path / "damaged.mp4"
    damaged.write_bytes(film(tmp_path / "film.mp4", 9).read_bytes()[:400])

    def say(source, *message):
        refused(
            lambda: encode([Sample("a", (), "what?", videos=(Video(source, "row 3"),))], vlm), "row 3: video", *message
        )

    say(damaged, "damaged.mp4' cannot be decoded")
    say([picture(84, 56), picture(56, 84)], "2 frames, not of one size")
    monkeypatch.setattr("vlmcompress.models.data.video.MOST", 1000)
    say(tmp_path / "film.mp4", "frames of 84x56 take", "make the video smaller")
    silent = with_template(vlm, vlm.processor.chat_template.replace("<|video_pad|>", ""))
    sample = Sample("a", (), "what?", videos=(Video([picture(84, 56)] * 2, "x"),))
    refused(lambda: encode([sample], silent), "shows 0 of 1 videos")


def test_prompt_for_generation(family, loaded):
    """Oracle: it is the encoding with the answer, up to the answer; and the model generates from it."""
    vlm = loaded(family)
    prompt = encode_prompt(SAMPLES[0], vlm)
    whole = encode([SAMPLES[0]], vlm)[0]
    before = 1 + int((whole["modality"][0] == ANSWER).nonzero()[0])
    assert (prompt["input_ids"] == whole["input_ids"][:, :before]).all() and prompt["input_ids"].shape[1] == before
    assert vlm.model.generate(**prompt, max_new_tokens=2, min_new_tokens=2).shape[1] == before + 2


@pytest.mark.parametrize("size", [(1, 1), (1, 90), (3, 3), (300, 7)])
def test_images_of_any_size(loaded, size):
    for name in ("llava", "qwen2-5-vl", "idefics3"):
        vlm = loaded(name)
        batch = encode([Sample("a", (Image.new("RGB", size),), "what?", "x")], vlm)[0]
        mask = batch.pop("modality")[0]
        assert ((mask == VISION) == visual_positions(vlm, batch)).all() and (mask == VISION).any()


CHAT = (
    "{%- for m in messages %}{{ m.role }}:{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}"
    "{% endfor %};{% endfor %}"
)


def answered(vlm: VLM, sample: Sample) -> str:
    batch = encode([sample], vlm)[0]
    return vlm.processor.tokenizer.decode(batch["input_ids"][0, 1:][batch["modality"][0, :-1] == ANSWER])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The prompt for an answer opens a thought that the finished turn does not have.
        (CHAT + "{% if add_generation_prompt %}assistant:<think>{% endif %}", "cat"),
        # No generation prompt at all.
        (CHAT, "cat"),
        # The prompt changes once the answer is there.
        ("{{ messages|length }};" + CHAT, "cat"),
        # The end of a turn is white space and a token; what follows is no answer.
        (CHAT.replace(";", " <|im_end|>\n"), "cat <|im_end|>"),
        # The next token is a special one, but does not end the turn.
        (CHAT.replace(";", "<|im_start|>"), "cat"),
    ],
)
def test_templates_of_all_kinds(loaded, template, expected):
    vlm = with_template(loaded("llava"), template)
    assert answered(vlm, Sample("a", PAIR, "cat or dog?", "cat")) == expected


def test_template_of_the_tokenizer_is_used(loaded):
    vlm = with_template(loaded("llava"), None)
    vlm.processor.tokenizer.chat_template = CHAT
    assert answered(vlm, SAMPLES[0]) == "cat"
    vlm.processor.tokenizer.chat_template = None
    refused(lambda: encode(SAMPLES[:1], vlm), "no chat template", "chat_template.jinja")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "shows 0 of 2 images"),
        ("{{ '<image>' * 2 }}", "does not show its text"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (CHAT.replace("messages", "messages[:1]"), "does not show the answer"),
    ],
)
def test_templates_that_do_not_fit(loaded, template, message):
    refused(lambda: encode(SAMPLES[:1], with_template(loaded("llava"), template)), "sample 'two images'", message)


def test_placeholder_in_the_text(family, loaded):
    vlm = loaded(family)
    text = f"what is {vlm.processor.image_token}?"
    refused(lambda: encode([Sample("a", PAIR[:1], text, origin="x.jsonl line 3")], vlm), "x.jsonl line 3", "remove it")


def test_too_long(loaded):
    vlm = loaded("llava")
    long = Sample("a", PAIR[:1], "x" * 3000, "y", origin="x.jsonl line 3")
    refused(lambda: encode([long], vlm), "x.jsonl line 3", "16 of them visual", "context of 2048", "drop it")
    refused(lambda: encode(SAMPLES[:1], vlm, max_length=20), "max_length of 20", "32 of them visual")
    endless = dataclasses.replace(long, question="x" * 10**6)  # which no tokenizer is given
    refused(lambda: encode([endless], vlm), "1,000,001 characters, more than fit into the context of 2048 tokens")
    refused(lambda: encode_prompt(long, vlm), "x.jsonl line 3", "context of 2048")


def test_limits_of_another_tool_in_the_tokenizer(checkpoint, loaded, tmp_path):
    """Tools that calibrate leave truncation and padding in tokenizer.json, which transformers' processors obey."""
    folder = Path(shutil.copytree(checkpoint("qwen2-5-vl"), tmp_path / "model"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 400}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    vlm = loaded("qwen2-5-vl")
    limited = dataclasses.replace(vlm, processor=models.load_processor(folder))
    for expected, actual in zip(encode(SAMPLES, vlm), encode(SAMPLES, limited), strict=True):
        assert all(torch.equal(expected[name], actual[name]) for name in expected | actual)
    assert [line.partition(",")[0] for line in models.asides(folder)] == [
        "tokenizer.json has another tool's truncation",
        "tokenizer.json has another tool's padding",
    ]


@pytest.mark.parametrize("part", ["template", "processor"])
def test_where_a_model_refuses_everything_its_file_is_named(checkpoint, tmp_path, part):
    """No sample is blamed for it, also where there is but one."""
    folder = Path(shutil.copytree(checkpoint("qwen2-5-vl"), tmp_path / "model"))
    file = folder / {"template": "chat_template.jinja", "processor": "processor_config.json"}[part]
    if part == "template":
        file.write_text("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
        message = "chat template refuses even a plain question about a plain image (can only concatenate str"
    else:  # as transformers 4.47 to 4.50 saved it
        content = json.loads(file.read_text())
        content["image_processor"]["size"] = {"min_pixels": 3136, "max_pixels": 28224}
        file.write_text(json.dumps(content))
        message = (
            "processor refuses even a plain question about a plain image (`size` dict must contain 'shortest_edge'"
        )
    vlm = models.load(folder)
    for samples in (SAMPLES[:1], SAMPLES):
        refused(lambda samples=samples: encode_usable(samples, vlm, "x.jsonl"), message, f"restore {file}")


def test_image_that_the_processor_refuses(loaded):
    thin = Sample("a", (Image.new("RGB", (1000, 1)),), "what?", origin="x.jsonl line 3")
    refused(lambda: encode([thin], loaded("qwen2-5-vl")), "x.jsonl line 3", "aspect ratio", "drop it")


def test_config_and_processor_that_disagree(loaded):
    vlm = loaded("qwen2-5-vl")
    other = dataclasses.replace(vlm, spec=dataclasses.replace(vlm.spec, image_token="video_token_id"))
    refused(lambda: encode(SAMPLES[:1], other), "0 placeholder tokens for 2 images", "set video_token_id to 261")


def test_provenance(loaded):
    """Oracle: counts from the masks; the hash changes with each part of the data and with nothing else."""
    vlm = loaded("llava")
    batches = encode(SAMPLES, vlm)
    facts = provenance(SAMPLES, batches, "/somewhere/data.jsonl", seed=3, processor=vlm.processor)
    masks = torch.cat([batch["modality"][0] for batch in batches])
    assert facts["source"] == "data.jsonl" and facts["seed"] == 3
    different = {(image.size, image.tobytes()) for sample in SAMPLES for image in sample.images}
    output = sum(len(sample.images) for sample in SAMPLES)
    assert (facts["samples"], facts["images"], output) == (7, len(different), 8)
    assert provenance(SAMPLES * 3, batches * 3, "x")["images"] == len(different), "the same images again"
    assert facts["tokens"] == {n: int((masks == i).sum()) for i, n in enumerate(("text", "vision", "answer"), 1)}
    assert facts["visual_share"] == pytest.approx(8 * 16 / len(masks), abs=1e-4)

    def hash_of(**changes) -> str:
        return provenance([dataclasses.replace(SAMPLES[0], **changes)], [], "x")["sha256"]

    same = hash_of()
    assert same == hash_of(id="b", origin="elsewhere", family="f", images=tuple(image.copy() for image in PAIR))
    changed = [hash_of(question="x"), hash_of(answer="x"), hash_of(answer=None), hash_of(images=PAIR[::-1])]
    assert len({same, *changed}) == 5
