"""The engine's side of `runner`: answers a file of chat requests with vLLM and writes the answers as JSON lines.

Run by path, `python worker.py JOB.json`, in whatever environment has vLLM; imports only the standard library and vLLM.
One line of standard output is one event:

    {"event": "ready", "engine": {...}}          the model is loaded
    {"event": "answer", "id", "text", "finish", "prompt_tokens", "output_tokens"}
    {"event": "error", "stage": "import" | "start" | "request", "id", "message"}
    {"event": "done"}

What vLLM prints goes to standard error. Standard input is a lifeline: when it closes, the parent is gone and the whole
process group ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from itertools import islice


def claim_stdout():
    """Our own handle on standard output; everybody else's writes to it go to standard error from now on."""
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private


def end_with_parent() -> None:
    """Kill our process group when standard input closes."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def start(job: dict):
    """The loaded engine and a description of it."""
    import vllm
    from vllm.platforms import current_platform

    began = time.monotonic()
    settings, cpu = job["settings"], current_platform.is_cpu()
    sequences = settings["max_num_seqs"] or (32 if cpu else 256)
    llm = vllm.LLM(
        job["model"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=sequences,
        dtype=settings["dtype"],
        seed=settings["seed"],
        enforce_eager=cpu,
        limit_mm_per_prompt={"image": job["images_per_prompt"], "video": 0, "audio": 0},
        allowed_local_media_path=job["media"],
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


def answers(llm, batch: list[dict], max_tokens: int):
    """Greedy answers to a batch of requests, as events. vLLM stops at the generation config's end tokens by itself."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    try:
        outputs = llm.chat([request["messages"] for request in batch], greedy, use_tqdm=False)
    except Exception as error:
        if len(batch) == 1:
            yield {"event": "error", "stage": "request", "id": batch[0]["id"], "message": one_line(error)}
        else:  # find the one that fails
            for request in batch:
                yield from answers(llm, [request], max_tokens)
        return
    for request, output in zip(batch, outputs, strict=True):
        best = output.outputs[0]
        yield {
            "event": "answer",
            "id": request["id"],
            "text": best.text,
            "finish": best.finish_reason,
            "prompt_tokens": len(output.prompt_token_ids),
            "output_tokens": len(best.token_ids),
        }


def one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def events(job: dict):
    """All that happens, in order."""
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        yield {"event": "error", "stage": "import", "message": one_line(error)}
        return
    try:
        llm, about = start(job)
    except Exception as error:
        yield {"event": "error", "stage": "start", "message": one_line(error)}
        raise
    yield {"event": "ready", "engine": about}
    with open(job["requests"], encoding="utf-8") as file:
        requests = map(json.loads, file)
        while batch := list(islice(requests, 2 * about["max_num_seqs"])):
            yield from answers(llm, batch, job["settings"]["max_tokens"])
    yield {"event": "done"}


def main() -> None:
    out = claim_stdout()
    end_with_parent()
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    for event in events(job):
        print(json.dumps(event), file=out, flush=True)
    os._exit(0)  # all is written; the engine's own shutdown only costs time


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]  # our module names are ours alone
    main()
