"""Exact-match accuracy of a checkpoint on a frozen split, by family, with transformers' own greedy generation."""

import io
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlmcompress.models.data.video import arguments
from vlmcompress.models.devices import float_products

DATA = Path(__file__).parent / "data"


def load_rows(variant: str, split: str) -> list[dict]:
    """Load the rows of a frozen split, as written by ``eval.world.freeze``."""
    return pq.read_table(DATA / variant / f"{split}.parquet").to_pylist()


def messages(row: dict) -> list[dict]:
    """One user turn in the form that chat templates take; a row's `video` are its frames, `[frames, height, width, 3]`."""
    images = [{"type": "image", "image": Image.open(io.BytesIO(data)).convert("RGB")} for data in row["image"]]
    videos = [{"type": "video", "video": row["video"]}] if "video" in row else []
    return [{"role": "user", "content": [*images, *videos, {"type": "text", "text": row["question"]}]}]


@torch.inference_mode()
def answers(model, processor, rows: list[dict], size: int = 20, tokens: int = 12) -> list[str]:
    """Generate greedy answers of at most `tokens`, in batches of questions with equally many and equally large images."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]["image"]), _pixels(rows[i]), len(rows[i]["question"])))
    texts = [""] * len(rows)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        films = {i: rows[i]["video"].frames(processor) for i in chosen if "video" in rows[i]}
        conversations = [messages(rows[i] | ({"video": films[i][0]} if i in films else {})) for i in chosen]
        inputs = processor.apply_chat_template(
            conversations, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"padding": True, **arguments(list(films.values()))},
        )  # fmt: skip
        inputs = inputs.to(model.device)
        for name in ("pixel_values", "pixel_values_videos"):
            if name in inputs:
                inputs[name] = inputs[name].to(model.dtype)
        with float_products(model):
            out = model.generate(**inputs, do_sample=False, max_new_tokens=tokens)[:, inputs["input_ids"].shape[1] :]
        for i, text in zip(chosen, processor.batch_decode(out, skip_special_tokens=True), strict=True):
            texts[i] = text.strip()
    return texts


def _pixels(row: dict) -> tuple[int, int]:
    return Image.open(io.BytesIO(row["image"][0])).size if row["image"] else (0, 0)


def measure(folder: Path, rows: list[dict], dtype: torch.dtype | None = None) -> dict:
    """Measure the accuracy of a checkpoint, overall and by family; `dtype` of the arithmetic: by default the checkpoint's."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype or "auto").eval()
    return exact_match(model, AutoProcessor.from_pretrained(folder), rows)


def exact_match(model, processor, rows: list[dict]) -> dict:
    """Ask a model all rows; return how many there are and the share that it answers exactly, overall and by family."""
    right: dict[str, list[bool]] = defaultdict(list)
    for row, answer in zip(rows, answers(model, processor, rows), strict=True):
        right[row["family"]].append(answer == row["answer"])
    families = {family: round(sum(hits) / len(hits), 4) for family, hits in right.items()}
    overall = sum(map(sum, right.values())) / len(rows)
    return {"rows": len(rows), "overall": round(overall, 4), "families": families}
