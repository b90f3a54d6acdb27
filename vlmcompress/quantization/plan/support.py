"""Whether a model is supported at all: what can be quantized, which reducers work, and which engines load the result.

Only config.json is read; `findings` checks a whole recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.export import readers
from vlmcompress.reduction import support
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Check
from vlmcompress.utils.registry import LLAMACPP, OPENVINO, REDUCERS


def model_support(path: str | Path) -> list[Check]:
    """What can be quantized, which reducers work, and which engines load the model; `ok` is False where nothing does."""
    config = models.read_config(path, weights=False)
    spec, reason = None, ""
    try:
        spec = models.spec_for(config)
        models.require_unquantized(path, config)
    except UserError as error:
        reason = str(error)
    quantize = Check("quantize", not reason, reason or _parts(spec))
    return [quantize, _reducers(spec), _engines(spec, config)]


def _parts(spec: models.ModelSpec | None) -> str:
    assert spec is not None
    lacking = {
        "vision tower": not spec.vision_groups,
        "output head": spec.engine.head_shares,
        "token embedding": spec.engine.head_shares or spec.engine.embedding_whole,
    }
    parts = ", ".join(["decoder", *(part for part, missing in lacking.items() if not missing)])
    kept = " and ".join(part for part, missing in lacking.items() if missing)
    return f"family {spec.family}: {parts}{f'; in 16 bits: {kept}' if kept else ''}"


def _reducers(spec: models.ModelSpec | None) -> Check:
    """Methods that vLLM serves, and those that transformers runs alone."""
    attached = [name for name in REDUCERS.names() if spec and support.family_problem(spec, name) is None]
    served = [name for name in attached if spec and spec.family in support.served(name)]
    alone = [name for name in attached if name not in served]
    lines = {"vLLM and transformers": served, "transformers": alone}
    text = "; ".join(f"in {where}: {', '.join(names)}" for where, names in lines.items() if names)
    return Check("reduce", bool(text), text or "by no method")


def _engines(spec: models.ModelSpec | None, config: Mapping[str, Any]) -> Check:
    """Engines that have the model's class, with the formats that they read."""
    has = {
        "vllm": spec is not None or models.has_engine_class(config),
        "transformers": models.has_transformers_class(config),
        "llamacpp": spec is not None and spec.family in LLAMACPP.names(),
        "openvino": spec is not None and spec.family in OPENVINO.names(),
    }
    names = config.get("architectures")
    architectures = frozenset(names if isinstance(names, list) else ())
    titles = []
    for name, row in readers.ENGINES.items():
        if has.get(name, bool(row.architectures and row.architectures & architectures)):
            formats = [key for key, cell in row.formats.items() if isinstance(cell, readers.Cell)]
            titles.append(f"{row.title} ({', '.join(formats)})")
    return Check("engines", bool(titles), ", ".join(titles) or "none")
