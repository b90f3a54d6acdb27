"""Run as a process of its own, by `engine.py`: does jobs in vLLM, each a line of JSON `{"kind", "job", "out"}` on stdin.

The result is written to `out`, whole or not at all. A job that fails leaves `{"error": text}`: the error in the first line,
then the traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from tests.kit import (
    quicker,
    vllm_answers,
    vllm_flags,
    vllm_naming,
    vllm_partition,
    vllm_processor,
    vllm_reduced,
    vllm_requests,
    vllm_speculation,
    vllm_tower,
)

KINDS = {
    "answers": vllm_answers.run,
    "flags": vllm_flags.run,
    "naming": vllm_naming.run,
    "partition": vllm_partition.run,
    "processor": vllm_processor.run,
    "reduced": vllm_reduced.run,
    "requests": vllm_requests.run,
    "speculation": vllm_speculation.run,
    "tower_scales": vllm_tower.run,
}


def main() -> None:
    quicker.import_less()
    import vllm.entrypoints.llm  # noqa: F401, to be frozen
    from vllm.distributed import cleanup_dist_env_and_memory

    quicker.freeze(engines=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            result = KINDS[order["kind"]](order["job"])
        except Exception as error:  # the next job may be fine
            result = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        cleanup_dist_env_and_memory()
        out = Path(order["out"])
        part = out.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(out)


if __name__ == "__main__":
    main()
