"""Run as a process of its own: load checkpoints in vLLM one after the other and ask each about one and two images.

    python -m tests.kit.engine_probe FOLDER...

Prints one line `PROBE {json}` per folder. One process for all, since importing vLLM takes longer than a tiny engine.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import traceback

SETTINGS = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its model can be looked at
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}


def probe(folder: str) -> dict:
    """Prompt tokens and generated tokens for one and two images, linear modules of the engine, its fused layers."""
    from vllm import LLM, SamplingParams

    from tests.kit.inputs import QUESTION, images

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
    fused: dict[str, list[str]] = {}
    for part in model.modules():  # the language model inside has a mapping of its own
        fused |= getattr(part, "packed_modules_mapping", {})
    return modules, fused


def data_url(image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def main(folders: list[str]) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    for folder in folders:
        try:
            result = probe(folder)
        except Exception as error:  # the next checkpoint may be fine
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        cleanup_dist_env_and_memory()
        print("PROBE " + json.dumps({"folder": folder, **result}), flush=True)


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(sys.argv[1:])
