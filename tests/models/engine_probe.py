"""Run as a process of its own: load a checkpoint in vLLM, ask about one and two images, print one JSON line.

python tests/models/engine_probe.py FOLDER
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


def probe(folder: str) -> dict:
    """Prompt tokens and generated tokens for one and two images, linear modules of the engine, its fused layers."""
    from vllm import LLM, SamplingParams

    from tests.models.inputs import QUESTION, images

    llm = LLM(
        folder,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        limit_mm_per_prompt={"image": 2},
    )
    answers = []
    for count in (1, 2):
        parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images(count)]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        out = llm.chat(messages, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)[0]
        answers.append({"prompt": list(out.prompt_token_ids), "answer": list(out.outputs[0].token_ids)})
    modules, fused = llm.apply_model(describe)[0]
    return {"answers": answers, "modules": modules, "fused": fused}


def describe(model) -> tuple[list[str], dict[str, list[str]]]:
    """Names of the linear layers in the engine, and which layers it fuses into which."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    modules = [name for name, module in model.named_modules() if isinstance(module, LinearBase | ParallelLMHead)]
    return modules, dict(getattr(model, "packed_modules_mapping", {}))


def data_url(image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    print("PROBE " + json.dumps(probe(sys.argv[1])))
