"""Which reducers work with which models and engines.

`require_reducer` combines three checks, which vLLM's plugin and messages also call one by one: of the model's family
(`family_problem`), of its config (`require_reducible`, which includes the family's), and of the engine (`engine_problem`).
The last reads literals from the files of methods and families and needs neither torch nor vLLM.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vlmcompress.models import ModelSpec, all_specs, block_side, patch_side, tile_grid
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.registry import REDUCERS, Registry

if TYPE_CHECKING:
    from vlmcompress.models import VLM
    from vlmcompress.reduction.choice import ReducerChoice
    from vlmcompress.reduction.methods import Reducer, TokenCounter

SERVED_FAMILIES = Registry("vlmcompress.engines.vllm.plugin", "family")
"""The families that vLLM's plugin serves."""
PREFIX = "Vlmcompress"
"""What comes before the architecture's name in the config.json of a checkpoint with a reducer."""
_INSTEAD = "use a method of stage 'projected', for example divprune"
_MIXED = {
    "block": "which is built for pictures of one size, and those of {family} have any",
    "packed": "and in {family} tiles are put together after the encoder, where patches are cut off",
}


def require_reducer(vlm: VLM, reducer: ReducerChoice, *, engine: str = "transformers", files: bool = True) -> None:
    """Raise UserError unless a reducer works with a model and an engine.

    Args:
        vlm: the model; only its config and the parameters' shapes are used.
        engine: `vllm`, or `transformers`.
        files: whether to read the reducer's file of thresholds and check that it belongs to this model.
    """
    if files and isinstance(reducer.reducer.thresholds, str) and family_problem(vlm.spec, reducer.method) is None:
        from vlmcompress.reduction import threshold_file

        reducer = threshold_file.load_thresholds(vlm, reducer)
    require_reducible(vlm.spec, vlm.model.config, reducer)
    if engine == "vllm":
        for architecture in vlm.model.config.architectures or []:
            if reason := engine_problem(architecture, reducer):
                raise UserError(reason)


def family_problem(spec: ModelSpec, method: str) -> str | None:
    """The reason why `method` cannot be attached to this family's models, in one line; None if it can. UserError for an
    unknown method."""
    reducer = REDUCERS.outline(method)
    if spec.images.grid is None:
        families = sum(other.images.grid is not None for other in all_specs())
        return f"visual tokens of {spec.family} are not reduced yet, those of {families} other families are: see docs/models.md"
    if _fits(spec, reducer):
        return None
    outlines = {name: REDUCERS.outline(name) for name in REDUCERS.names()}
    # Methods that engines serve, and that beat a baseline.
    good = {name: other for name, other in outlines.items() if other.SERVED and not other.NO_BETTER_THAN}
    others = ", ".join(name for name, other in good.items() if _fits(spec, other))
    return f"'{method}' {_unfit(spec, reducer)}; use {others}"


def _fits(spec: ModelSpec, reducer: Reducer) -> bool:
    """Whether the method can work in the family's encoder and decoder."""
    if reducer.STAGE == "llm":
        return not spec.mixed_blocks
    if reducer.MERGES:
        return spec.tower.joint is not None
    if reads_pixels(reducer):
        return spec.images.grid in ("thw", "patches", "tiles")
    return spec.tower.cls is not None or not needs_encoder(reducer)


def _unfit(spec: ModelSpec, reducer: Reducer) -> str:
    """Explain why the method cannot work in the family's encoder or decoder."""
    if reducer.STAGE == "llm":
        return f"works within decoder blocks of causal attention, and those of {spec.family} have {spec.mixed_blocks}"
    if reducer.MERGES:
        return f"merges patches within the encoder, {_MIXED[spec.tower.units].format(family=spec.family)}"
    if reads_pixels(reducer):
        return f"compares the pixels of visual tokens, and {spec.family} crops or pads them after the encoder"
    return f"reads attention from CLS, which the encoder of {spec.family} does not have"


def needs_encoder(reducer: Reducer) -> bool:
    """Whether the method needs signals from within the encoder."""
    return reducer.STAGE == "encoder" or "windowed" in reducer.NEEDS


def reads_pixels(reducer: Reducer) -> bool:
    """Whether the method decides by pixels, so that a processor knows which tokens stay before the encoder runs."""
    return "pixels" in reducer.NEEDS


def require_reducible(spec: ModelSpec, config: Any, chosen: ReducerChoice) -> None:
    """Raise UserError unless the method can be applied to a model, from its family and config without loading it."""
    tower = config.vision_config.model_type
    if reason := family_problem(spec, chosen.method) or dict(spec.tower.unreduced).get(tower):
        raise UserError(reason)
    reducer = chosen.reducer
    blocks = config.get_text_config().num_hidden_layers
    if reducer.layer is not None and reducer.layer >= blocks:
        raise UserError(f"layer {reducer.layer} is none of the language model's {blocks} (from 0); choose a lower one")
    # Deepstack (Qwen3-VL) adds encoder features to the visual rows in the first blocks, which therefore need all rows.
    deep = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    if reducer.layer is not None and reducer.layer < deep:
        raise UserError(f"layers before {deep} still receive visual features in this model; use layer {deep} or later")
    if reducer.MERGES:
        _require_merging(spec, config, reducer)
    elif needs_encoder(reducer):
        if reason := _no_cls_attention(spec, config):
            raise UserError(reason)
        layers = config.vision_config.num_hidden_layers
        if reducer.shallow is not None and reducer.shallow >= layers:
            raise UserError(
                f"shallow={reducer.shallow} is none of the encoder's {layers} layers (from 0); choose a lower one"
            )


