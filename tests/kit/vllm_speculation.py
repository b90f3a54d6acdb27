"""Greedy answers of vLLM with and without speculative decoding; runs in a child of `engine_worker.py`.

Drafting n-grams imports llvmlite, and no engine starts after that any more: vLLM 0.32's CPU build looks for kernels among
the attributes of all modules, and llvmlite's library claims to have any attribute.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from PIL import Image

from tests.kit.inputs import images
from tests.kit.vllm_answers import data_url

# Words that repeat, so that n-grams of the prompt occur again.
TEXTS = (
    "one two three one two three one two three one two three one two three one",
    "abababababab",
    "What is in the image? What is in the",
)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"folder", "max_tokens", "dtype", "speculative": config or None}` -> greedy answers and what was drafted.

    Answers are token ids, to prompts with an image each. With `max_tokens` 0 the engine is only loaded. `sums` are those of
    the drafting head's parameters. Further keys: `image`, the path of the prompts' image; `block_size`; `budget`, the most
    tokens of a step; `alone`: one prompt after the other, the first one twice, and `proposals` are then the drafts of each.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as child:
        return child.submit(answer, job).result()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What `run` returns, in this process."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=job.get("budget", 1024),
        block_size=job.get("block_size"),
        limit_mm_per_prompt={"image": 1},
        speculative_config=job["speculative"],
        disable_log_stats=False,
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None)
    head = dict(drafter.model.named_parameters()) if hasattr(drafter, "model") else {}
    loaded = {
        "drafter": type(getattr(drafter, "model", drafter)).__name__,
        "sums": {name: float(value.double().sum()) for name, value in head.items()},
    }
    if not job["max_tokens"]:
        return loaded
    image = Image.open(job["image"]) if "image" in job else images(1)[0]
    picture = {"type": "image_url", "image_url": {"url": data_url(image)}}
    prompts = [[{"role": "user", "content": [picture, {"type": "text", "text": text}]}] for text in TEXTS]
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
    proposals: list[list[Any]] = []
    if job.get("alone"):
        outputs = []
        for prompt in [*prompts, prompts[0]]:
            proposals.append(_recorded(runner, drafter))
            outputs += llm.chat([prompt], sampling, use_tqdm=False)
    else:
        outputs = llm.chat(prompts, sampling, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    return loaded | {
        "prompts": [len(output.prompt_token_ids) for output in outputs],
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "proposals": proposals,
        "threads": torch.get_num_threads(),
        "counted": {name: value for name, value in counted.items() if "spec_decode" in name and value is not None},
    }


def _recorded(runner: Any, drafter: Any) -> list[Any]:
    """A list to which every proposal for the first request is added from now on: its tokens, and the logits of each.

    Those in the middle of a prompt, which vLLM makes and drops, are left out.
    """
    proposals: list[Any] = []
    if drafter is not None:
        propose, compute, logits = type(drafter).propose, type(drafter.model).compute_logits, list[list[float]]()

        def computing(*args: Any, **kwargs: Any) -> Any:
            computed = compute(drafter.model, *args, **kwargs)
            logits.append(computed[0].tolist())
            return computed

        def recording(*args: Any, **kwargs: Any) -> Any:
            logits.clear()
            drafted = propose(drafter, *args, **kwargs)
            if not runner.discard_request_mask.np[0]:
                proposals.append((drafted[0].tolist(), list(logits)))
            return drafted

        drafter.propose, drafter.model.compute_logits = recording, computing
    return proposals
