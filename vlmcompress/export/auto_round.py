"""auto-round's files (`quant_method: auto-round`) are GPTQ's or AutoAWQ's under a config block of its own, translated here.

| `packing_format` | tensors |
|---|---|
| `auto_round:auto_gptq` (the default) | GPTQ v1: zero points less one |
| `auto_round:exllamav2`, `auto_round:gptqmodel`, ... | GPTQ v2 |
| `auto_round:auto_awq` | AutoAWQ |

`extra_config` has layers with numbers of their own, by name or by a pattern that is searched for; only what lies below
`block_name_to_quantize` is quantized. Sources: auto-round 0.15
`export/export_to_autoround/export.py`, vLLM 0.32 `quantization/inc/config_parser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vlmcompress.models.quantization_keys import INTEGERS, IRRELEVANT, refuse_unknown
from vlmcompress.utils.errors import UserError

METHOD = "auto-round"
_NUMBERS = ("bits", "group_size", "sym")
_INPUTS = {"act_data_type", "act_dynamic", "act_group_size", "act_sym"}  # which say nothing where `act_bits` are 16
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")


def translated(block: Mapping[str, Any]) -> dict[str, Any]:
    """The config block that GPTQ or AutoAWQ have for the same tensors. Raises `UserError` for another kind of weights."""
    packing, kind, inputs = (block.get(key) for key in ("packing_format", "data_type", "act_bits"))
    packing = packing or "auto_round:auto_gptq"
    overrides = block.get("extra_config") or {}
    if not (kind in (None, "int") and isinstance(packing, str) and isinstance(overrides, Mapping)) or (
        inputs is not None and not (isinstance(inputs, int) and inputs >= 16)
    ):
        raise UserError(
            f"of auto-round's files those of integers packed as GPTQ or AutoAWQ do are read, with 16-bit activations; this is "
            f"data_type {kind!r}, packing_format {packing!r}, act_bits {inputs!r}"
        )
    _check(block, {"packing_format", "extra_config"})
    numbers = {key: block.get(key, True if key == "sym" else None) for key in _NUMBERS}
    if "awq" in packing:
        return {"quant_method": "awq", "version": "gemm", "zero_point": True, **numbers}
    version = "gptq" if packing == "auto_round:auto_gptq" else "gptq_v2"
    dynamic: dict[str, dict] = {}
    for name, values in overrides.items():
        _check(values, (), f"extra_config.{name}.")
        # A key is the end of a layer's name, or a pattern that matches anywhere in it.
        form = f"(?:{name})" if _PATTERN.search(str(name)) else rf"(?:^|\.){re.escape(str(name))}$"
        dynamic[f"+:.*{form}"] = {key: values.get(key, value) for key, value in numbers.items()}
    blocks = block.get("block_name_to_quantize") or ()
    # What lies below these lists of blocks, called so on the hub: other readers may have a part more in between.
    lists = [
        map(re.escape, name.strip().split(".")) for name in (blocks.split(",") if isinstance(blocks, str) else blocks)
    ]
    if forms := "|".join(r"\.(?:\w+\.)?".join(parts) + r"\." for parts in lists):
        dynamic[f"-:(?!(?:.*\\.)?(?:{forms}))"] = {}
    return {"quant_method": "gptq", "checkpoint_format": version, **numbers, "dynamic": dynamic}


def _check(values: Any, further: Collection[str], at: str = "") -> None:
    """Raise `UserError` for what a block or its entry of a layer says that is not read; `further`: keys of a block alone."""
    refuse_unknown(values, {*_NUMBERS, *further}, IRRELEVANT | _INPUTS, INTEGERS, at)
