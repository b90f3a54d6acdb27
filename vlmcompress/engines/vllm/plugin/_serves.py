"""Tell which reducers vLLM serves with which families, in which versions, without importing vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmcompress.common.registry import REDUCERS, Registry
from vlmcompress.errors import did_you_mean

if TYPE_CHECKING:
    from vlmcompress.recipe.reducer import ReducerChoice

FAMILIES = Registry("vlmcompress.engines.vllm.plugin", "family")
PREFIX = "Vlmcompress"  # `checkpoint.reducer_block.PREFIX`, which would bring torch along
LEAST, BELOW = (0, 32), (0, 33)
"""Supported versions of vLLM: from the first one up to, not including, the second."""


def supported(version: str) -> bool:
    """Whether this plugin was made for that version of vLLM. True for a version without numbers, a build of one's own."""
    numbers = version.split(".")[:2]
    return not all(part.isdigit() for part in numbers) or LEAST <= tuple(map(int, numbers)) < BELOW


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
    if "query" not in FAMILIES.constant(family, "SIGNALS") and reducer.options.asks:
        what = "text_pivots=0" if reducer.options.text_pivots else "relevance=none"
        return f"'{method}' looks at the question, which vLLM does not show it with {family}; set {what}"
    return None


def served(method: str) -> list[str]:
    """List the families whose models vLLM serves with tokens reduced by `method`. Imports neither vLLM nor torch."""
    return [family for family in FAMILIES.names() if _serves(family, method)]


def _serves(family: str, method: str) -> bool:
    return bool(REDUCERS.constant(method, "SERVED")) and not _missing(method, family)


def _missing(method: str, family: str) -> str:
    """Names of the signals that a method needs and the family's model cannot give it."""
    given = FAMILIES.constant(family, "SIGNALS")
    if REDUCERS.constant(method, "MEDIA") == "video" and not FAMILIES.constant(family, "VIDEOS"):
        return "videos"
    stage, adaptive = REDUCERS.constant(method, "STAGE"), REDUCERS.constant(method, "COUNT") == "adaptive"
    if adaptive and stage not in ("pixels", *(FAMILIES.constant(family, "COUNTED") or ())):
        return "counts that depend on the image"
    if stage == "pixels":
        own = "pixels" if "pixels" in REDUCERS.constant(method, "NEEDS") else "views"
        return "" if own in given else "what it needs before the encoder"
    return ", ".join(sorted(REDUCERS.constant(method, "NEEDS").difference(given)))
