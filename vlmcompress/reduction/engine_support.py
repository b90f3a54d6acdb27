"""May this reducer go with this model, here? `check` answers for a model and an engine, once, for all who ask.

It puts two answers together: `reduction.support` says whether hooks can reduce a model of this family and config, and `refusal`
whether vLLM's plugin serves it, from literals of the methods' and the families' files, without torch and without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.registry import REDUCERS, Registry

if TYPE_CHECKING:
    from vlmcompress.models import VLM
    from vlmcompress.reduction.choice import ReducerChoice

FAMILIES = Registry("vlmcompress.engines.vllm.plugin", "family")
PREFIX = "Vlmcompress"  # `reduction.block.PREFIX`, which would bring torch along


def check(
    vlm: VLM,
    config: Mapping[str, Any],
    reducer: ReducerChoice,
    *,
    engine: str = "vllm",
    folder: Path | None = None,
    files: bool = True,
) -> ReducerChoice:
    """Raise UserError unless a model can run behind a reducer in an engine.

    Args:
        vlm: the model, of which the config and the parameters' shapes are enough.
        config: its config.json, whose architectures vLLM goes by.
        engine: `vllm`, or `transformers`.
        folder: of the checkpoint that carries the reducer; None: the reducer was asked for, and names its files.
        files: read the files that the reducer names, and check that they are of this model.

    Returns:
        The reducer with the network of the scorer that it names, if that was read.
    """
    from vlmcompress.reduction import scorer_file, support

    if files:
        support.check(vlm, reducer)
        reducer = scorer_file.known(vlm.model.config, reducer, folder)
    else:
        support.check_config(vlm.spec, vlm.model.config, reducer)
    if engine == "vllm":
        check_served(config, reducer)
    return reducer


def check_served(config: Mapping[str, Any], reducer: ReducerChoice) -> None:
    """Raise UserError unless vLLM serves the architectures of a config.json with a reducer."""
    for architecture in config.get("architectures") or []:
        if reason := refusal(architecture, reducer):
            raise UserError(reason)


def refusal(architecture: str, reducer: ReducerChoice) -> str | None:
    """The reason why vLLM does not serve a model of `architecture` with `reducer`, in one line; None when it does.

    Needs no vLLM. `architecture` is the name in config.json, of the model or of its reduced form.
    """
    method, module = reducer.method, reducer.module
    architecture = architecture.removeprefix(PREFIX)
    families = {FAMILIES.constant(family, "ARCHITECTURE"): family for family in FAMILIES.names()}
    if architecture not in families:
        return f"vLLM does not serve {architecture} with fewer visual tokens yet{did_you_mean('', families)}"
    family, reason = families[architecture], None
    if not module.SERVED:
        reason = f"vLLM cannot serve '{method}' ({module.WHY_NOT})"
    elif missing := _missing(method, family):
        reason = f"vLLM does not serve '{method}' with {family} (without {missing})"
    if reason:
        return reason + did_you_mean("", [name for name in REDUCERS.names() if _serves(family, name)])
    return None


def served(method: str) -> list[str]:
    """List the families whose models vLLM serves with tokens reduced by `method`. Imports neither vLLM nor torch."""
    return [family for family in FAMILIES.names() if _serves(family, method)]


def _serves(family: str, method: str) -> bool:
    return bool(REDUCERS.constant(method, "SERVED")) and not _missing(method, family)


def _missing(method: str, family: str) -> str:
    """Names of the signals that a method needs and the family's model cannot give it."""
    signals = FAMILIES.constant(family, "SIGNALS")
    stage, adaptive = REDUCERS.constant(method, "STAGE"), REDUCERS.constant(method, "COUNT") == "adaptive"
    if adaptive and not FAMILIES.constant(family, "COUNTED"):
        return "counts that depend on the image"
    if stage == "pixels":
        return "" if "views" in signals else "what it needs before the encoder"
    return ", ".join(sorted(REDUCERS.constant(method, "NEEDS").difference(signals)))
