"""What demo-smol can do, and whether its language stayed: the figures of its card."""

from collections.abc import Sequence
from math import exp
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.demo.measure import exact_match, load_rows
from eval.english import paragraphs

from . import package

TEXTS = 40


def measured(cache: Path, folder: Path, split: str, questions: int | None = None) -> dict[str, object]:
    """Measure the checkpoint in ``folder`` on a split: exact match by family on its first ``questions`` (default: all), and
    perplexity next to that of the package in ``cache``; arithmetic is float32."""
    ours = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor, (theirs, _) = AutoProcessor.from_pretrained(folder), package.load(cache)
    ids = [torch.tensor(processor.tokenizer(text)["input_ids"])[None] for text in paragraphs(split)[:TEXTS]]
    before, after = perplexity(theirs, ids), perplexity(ours, ids)
    figures = {"perplexity": round(after, 2), "of the package": round(before, 2), "ratio": round(after / before, 4)}
    return {"split": split, **exact_match(ours, processor, load_rows("llava", split)[:questions]), **figures}


@torch.inference_mode()
def perplexity(model: torch.nn.Module, texts: Sequence[torch.Tensor]) -> float:
    """exp of the mean loss, in nats, of all tokens of ``texts`` (each [1, length]) but the first of each."""
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() * (ids.shape[1] - 1) for ids in texts]
    return exp(sum(losses) / sum(ids.shape[1] - 1 for ids in texts))
