"""Keys of other tools' quantization configs: one that a reader does not know may change what weights mean, and is refused.

Each reader says which keys it reads, which change nothing (`MADE`, and its own) and which may have some values only.
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
"""How AutoGPTQ, GPTQModel, AutoAWQ, auto-round and transformers made a checkpoint of integers, and which kernels run it there;
which layers are quantized is seen by their tensors."""
INTEGERS: Mapping[str, Collection[Any]] = {"data_type": ("int",), "pack_dtype": ("int32",), "act_bits": range(16, 33)}
"""Values that such a checkpoint has where it is packed as we read it and its activations are in 16 bits."""


def refuse_unknown(
    block: Any,
    read: Collection[str],
    harmless: Collection[str] = (),
    only: Mapping[str, Collection] | None = None,
    at: str = "",
) -> None:
    """Raise `UserError` for the first key that may change what the weights mean; null and what is empty say nothing.

    Args:
        block: a JSON object of a quantization config.
        read: the keys that the reader reads.
        harmless: those that change nothing, whatever their value.
        only: key -> the values that it may have.
        at: the block's place in `quantization_config`, with a dot at the end.
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
