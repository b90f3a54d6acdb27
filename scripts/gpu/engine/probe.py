"""One checkpoint in vLLM, in a process of its own: what the log says, the kernel of each layer, the first tokens.

`start` runs `python -m gpu.engine.probe JOB OUT`; that process has the engine in it, so that the model can be looked at. vLLM
names a kernel once a process ("Using MarlinLinearKernel for CompressedTensorsWNA16", "Selected
CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8": vLLM 0.32, `model_executor/kernels/linear/__init__.py` and
`layers/quantization/compressed_tensors/schemes`), hence a process for each checkpoint. The layers are asked themselves, too:
a scheme keeps its kernel in an attribute (`kernel`, `fp8_linear`, `linear_kernel`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.part import last_lines

LOGPROBS = 20
SECONDS = 420
_KERNEL = re.compile(r"(?:Using|Selected) (\w*Kernel\w*) for (\w[\w -]*\w)")
_ERROR = re.compile(r"(\(.*?\) )?(ERROR .*\] )?\s*[\w.]*(Error|Exception)\b: ")
_BACKEND = re.compile(r"Using ([A-Z][A-Z0-9_]+) (?:attention )?backend\b")


def start(folder: Path, log: Path, images: Sequence[Path], question: str, **options: Any) -> subprocess.Popen:
    """Start a probe of a checkpoint; `options` are further ones of `vllm.LLM`. Its result is read by `finish`."""
    job = {"model": str(folder), "images": [str(image) for image in images], "question": question, "options": options}
    log.parent.mkdir(parents=True, exist_ok=True)
    out = log.with_suffix(".json")
    out.unlink(missing_ok=True)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **os.environ,
        "VLLM_LOGGING_LEVEL": "INFO", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }  # fmt: skip
    with log.open("wb") as sink:
        command = [sys.executable, "-m", "gpu.engine.probe", json.dumps(job), str(out)]
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)


def finish(child: subprocess.Popen, log: Path) -> dict[str, Any]:
    """Wait for a probe; returns what it found and what its log names, or `{"error": lines}`."""
    try:
        child.wait(SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    out = log.with_suffix(".json")
    if child.returncode or not out.is_file():
        return {"error": errors(text), **named(text)}
    return {**json.loads(out.read_text(encoding="utf-8")), **named(text)}


def errors(log: str) -> list[str]:
    """The last errors in a log, or else its last lines."""
    lines = [line for line in log.splitlines() if _ERROR.match(line)]
    return last_lines("\n".join(lines), 3) or last_lines(log, 5)


def named(log: str) -> dict[str, Any]:
    """Parse vLLM's log: kernel -> the schemes that it was chosen for, and attention backends."""
    kernels: dict[str, list[str]] = {}
    for kernel, scheme in _KERNEL.findall(log):
        if scheme not in kernels.setdefault(kernel, []):
            kernels[kernel].append(scheme)
    return {"logged": kernels, "backends": list(dict.fromkeys(_BACKEND.findall(log)))}


def options_for(share: float) -> dict[str, Any]:
    """Options of `vllm.LLM` under which several engines fit on a GPU: each may take `share` of it and has 1 GiB of KV."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": 2**30}


def look(model: Any) -> dict[str, Any]:
    """Kernels of linear layers by name without block numbers, attention backends, and whether KV scales were loaded."""
    layers: dict[str, list[str]] = {}
    scales, backends = [], []
    for name, module in model.named_modules():
        scheme = getattr(module, "scheme", None)
        for value in vars(scheme).values() if scheme is not None else ():
            kind = type(value).__name__
            if "Kernel" in kind and kind not in layers.setdefault(re.sub(r"\.\d+\.", ".*.", name), []):
                layers[re.sub(r"\.\d+\.", ".*.", name)].append(kind)
        if name.endswith("self_attn.attn"):
            scales.append([getattr(module, f"_{which}_scale_float", None) for which in "kv"])
            backend = getattr(module, "attn_backend", None)
            backends.append(backend.get_name() if backend else None)
    return {"layers": layers, "kv_scales": scales, "decoder_backends": sorted({str(backend) for backend in backends})}


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        job["model"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        max_logprobs=LOGPROBS,
        limit_mm_per_prompt={"image": 1, "video": 0},
        allowed_local_media_path="/",
        enable_prefix_caching=False,
        **job["options"],
    )
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=LOGPROBS)
    firsts, prompts = [], []
    for image in job["images"]:
        part = {"type": "image_url", "image_url": {"url": f"file://{image}"}}
        text = {"type": "text", "text": job["question"]}
        (out,) = llm.chat([{"role": "user", "content": [part, text]}], sampling, use_tqdm=False)
        firsts.append({token: entry.logprob for token, entry in out.outputs[0].logprobs[0].items()})
        prompts.append(len(out.prompt_token_ids))
    (layers,) = llm.apply_model(look)
    cache = llm.llm_engine.vllm_config.cache_config
    return {
        **layers,
        "first": firsts,
        "prompt_tokens": prompts,
        "cache_dtype": str(cache.cache_dtype),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
    }


def main() -> None:
    """Ask one checkpoint."""
    job, out = sys.argv[1:]
    answers = _run(json.loads(job))
    Path(out).write_text(json.dumps(answers), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # all is written; the engine's own shutdown only costs time


if __name__ == "__main__":
    main()
