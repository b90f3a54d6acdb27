"""Greedy answers of vLLM with and without speculative decoding; runs where `engine_worker.py` does."""

from __future__ import annotations

from typing import Any

from tests.kit.inputs import images
from tests.kit.vllm_answers import data_url

# Words that repeat, so that n-grams of the prompt occur again.
TEXTS = ("one two three one two three one two", "abababababab", "What is in the image? What is in the")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"folder", "max_tokens", "speculative": config or None}` -> token ids of greedy answers in float32, and drafts.


    With `max_tokens` 0 the engine is only loaded. Prompts have an image each.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        limit_mm_per_prompt={"image": 1},
        speculative_config=job["speculative"],
        disable_log_stats=False,
    )
    drafter = getattr(llm.llm_engine.model_executor.driver_worker.worker.model_runner, "drafter", None)
    loaded = {"drafter": type(getattr(drafter, "model", drafter)).__name__}
    if not job["max_tokens"]:
        return loaded
    picture = {"type": "image_url", "image_url": {"url": data_url(images(1)[0])}}
    prompts = [[{"role": "user", "content": [picture, {"type": "text", "text": text}]}] for text in TEXTS]
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
    outputs = llm.chat(prompts, sampling, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return loaded | {
        "prompts": [len(output.prompt_token_ids) for output in outputs],
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "counted": {name: value for name, value in counted.items() if "spec_decode" in name and value is not None},
    }
