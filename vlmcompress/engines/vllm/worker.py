"""The vLLM engine that `engines/worker.py` loads. Imports the standard library and vLLM only.

A job has `settings` (those of `engines.EngineSettings`), and its requests have one conversation each.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from urllib.parse import unquote, urlparse

PACKAGE = "vllm"
GPU = os.path.join(os.path.dirname(__file__), "..", "..", "utils", "gpu.py")  # loaded by path, too


def start(job: dict):
    """Load the engine; return it with a description."""
    import vllm
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if not cpu and (problem := runpy.run_path(GPU)["engine_problem"](job["model"])):
        raise RuntimeError(problem)
    settings, images, videos = job["settings"], job["images_per_prompt"], job.get("videos_per_prompt", 0)
    llm = vllm.LLM(
        job["model"],
        enforce_eager=cpu,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"] or (32 if cpu else 256),
        # vLLM's own default is 20, and a request for more is refused.
        max_logprobs=max(20, settings["logprobs"]),
        dtype=settings["dtype"],
        seed=settings["seed"],
        limit_mm_per_prompt={"image": images, "video": videos, "audio": 0},
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
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }
    return llm, about


def answers(llm, requests, job: dict):
    """Yield greedy answers as they finish. vLLM itself stops at the generation config's end tokens.

    The engine holds twice as many requests as can be in flight, so that it never waits. Refused requests are reported after
    all others are answered; if too many are refused, after those before the last refusal.
    """
    from vllm import SamplingParams

    settings = job["settings"]
    most = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    names: dict[str, str] = {}  # the engine's request id -> ours
    refused = []
    for request in requests:
        limit = request["max_tokens"] or settings["max_tokens"]
        sampling = SamplingParams(temperature=0.0, max_tokens=limit, logprobs=settings["logprobs"] or None)
        try:
            # vllm/entrypoints/llm.py::LLM.enqueue_chat renders the prompt and raises if it is refused.
            keep = None if request["keep"] is None else {"keep": request["keep"]}
            messages = [with_frames(request["messages"])]
            (name,) = llm.enqueue_chat(messages, sampling, use_tqdm=False, mm_processor_kwargs=keep)
        except Exception as error:
            refused.append((request["id"], error))
            if len(refused) > settings["refusals"]:
                break
            continue
        # vLLM's `v1/engine/input_processor.py::assign_request_id` appends random characters: "7-ca11ab1e" while queued, "7" in
        # its output.
        names[name.rpartition("-")[0] or name] = request["id"]
        while len(names) >= most:
            yield from step(llm, names)
    while names:
        yield from step(llm, names)
    yield from refused


def with_frames(messages: list[dict]) -> list[dict]:
    """Messages with lists of frames (`models/data/video.py: FRAMES_FILE`) as data: addresses; vLLM reads no file of them."""
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "video_url" and part["video_url"]["url"].endswith(".frames"):
                frames = Path(unquote(urlparse(part["video_url"]["url"]).path)).read_text()
                part["video_url"] = {"url": f"data:video/jpeg;base64,{frames}"}
    return messages


def step(llm, names: dict[str, str]):
    """Run the engine for one step and yield finished answers, removing them from `names`."""
    # vllm/v1/engine/llm_engine.py::LLMEngine.step: `LLM.chat` would return only when all answers are finished.
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
