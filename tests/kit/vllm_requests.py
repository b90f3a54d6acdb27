"""Rarer requests to vLLM on a reduced checkpoint: JSON, pieces of answers, aborts; runs where `engine_worker.py` does.

A job is `{"folder", "settings", "requests": [those of `vllm_reduced`]}`, `settings` of `vllm.LLM`.
"""

from __future__ import annotations

from tests.kit.vllm_reduced import DEFAULTS, request

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def run(job: dict) -> dict:
    """Texts that keep to `SCHEMA`; the first request's pieces; answers before and after requests that were aborted, one
    within an image where `settings` cut it, and what is left of those."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = {"backend": "xgrammar", "disable_any_whitespace": True}
    llm = LLM(job["folder"], structured_outputs_config=structured, **(DEFAULTS | job["settings"]))
    engine = llm.llm_engine
    requests = [request(entry) for entry in job["requests"]]

    def ask() -> list[list[int]]:
        outputs = llm.generate(requests, SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    forced = {"max_tokens": 48, "temperature": 0, "structured_outputs": StructuredOutputsParams(json=SCHEMA)}
    texts = [out.outputs[0].text for out in llm.generate(requests, SamplingParams(**forced), use_tqdm=False)]
    engine.add_request("pieces", requests[0], SamplingParams(**forced, output_kind=RequestOutputKind.DELTA))
    pieces = []
    while engine.has_unfinished_requests():
        pieces += [output.outputs[0].text for output in engine.step()]
    before = ask()
    for number, entry in enumerate(requests):
        engine.add_request(f"aborted {number}", entry, SamplingParams(max_tokens=8))
    for _ in range(3):
        engine.step()
    engine.abort_request([f"aborted {number}" for number in range(len(requests))])
    return {
        "texts": texts,
        "pieces": pieces,
        "before": before,
        "after": ask(),
        "left": engine.get_num_unfinished_requests(),
        "kv_usage": engine.engine_core.engine_core.scheduler.kv_cache_manager.usage,
    }
