"""What demo-smol can do: exact match on the world's questions, and its perplexity on English beside the package's model."""

from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, AutoProcessor

from eval.english import paragraphs

TOKENS = 320  # of a text, at most


@torch.inference_mode()
def perplexity(model: torch.nn.Module, texts: list[list[int]]) -> float:
    """Perplexity of a causal language model on `texts`, lists of token ids; the first token of each is given."""
    total, count = 0.0, 0
    for ids in texts:
        tokens = torch.tensor([ids])
        logits = model(input_ids=tokens).logits[0, :-1].float()
        total += F.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
        count += len(ids) - 1
    return float(torch.tensor(total / count).exp())


def english(tokenizer, split: str, number: int) -> list[list[int]]:
    """The token ids of the first texts of a split."""
    return [tokenizer(text)["input_ids"][:TOKENS] for text in paragraphs(split)[:number]]


def language_change(folder: Path, cache: Path, split: str, number: int) -> dict[str, float]:
    """Perplexity of the checkpoint in `folder` and of the package's model in `cache` on the same English."""
    from . import package

    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    texts = english(tokenizer, split, number)
    found = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return {"package": perplexity(package.load(cache)[0].eval(), texts), "demo_smol": perplexity(found, texts)}
