"""Run auto-round's own tuning on the language model of a VLM, as its users do, to compare with.

AutoRound (arXiv 2309.05516) learns, block after block, by the sign of the gradient of the block's output error, how each weight
rounds and where its group's range ends. Ours is only what goes in: the texts (of the calibration samples, those without images,
one after another, cut into pieces of equal length, as auto-round takes them; its own default for a VLM is text, too) and the
number format. `iters` is 200 by default there, and 50 in its light setting. What comes out are weights on the grid, in place.

It takes hours where our methods take minutes, and does not go on where it was stopped; only what is finished is kept.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from teacher_forcing import language_model
from torch import Tensor

from vlmcompress.models import VLM

LENGTH = 128  # tokens of a piece of text
BATCH = 8  # pieces a step


def run_auto_round(
    vlm: VLM,
    batches: list[dict[str, Tensor]],
    kept: Path,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    iters: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Quantize the decoder of `vlm.model` in place, and keep its weights in the file `kept`, or read them there.

    Raises ValueError where the samples have no text for a single step.
    """
    inner = language_model(vlm)
    if kept.exists():
        found = torch.load(kept)
    else:
        pieces = cut(batches)
        if len(pieces) < BATCH:
            raise ValueError(f"auto-round needs {BATCH} pieces of {LENGTH} tokens of text, and there are {len(pieces)}")
        start = time.process_time()
        tune(vlm, pieces, bits=bits, group_size=group_size, sym=symmetric, iters=iters, seed=seed)
        facts = {"seconds": round(time.process_time() - start, 1), "pieces": len(pieces), "iters": iters}
        found = {"facts": facts, "weights": inner.layers.state_dict()}
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept)
    inner.layers.load_state_dict(found["weights"])
    return found["facts"]


def cut(batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Join the samples without images and cut them into pieces `[1, LENGTH]`; what is left over at the end is dropped."""
    texts = [batch["input_ids"][0] for batch in batches if "pixel_values" not in batch]
    joined = torch.cat(texts) if texts else torch.zeros(0, dtype=torch.long)
    return list(joined[: len(joined) // LENGTH * LENGTH].view(-1, 1, LENGTH))


def tune(vlm: VLM, pieces: list[Tensor], *, iters: int, seed: int, **grid: Any) -> None:
    """Tune the decoder's weights in place by auto-round."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM

    inner = language_model(vlm)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(inner.config)
    model.model, model.lm_head = inner, vlm.model.get_output_embeddings()
    AutoRound(
        model.eval(),
        tokenizer=vlm.processor.tokenizer,
        iters=iters,
        nsamples=len(pieces),
        seqlen=LENGTH,
        batch_size=BATCH,
        dataset=pieces,
        device_map="cpu",
        low_cpu_mem_usage=False,
        enable_torch_compile=False,
        seed=seed,
        **grid,
    ).quantize()
