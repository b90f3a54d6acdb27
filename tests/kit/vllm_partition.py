"""Whether vLLM's own checks let one of several devices have its part of a layer; runs where `engine_worker.py` does."""

from __future__ import annotations

import tempfile
import types
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"layers": [{"rows", "inputs", "split", "devices", "group", "block"}]}` -> `{"refused": [text or None]}`.

    `rows`: outputs of each layer in one matrix; `split`: "inputs" or "outputs"; `block`: rows that share a scale.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig(), check_compile=False):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel()
        return {"refused": [_problem(**layer) for layer in job["layers"]]}


def _problem(rows: list[int], inputs: int, split: str, devices: int, group: int, block: int) -> str | None:
    from vllm.distributed.utils import verify_group_size_divides_partition
    from vllm.model_executor.layers.quantization.utils.fp8_utils import validate_fp8_block_shape
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_repeat_scales_on_all_ranks

    columns = inputs // devices if split == "inputs" else inputs
    parts = [count // devices for count in rows] if split == "outputs" else rows
    try:
        if block > 1:
            layer: Any = types.SimpleNamespace(tp_size=devices)
            validate_fp8_block_shape(layer, inputs, sum(rows), columns, parts, [block, group])
        elif not marlin_repeat_scales_on_all_ranks(group, columns != inputs):  # as `CompressedTensorsWNA16` asks it
            verify_group_size_divides_partition(columns, group)
    except ValueError as error:
        return str(error)
    return None
