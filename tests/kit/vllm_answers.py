"""Answers of vLLM about one and two images, and what its model looks like; runs where `engine_worker.py` does."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.kit.inputs import QUESTION, images


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"folder", "max_tokens"}` -> prompt and generated tokens for one and two images, linear modules, fused layers, scales.

    Scales are those of each attention's keys and values. `processor`: settings of the image processor in the requests.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"],
        dtype=job.get("dtype", "auto"),
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        limit_mm_per_prompt={"image": 2},
    )
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
    answers = []
    for count in (1, 2):
        parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images(count)]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        (out,) = llm.chat(messages, sampling, use_tqdm=False, mm_processor_kwargs=job.get("processor"))
        answers.append({"prompt": list(out.prompt_token_ids), "answer": list(out.outputs[0].token_ids)})
    (about,) = llm.apply_model(describe)
    return {"answers": answers, **about}


def describe(model: Any) -> dict[str, Any]:
    """Names of the linear layers in the engine, which it fuses into which, scales of keys and values, the tower's attention."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    named = dict(model.named_modules())
    fused: dict[str, list[str]] = {}
    for part in named.values():  # the language model inside has a mapping of its own
        fused |= getattr(part, "packed_modules_mapping", {})
    attention = [
        part for name, part in named.items() if name.endswith("self_attn.attn") and hasattr(part, "_k_scale_float")
    ]
    return {
        "modules": [name for name, part in named.items() if isinstance(part, LinearBase | ParallelLMHead)],
        "fused": fused,
        "kv_scales": [(part._k_scale_float, part._v_scale_float) for part in attention],
    }


def data_url(image: Any) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def gap(model: torch.nn.Module, batch: dict[str, torch.Tensor], answer: list[int]) -> float:
    """How far the tokens of an answer are at most from transformers' best, in log-probability."""
    tokens = torch.tensor([answer])
    batch = batch | {"input_ids": torch.cat([batch["input_ids"], tokens], 1)}
    for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in batch:
            batch[name] = torch.cat([batch[name], torch.full_like(tokens, int(name == "attention_mask"))], 1)
    with torch.no_grad():
        logp = model(**batch).logits[0, -len(answer) - 1 : -1].float().log_softmax(-1)
    return float((logp.max(-1).values - logp.gather(1, tokens.T)[:, 0]).max())


def jobs(folders: Iterable[Path], max_tokens: int = 3) -> list[dict[str, Any]]:
    """One for each checkpoint."""
    return [{"folder": str(folder), "max_tokens": max_tokens} for folder in folders]
