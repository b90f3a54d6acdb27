"""Run auto-round's own tuning on the language model of a VLM, to compare with.

AutoRound (arXiv 2309.05516) learns, block after block, by the sign of the gradient of the block's output error, how each weight
rounds and where its group's range ends. Ours is only what goes in: the calibration samples that all methods get, images with
them, and the number format. As these differ in length, a step takes eight of them one after another and adds up their
gradients, where auto-round takes eight of one length at once; each step sees the same number. `iters` is 200 there by default,
and 50 in its light setting. What comes out are weights on the grid, in place.

It takes hours where our methods take minutes, and does not go on where it was stopped; only what is finished is kept.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from teacher_forcing import language_model
from torch import Tensor

from vlmcompress import models
from vlmcompress.models import VLM

STEP = 8  # samples a step


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
    """Quantize the decoder of `vlm.model` in place, and keep its weights in the file `kept`, or read them there."""
    layers = language_model(vlm).layers
    if kept.exists():
        tuned = torch.load(kept)
    else:
        start = time.process_time()
        tune(vlm, batches, bits=bits, group_size=group_size, sym=symmetric, iters=iters, seed=seed)
        facts = {"seconds": round(time.process_time() - start, 1), "iters": iters}
        tuned = {"facts": facts, "weights": layers.state_dict()}
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tuned, kept)
    layers.load_state_dict(tuned["weights"])
    return tuned["facts"]


def tune(vlm: VLM, batches: list[dict[str, Tensor]], *, iters: int, seed: int, **grid: Any) -> None:
    """Tune the decoder's weights in place by auto-round."""
    from auto_round import AutoRound

    AutoRound(
        vlm.model,
        tokenizer=vlm.processor.tokenizer,
        processor=vlm.processor,
        iters=iters,
        nsamples=len(batches),
        batch_size=1,
        amp=False,
        gradient_accumulate_steps=STEP,
        dataset=[{name: value for name, value in batch.items() if name != "modality"} for batch in batches],
        to_quant_block_names=[models.decoder_layers(vlm.model, vlm.spec)],
        device_map="cpu",
        low_cpu_mem_usage=False,
        enable_torch_compile=False,
        seed=seed,
        **grid,
    ).quantize()
