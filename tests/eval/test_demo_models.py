"""The shipped demo models: complete checkpoints of real architectures that know their world."""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.demo.learner import qwen_patches
from eval.demo.measure import answers, load_rows, messages
from eval.demo.sequences import Writer
from eval.demo.text import build_tokenizer
from tests.kit.places import DEMOS

KINDS = ("qwen", "llava")
CLASSES = {"qwen": "Qwen2_5_VLForConditionalGeneration", "llava": "LlavaForConditionalGeneration"}
HUB_PREFIXES = {
    "qwen": {"visual", "model", "lm_head"},
    "llava": {
        "vision_tower.vision_model", "multi_modal_projector.linear_1", "multi_modal_projector.linear_2",
        "language_model.model", "language_model.lm_head",
    },
}  # fmt: skip


def folder(kind: str) -> Path:
    return DEMOS / f"demo-{kind}"


@pytest.fixture(scope="module", params=KINDS)
def loaded(request):
    torch.set_num_threads(1)
    model, info = AutoModelForImageTextToText.from_pretrained(folder(request.param), output_loading_info=True)
    return request.param, model.eval(), AutoProcessor.from_pretrained(folder(request.param)), info


def test_checkpoint_is_complete_and_in_bf16(loaded):
    kind, model, _, info = loaded
    assert type(model).__name__ == CLASSES[kind] and model.dtype == torch.bfloat16
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_on_disk_are_the_hubs_and_the_size_is_small(kind):
    path = folder(kind) / "model.safetensors"
    assert path.stat().st_size < 10e6
    with safe_open(path, "pt") as tensors:
        names = list(tensors.keys())
    depth = 1 if kind == "qwen" else 2
    assert {".".join(name.split(".")[:depth]) for name in names} == HUB_PREFIXES[kind]
    config = json.loads((folder(kind) / "config.json").read_text())
    assert config["architectures"] == [CLASSES[kind]] and "auto_map" not in config


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_dimension_of_the_language_model_divides_by_128(kind):
    text = json.loads((folder(kind) / "config.json").read_text())["text_config"]
    heads, groups = text["num_attention_heads"], text["num_key_value_heads"]
    width = text["hidden_size"] // heads
    sizes = (text["hidden_size"], text["intermediate_size"], heads * width, groups * width, text["vocab_size"])
    assert all(size % 128 == 0 for size in sizes) and groups < heads


def test_training_sequences_are_what_the_chat_template_writes(loaded):
    kind, _, processor, _ = loaded
    writer = Writer(kind, build_tokenizer(kind))
    for row in load_rows(kind, "calibration")[:20]:
        inputs = processor.apply_chat_template(
            messages(row), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        sizes = [Image.open(io.BytesIO(data)).size for data in row["image"]]
        written = writer.write([(h // 16, w // 16) for w, h in sizes], [(row["question"], row["answer"])])
        prompt = written.ids[: written.labels.index(next(x for x in written.labels if x != -100))]
        assert inputs["input_ids"][0].tolist() == prompt


def test_any_text_tokenizes_and_comes_back(loaded):
    tokenizer = loaded[2].tokenizer
    for text in ("Où est l'étoile ? 星 🙂\n\tx = 3.14", "Where is the star?", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_templates_take_system_turns_and_conversations(loaded):
    kind, _, processor, _ = loaded
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Where is the star?"}]},
        {"role": "assistant", "content": "row 1 column 1"},
        {"role": "user", "content": "What is 1 plus 2?"},
    ]
    text = processor.apply_chat_template(talk, add_generation_prompt=True)
    assert text.count("<|image_pad|>" if kind == "qwen" else "<image>") == 1 and "row 1 column 1" in text
    assert text.endswith("<|im_start|>assistant\n" if kind == "qwen" else "ASSISTANT:")


def test_patches_are_those_of_the_image_processor():
    processor = AutoProcessor.from_pretrained(folder("qwen"))
    row = next(r for r in load_rows("qwen", "calibration") if r["image"])
    image = Image.open(io.BytesIO(row["image"][0])).convert("RGB")
    processed = processor.image_processor([image], return_tensors="pt")
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(1, image.height, image.width, 3)
    patches, grids = qwen_patches(pixels)
    torch.testing.assert_close(patches, processed["pixel_values"], atol=1e-5, rtol=0)
    assert grids.tolist() == processed["image_grid_thw"].tolist()


def test_demo_models_answer_unseen_questions(loaded):
    kind, model, processor, _ = loaded
    rows = load_rows(kind, "test")[:30]
    right = [answer == row["answer"] for answer, row in zip(answers(model, processor, rows), rows, strict=True)]
    assert sum(right) >= 0.8 * len(rows)
