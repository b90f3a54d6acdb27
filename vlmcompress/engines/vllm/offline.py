"""Engine for `engines/worker.py` that times `LLM.chat` on bursts of conversations given at once.

A request is a burst, `{"id": ..., "messages": [conversation, ...]}`; its answer has the seconds of the whole call (chat
templates, images and their processing included) and the engine's token counts. Caches are off, as in the server's cold
runs. Imports only the standard library and vLLM.
"""

from __future__ import annotations

import json
import time

PACKAGE = "vllm"


def start(job: dict):
    """Load the engine; return it with a description."""
    import vllm
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    llm = vllm.LLM(
        job["model"],
        max_model_len=job["max_model_len"],
        seed=job["seed"],
        enforce_eager=cpu,
        kv_cache_dtype=job["kv_cache_dtype"],
        limit_mm_per_prompt={"image": job["images"], "video": 0, "audio": 0},
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        speculative_config=job["speculative"] and json.loads(job["speculative"]),
        disable_log_stats=not job["speculative"],
    )
    config = llm.llm_engine.vllm_config
    about = {
        "name": "vllm",
        "version": vllm.__version__,
        "device": current_platform.device_type,
        "device_name": (current_platform.get_device_name() or "").strip(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }
    return llm, about


def answers(llm, requests, job: dict):
    """Yield the id of each burst with its times and counts, or with the exception that it raised."""
    from vllm import SamplingParams

    exactly = SamplingParams(temperature=0.0, max_tokens=job["out_tokens"], ignore_eos=True)
    for request in requests:
        before, began = _counted(llm, job), time.perf_counter()
        try:
            outputs = llm.chat(request["messages"], exactly, use_tqdm=False)
        except Exception as error:
            yield request["id"], error
            continue
        seconds, after = time.perf_counter() - began, _counted(llm, job)
        yield (
            request["id"],
            {
                "seconds": seconds,
                "counted": {name: value - before.get(name, 0) for name, value in after.items()},
                "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
                "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
                "output_tokens": [len(output.outputs[0].token_ids) for output in outputs],
            },
        )


def _counted(llm, job: dict) -> dict[str, float]:
    """vLLM's counters of speculative decoding so far, by name; none without it."""
    if not job["speculative"]:
        return {}
    counters: dict[str, float] = {}
    for metric in llm.get_metrics():
        values = {"": metric.value} if hasattr(metric, "value") else dict(enumerate(getattr(metric, "values", ())))
        for place, value in values.items() if "spec_decode" in metric.name else ():
            name = metric.name if place == "" else f"{metric.name}/{place}"
            counters[name] = counters.get(name, 0) + value
    return counters
