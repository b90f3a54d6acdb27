"""Run as a process of its own: load a checkpoint in vLLM, answer about one image, print one JSON line.

python -m tests.kit.serve_probe FOLDER
"""

from __future__ import annotations

import json
import os
import sys

from tests.kit.engine_probe import SETTINGS, data_url


def probe(folder: str) -> dict:
    """Prompt tokens, generated tokens, and the key and value scales of each attention layer."""
    from vllm import LLM, SamplingParams

    from tests.kit.inputs import QUESTION, images

    llm = LLM(folder, enforce_eager=True, max_model_len=512, max_num_seqs=2, limit_mm_per_prompt={"image": 1})
    content = [{"type": "image_url", "image_url": {"url": data_url(images(1)[0])}}, {"type": "text", "text": QUESTION}]
    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    out = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)[0]
    scales = llm.apply_model(kv_scales)[0]
    return {"prompt": list(out.prompt_token_ids), "answer": list(out.outputs[0].token_ids), "kv_scales": scales}


def kv_scales(model) -> list[tuple[float, float]]:
    modules = [module for name, module in model.named_modules() if name.endswith("self_attn.attn")]
    return [(module._k_scale_float, module._v_scale_float) for module in modules if hasattr(module, "_k_scale_float")]


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    print("PROBE " + json.dumps(probe(sys.argv[1])))
