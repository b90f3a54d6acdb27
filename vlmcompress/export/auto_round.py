"""Translate the config block of auto-round's files (`quant_method: auto-round`), whose tensors are those of GPTQ or AutoAWQ.

| `packing_format` | tensors |
|---|---|
| `auto_round:auto_gptq` (the default) | GPTQ v1: zero points minus 1 |
| `auto_round:exllamav2`, `auto_round:gptqmodel`, ... | GPTQ v2 |
| `auto_round:auto_awq` | AutoAWQ |

`extra_config` has the settings of exceptional layers, by name or by a pattern that is searched for; only layers below
`block_name_to_quantize` are quantized. Sources: auto-round 0.15 `export/export_to_autoround/export.py`, vLLM 0.32
`quantization/inc/config_parser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vlmcompress.models.quantization_keys import INTEGERS, IRRELEVANT, require_known_keys
from vlmcompress.utils.errors import UserError

METHOD = "auto-round"
_NUMBERS = ("bits", "group_size", "sym")
_INPUTS = {"act_data_type", "act_dynamic", "act_group_size", "act_sym"}  # ignored if `act_bits` is 16
_PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")


def translated(block: Mapping[str, Any]) -> dict[str, Any]:
    """The config block of GPTQ or AutoAWQ for the same tensors. Raises `UserError` for other kinds of weights."""
    packing, kind, inputs = (block.get(key) for key in ("packing_format", "data_type", "act_bits"))
    packing = packing or "auto_round:auto_gptq"
    overrides = block.get("extra_config") or {}
    if not (kind in (None, "int") and isinstance(packing, str) and isinstance(overrides, Mapping)) or (
        inputs is not None and not (isinstance(inputs, int) and inputs >= 16)
    ):
        raise UserError(
            f"of auto-round's files, only integers packed like GPTQ's or AutoAWQ's with 16-bit activations are read; this is "
            f"data_type {kind!r}, packing_format {packing!r}, act_bits {inputs!r}"
        )
    _require_supported(block, {"packing_format", "extra_config"})
    numbers = {key: block.get(key, True if key == "sym" else None) for key in _NUMBERS}
    if "awq" in packing:
        return {"quant_method": "awq", "version": "gemm", "zero_point": True, **numbers}
    version = "gptq" if packing == "auto_round:auto_gptq" else "gptq_v2"
    dynamic: dict[str, dict] = {}
    for name, values in overrides.items():
        _require_supported(values, (), f"extra_config.{name}.")
        # A key is the end of a layer's name, or a pattern that matches anywhere in it.
        form = f"(?:{name})" if _PATTERN.search(str(name)) else rf"(?:^|\.){re.escape(str(name))}$"
        dynamic[f"+:.*{form}"] = {key: values.get(key, value) for key, value in numbers.items()}
    blocks = block.get("block_name_to_quantize") or ()
    # Layers below these lists of blocks, by their names on the Hub; other readers may insert a name component.
    lists = [
        map(re.escape, name.strip().split(".")) for name in (blocks.split(",") if isinstance(blocks, str) else blocks)
    ]
    if forms := "|".join(r"\.(?:\w+\.)?".join(parts) + r"\." for parts in lists):
        dynamic[f"-:(?!(?:.*\\.)?(?:{forms}))"] = {}
    return {"quant_method": "gptq", "checkpoint_format": version, **numbers, "dynamic": dynamic}


def _require_supported(values: Any, further: Collection[str], at: str = "") -> None:
    """Raise `UserError` for unsupported settings of a block or of its entry for a layer; `further`: keys only of a block."""
    require_known_keys(values, {*_NUMBERS, *further}, IRRELEVANT | _INPUTS, INTEGERS, at)
