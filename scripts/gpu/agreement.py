"""First tokens of vLLM and of transformers, which computes with the dequantized weights, compared by token.

The figure is the mean absolute difference of log-probabilities (nats) over the tokens that vLLM finds most likely. Of random
models they are a nat apart where something is wrong, and hundredths where only the arithmetic differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def reference(folder: Path, images: Sequence[Path], question: str) -> list[Any]:
    """Log-probabilities `[vocabulary]` of the first answer token for each picture, by transformers."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlmcompress import models

    device, logprobs = "cuda" if torch.cuda.is_available() else "cpu", []
    with models.quiet():
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval().to(device)
        processor = AutoProcessor.from_pretrained(folder)
    for path in images:
        with Image.open(path) as image:
            content = [{"type": "image", "image": image.convert("RGB")}, {"type": "text", "text": question}]
            inputs = processor.apply_chat_template(
                [[{"role": "user", "content": content}]],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            ).to(device, dtype=model.dtype)
        with torch.inference_mode():
            logprobs.append(model(**inputs).logits[0, -1].float().log_softmax(-1).cpu())
    return logprobs


def apart(first: Sequence[dict[str, float]], expected: Sequence[Any]) -> float:
    """Mean absolute difference in nats of vLLM's most likely first tokens, `{token id: log-probability}` for each picture."""
    gaps = [
        abs(logprob - float(whole[int(token)]))
        for top, whole in zip(first, expected, strict=True)
        for token, logprob in top.items()
    ]
    return sum(gaps) / len(gaps)


def between(first: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> float:
    """Mean absolute difference in nats of the tokens that two runs of vLLM both report, for the same pictures."""
    gaps = [
        abs(logprob - there[token])
        for here, there in zip(first, other, strict=True)
        for token, logprob in here.items()
        if token in there
    ]
    return sum(gaps) / len(gaps) if gaps else float("inf")
