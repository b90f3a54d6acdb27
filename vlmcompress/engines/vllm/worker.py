"""The vLLM engine that `engines/worker.py` loads. Imports only the standard library and vLLM."""

from __future__ import annotations

import time

PACKAGE = "vllm"


def start(job: dict):
    """Load the engine; return it with a description."""
    import vllm
    from vllm.platforms import current_platform

    began = time.monotonic()
    settings, cpu = job["settings"], current_platform.is_cpu()
    sequences = settings["max_num_seqs"] or (32 if cpu else 256)
    llm = vllm.LLM(
        job["model"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=sequences,
        max_logprobs=max(20, settings["logprobs"]),
        dtype=settings["dtype"],
        seed=settings["seed"],
        enforce_eager=cpu,
        limit_mm_per_prompt={"image": job["images_per_prompt"], "video": job.get("videos_per_prompt", 0), "audio": 0},
        allowed_local_media_path=job["media"],
        speculative_config=job.get("speculative"),
        disable_log_stats=True,
    )
    config = llm.llm_engine.vllm_config
    about = {
        "name": "vllm",
        "version": vllm.__version__,
        "device": current_platform.device_type,
        "device_name": (current_platform.get_device_name() or "").strip(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": sequences,
        "start_seconds": round(time.monotonic() - began, 2),
    }
    return llm, about


def answers(llm, requests, job: dict):
    """Yield greedy answers as they are finished. vLLM stops at the generation config's end tokens by itself.

    Twice as many requests as can be in flight are kept in the engine, so that it never waits for one. Refused requests are
    reported when the others are answered; where too many are refused, when those before the last one are.
    """
    most = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    names: dict[str, str] = {}  # the engine's name of a request -> ours
    refused = []
    for request in requests:
        try:
            (name,) = llm.enqueue_chat([request["messages"]], sampling(request, job["settings"]), use_tqdm=False)
        except Exception as error:
            refused.append((request["id"], error))
            if len(refused) > job["settings"]["refusals"]:
                break
            continue
        names[name.rpartition("-")[0] or name] = request["id"]  # "7-ca11ab1e" while queued, "7" in its output
        while len(names) >= most:
            yield from step(llm, names)
    while names:
        yield from step(llm, names)
    yield from refused


def sampling(request: dict, settings: dict):
    from vllm import SamplingParams

    most = request["max_tokens"] or settings["max_tokens"]
    return SamplingParams(temperature=0.0, max_tokens=most, logprobs=settings["logprobs"] or None)


def step(llm, names: dict[str, str]):
    """Run the engine for a step and yield the answers that it finished, taking them out of `names`."""
    for output in llm.llm_engine.step():
        if not output.finished:
            continue
        best = output.outputs[0]
        first = best.logprobs[0].values() if best.logprobs else None
        yield (
            names.pop(output.request_id),
            {
                "text": best.text,
                "finish": best.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "output_tokens": len(best.token_ids),
                "first": [[token.decoded_token, token.logprob] for token in first] if first else None,
            },
        )
