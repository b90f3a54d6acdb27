"""Answers of vLLM on reduced checkpoints, and where it saw tokens; runs where `engine_worker.py` does.

A job is `{"folder", "settings", "passes", "max_tokens", "requests": [{"prompt", "images": [files], "videos": [files],
"keep": what it sets for its images}]}`; `settings` are `vllm.LLM`'s, `"ignore_eos": true` makes answers as long as they may
be, `"adapter"` is the folder of a LoRA adapter. Requests are given one by one, `passes` times over, then once all together.
Of each in turn: the prompt's tokens, the answer's tokens, how many came from the prefix cache, and the positions that the
language model was given for the rest, in the order in which it ran, and how many numbers of pixels its tower got; and how often
requests were preempted, where `settings` keep statistics.
"""

from __future__ import annotations

from typing import Any

DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "limit_mm_per_prompt": {"image": 2, "video": 1},
    "disable_log_stats": True,
}


def run(job: dict) -> dict:
    """What `job` asks for."""
    from vllm import LLM, SamplingParams

    positions: list = []

    def watch(model) -> None:
        language_model = model.get_language_model()
        last = getattr(language_model, "model", language_model).layers[-1]
        last.register_forward_pre_hook(given, with_kwargs=True)

    def given(_, args, kwargs) -> None:
        places = kwargs["positions"] if "positions" in kwargs else args[0]
        positions.append(places.clone().view(-1, places.shape[-1]))

    llm = LLM(job["folder"], **(DEFAULTS | job["settings"]))
    llm.apply_model(watch)
    sampling = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=job.get("ignore_eos", False))
    requests = [request(entry) for entry in job["requests"]]
    adapter = lora(job.get("adapter"))
    passes = []
    for _ in range(job["passes"]):
        passes.append([])
        for entry in requests:
            positions.clear()
            (out,) = llm.generate([entry], sampling, use_tqdm=False, lora_request=adapter)
            columns = [column for step in positions for column in step.T.tolist()]
            passes[-1].append(answer(out) | {"positions": columns})
    together = [answer(out) for out in llm.generate(requests, sampling, use_tqdm=False, lora_request=adapter)]
    stats = [] if llm.llm_engine.logger_manager is None else llm.get_metrics()
    preemptions = sum(each.value for each in stats if each.name == "vllm:num_preemptions")
    return {"passes": passes, "together": together, "preemptions": preemptions}


def lora(folder: str | None) -> Any:
    """What names an adapter to vLLM."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, folder) if folder else None


def request(entry: dict) -> dict:
    """A request as `LLM.generate` takes it."""
    import numpy as np
    from PIL import Image

    media: dict = {}
    if entry.get("images"):
        media["image"] = [Image.open(file).convert("RGB") for file in entry["images"]]
    if entry.get("videos"):
        frames = [np.load(file) for file in entry["videos"]]
        media["video"] = [(video, about(len(video))) for video in frames]
    keep = {"mm_processor_kwargs": {"keep": entry["keep"]}} if "keep" in entry else {}
    return {"prompt": entry["prompt"], **({"multi_modal_data": media} if media else {}), **keep}


def about(frames: int) -> dict:
    """Metadata of a video of two frames a second, all of them given."""
    return {
        "fps": 2.0,
        "duration": frames / 2,
        "total_num_frames": frames,
        "frames_indices": list(range(frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def answer(out) -> dict:
    cached = out.num_cached_tokens or 0
    return {"prompt": list(out.prompt_token_ids), "tokens": list(out.outputs[0].token_ids), "cached": cached}
