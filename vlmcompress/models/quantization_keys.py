"""Keys of other tools' quantization configs: an unknown key may change the meaning of weights and is refused.

Each reader declares which keys it reads, which are irrelevant (`IRRELEVANT` and its own) and which may only have certain
values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import shortened

_RUN = "backend disable_exllama do_fuse exllama_config fuse_max_seq_len modules_to_fuse use_cuda_fp16 use_exllama"
_LAYERS = """block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize quant_block_list
    supported_types to_quant_block_names"""
_METHOD = """act_group_aware amp autogptq_version autoround_version batch_size cache_block_outputs damp_auto_increment
    damp_percent dataset enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input foem gptaq
    gradient_accumulate_steps iters low_gpu_mem_usage lr max_input_length meta method minmax_lr model_file_base_name
    model_name_or_path model_seqlen mse nsamples pad_token_id provider quant_method scale_dtype seqlen
    static_attention_granularity static_groups static_kv_granularity tokenizer true_sequential"""
IRRELEVANT = frozenset(f"{_RUN} {_LAYERS} {_METHOD}".split())
"""Keys about how AutoGPTQ, GPTQModel, AutoAWQ, auto-round and transformers made an integer checkpoint, and which kernels they
use; the tensors themselves show which layers are quantized."""
INTEGERS: Mapping[str, Collection[Any]] = {"data_type": ("int",), "pack_dtype": ("int32",), "act_bits": range(16, 33)}
"""Values for such a checkpoint in the supported packing, with 16-bit activations."""


def require_known_keys(
    block: Any,
    read: Collection[str],
    harmless: Collection[str] = (),
    only: Mapping[str, Collection] | None = None,
    at: str = "",
) -> None:
    """Raise `UserError` for the first key that may change the meaning of weights; null and empty values are ignored.

    Args:
        block: a JSON object of a quantization config.
        read: the keys that the reader reads.
        harmless: irrelevant keys, with any value.
        only: key -> its allowed values.
        at: path of the block in `quantization_config`, with a trailing dot.
    """
    if not isinstance(block, Mapping):
        raise UserError(f"quantization_config: {at.removesuffix('.') or 'it'} is no JSON object; restore it")
    for key, value in block.items():
        if key in read or key in harmless or value is None or value in ({}, [], ""):
            continue
        if value in (only or {}).get(key, ()):
            continue
        text = shortened(json.dumps(value, default=str), 200)
        raise UserError(
            f"quantization_config has {at}{key}: {text}, which is not read here and may change what the weights mean; "
            "where it changes nothing, take it out of the config"
        )
