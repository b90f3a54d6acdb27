"""Which layers vLLM's own config classes take for quantized, by their names; runs where `engine_worker.py` does."""

from __future__ import annotations

from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """`{"block", "names"}` -> `{"quantized": [bool]}`: a config block and names of layers as vLLM calls them."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptMixedPrecisionConfig
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
    from vllm.model_executor.models.utils import WeightsMapper

    block = job["block"]
    keep = WeightsMapper()
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    if block["quant_method"] == "compressed-tensors":
        skipped = [should_ignore_layer(name, block["ignore"], fused) for name in job["names"]]
    elif block["quant_method"] == "awq":
        awq = AutoAWQConfig.from_config(block)
        skipped = [
            is_layer_skipped(name, awq.modules_to_not_convert, fused, match_mode="substring") for name in job["names"]
        ]
    elif block["quant_method"] == "gptq":
        gptq = AutoGPTQConfig.from_config(block)
        skipped = [get_dynamic_override(gptq, layer_name=name) is False for name in job["names"]]
    else:
        mixed = block["quant_algo"] == "MIXED_PRECISION"
        kind = ModelOptMixedPrecisionConfig if mixed else ModelOptFp8Config
        modelopt: Any = kind.from_config(block)
        modelopt.packed_modules_mapping = fused
        modelopt.apply_vllm_mapper(keep)
        skipped = [
            modelopt.is_layer_excluded(name)
            or "vision_tower" in name
            or "vision_model" in name
            or (mixed and modelopt._resolve_quant_algo(name) is None)
            for name in job["names"]
        ]
    return {"quantized": [not skip for skip in skipped]}