def _no_cls_attention(spec: ModelSpec, config: Any) -> str | None:
    """Why this model's encoder gives no attention from CLS although its family's usual encoder does; None if it does."""
    if not isinstance(config.vision_feature_layer, int) or config.vision_feature_select_strategy != "default":
        return f"this model joins several encoder layers or keeps CLS; {_INSTEAD}"
    if (kind := config.vision_config.model_type) != spec.tower.cls:
        return f"the encoder is a {kind}, without CLS; {_INSTEAD}"
    return None


def feature_layers(config: Any) -> int:
    """Number of encoder layers up to the one whose output is used."""
    layer = getattr(config, "vision_feature_layer", -1)  # index among hidden states, one more than layers
    return layer if layer >= 0 else config.vision_config.num_hidden_layers + 1 + layer


def strategy(config: Any) -> str:
    """The encoder's rows that are features: all of them, `full`, or those after CLS, `default`."""
    return getattr(config, "vision_feature_select_strategy", "full")


def _require_merging(spec: ModelSpec, config: Any, reducer: Reducer) -> None:
    vision = config.vision_config
    used = (vision.model_type, strategy(config))
    if not isinstance(getattr(config, "vision_feature_layer", -1), int):
        raise UserError(f"this model joins several encoder layers; {_INSTEAD}")
    if block_side(config) > 1 and feature_layers(config) != vision.num_hidden_layers:
        raise UserError(f"this model leaves out encoder layers; {_INSTEAD}")
    if used not in spec.tower.merging:
        raise UserError(
            f"the encoder is a {used[0]} with features '{used[1]}'; tokens merge within a CLIP or InternViT without CLS "
            f"('default') and a SigLIP ('full'); {_INSTEAD}"
        )
    layers, thresholds = feature_layers(config), reducer.thresholds
    if isinstance(thresholds, tuple) and len(thresholds) != layers:
        raise UserError(
            f"there are {len(thresholds)} thresholds and {layers} layers that merge: they are another model's; learn this one's"
        )


def count_bounds(config: Any, reducer: Reducer) -> tuple[int, int]:
    """The fewest tokens to which a merging method can reduce an image or tile (at most by half per layer), and all tokens."""
    tokens = math.prod(tile_grid(config))
    least = -(-tokens >> feature_layers(config)) if reducer.MERGES else 1  # rounded up
    return least, tokens


def require_counter(config: Any, chosen: ReducerChoice, counter: TokenCounter) -> None:
    """Raise UserError unless the method can reach the counter's counts in a model with this config."""

    if not chosen.takes_count:
        raise UserError(f"'{chosen.method}' decides itself what it keeps; leave the counts out")
    least, most = count_bounds(config, chosen.reducer)
    if counter.patch != patch_side(config) or counter.buckets[0] < least or counter.buckets[-1] > most:
        raise UserError(
            f"counts of {counter.buckets[0]} to {counter.buckets[-1]}, of patches of {counter.patch}, are another model's; "
            f"this one's encoder makes {least} to {most} tokens of patches of {patch_side(config)}"
        )


def engine_problem(architecture: str, reducer: ReducerChoice) -> str | None:
    """Why vLLM cannot serve a model of `architecture` with `reducer`, in one line; None if it can.

    Needs no vLLM. `architecture` is the name in config.json, of the model or of its reduced form.
    """
    method = reducer.method
    architecture = architecture.removeprefix(PREFIX)
    families = {SERVED_FAMILIES.constant(family, "ARCHITECTURE"): family for family in SERVED_FAMILIES.names()}
    if architecture not in families:
        return f"vLLM does not serve {architecture} with fewer visual tokens yet{did_you_mean('', families)}"
    family, reason = families[architecture], None
    if not reducer.reducer.SERVED:
        reason = f"vLLM cannot serve '{method}' ({reducer.reducer.WHY_NOT})"
    elif missing := _missing(method, family):
        reason = f"vLLM does not serve '{method}' with {family} (without {missing})"
    if reason:
        return reason + did_you_mean("", [name for name in REDUCERS.names() if _serves(family, name)])
    return None


def served(method: str) -> list[str]:
    """List the families whose models vLLM serves with tokens reduced by `method`. Imports neither vLLM nor torch."""
    return [family for family in SERVED_FAMILIES.names() if _serves(family, method)]


def _serves(family: str, method: str) -> bool:
    return bool(REDUCERS.constant(method, "SERVED")) and not _missing(method, family)


def _missing(method: str, family: str) -> str:
    """Names of the signals that a method needs but the family's model does not provide."""
    reducer, signals = REDUCERS.outline(method), SERVED_FAMILIES.constant(family, "SIGNALS")
    if reducer.MEDIA == "video" and not SERVED_FAMILIES.constant(family, "VIDEOS"):
        return "videos"
    if reducer.COUNT == "adaptive" and not reads_pixels(reducer) and not SERVED_FAMILIES.constant(family, "COUNTED"):
        return "counts that depend on the image"
    return ", ".join(sorted(reducer.NEEDS.difference(signals)))
