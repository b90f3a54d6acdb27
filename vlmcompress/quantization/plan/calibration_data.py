"""The calibration data of a run, and checks of their rows and image files before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data import (
    Preview,
    Reading,
    bundled_data,
    encode,
    encode_usable,
    preview_mixed,
    video,
)
from vlmcompress.models.data.samples import LazyImages
from vlmcompress.models.data.sources import skipped_lines
from vlmcompress.numerics.statistics.balance import weighed
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.recipe import Recipe
from vlmcompress.reduction.hooks import resizing
from vlmcompress.utils import hub
from vlmcompress.utils.errors import BadSample, UserError


def data_reason(work: Plan) -> str | None:
    """Name in words what in a recipe needs calibration data; None: nothing."""
    if work.needs_data:
        if work.method.needs.statistics:
            return f"scheme '{work.recipe.scheme}'"
        return "an FP8 KV cache (kv_cache)" if work.recipe.kv_cache else "a budget of bits (bits.budget)"
    if work.recipe.resize and not work.recipe.resize.settled:
        return str(work.recipe.resize)
    tokens = work.visual_tokens
    return f"reducer '{tokens.reducer.method}'" if tokens and tokens.reducer and tokens.learns else None


def require_calibration_data(work: Plan) -> None:
    """Refuse a plan whose calibration data are needed and not named, or named and missing, just as its run would."""
    settings = work.recipe.calibrate
    for named in (settings.data, settings.text):
        if named is not None:
            hub.require_data(named)
    data_source(work.recipe, work.recipe.model, data_reason(work))


def preview_data(work: Plan) -> Preview | None:
    """A look at the calibration data that the run of a plan would read; None where it reads none, or they can't be seen now.

    Raises:
        UserError: the run would refuse the data: they are missing, have no such columns, an image is not there, ...
    """
    require_calibration_data(work)
    settings, seed = work.recipe.calibrate, work.recipe.seed
    source = data_source(work.recipe, work.recipe.model, data_reason(work)) if work.reads_data else None
    if source is None:
        return None
    reading = Reading.of(settings)
    look = preview_mixed(source, settings.text, samples=settings.samples, seed=seed, reading=reading)
    if look and (filmed := next((sample for sample in look.samples if sample.videos), None)):
        if work.recipe.reduce:
            video.require_no_videos([filmed])
        video.require_video_support(models.load_processor(work.source.path), filmed.name, bool(filmed.images))
    if look and look.whole:
        media = {
            "vision": sum(sample.visual for sample in look.samples),
            "text": 1,  # there is no question without words
            "answer": sum(bool(sample.answer) for sample in look.samples),
        }
        require_balance_data(work.recipe, media, source)
    return look


def encode_preview(work: Plan, look: Preview) -> str:
    """Encode some samples as the run of a plan would, without its weights: the longest, those with the largest image and the
    narrowest, and the first with an image.

    Where the model does not take one of these, all are encoded, as `data.encode_usable` decides whether there are too many.

    Returns:
        How many were encoded, and which the run will skip.

    Raises:
        UserError: the run would refuse them.
    """
    recipe, spec = work.recipe, work.source.spec
    vlm = VLM(work.source.meta_model, models.load_processor(recipe.model), spec, recipe.model)
    if resize := recipe.resize:
        if not resize.settled:
            prompts = [tuple(image.size for image in sample.images) for sample in look.samples]
            resize = resizing.settle(spec, vlm.processor, prompts, resize)
        vlm = resizing.resized(vlm, resize)
    visual = [sample for sample in look.samples if sample.visual]
    sizes = [sample.images.sizes() if isinstance(sample.images, LazyImages) else [] for sample in visual]
    largest = sorted(range(len(visual)), key=lambda number: -sum(width * height for width, height in sizes[number]))[:1]
    narrowest = sorted(range(len(visual)), key=lambda number: min(map(min, sizes[number]), default=0))[:1]
    longest = max(look.samples, key=lambda sample: len(str(sample.conversation())))
    picks = {id(sample): sample for sample in (*visual[:1], longest, *(visual[n] for n in (*largest, *narrowest)))}
    settings = recipe.calibrate
    try:
        encode(list(picks.values()), vlm, max_length=settings.max_length)
        return f"{len(picks)} encoded"
    except BadSample:
        source, reading = Path(str(settings.data)).name, Reading.of(settings)
        usable = encode_usable(look.samples, vlm, source, max_length=settings.max_length, reading=reading)
        return "; ".join([f"{len(usable.samples)} encoded", *skipped_lines(usable.skipped)])


def data_source(recipe: Recipe, model: Path, needed: str | None) -> str | Path | None:
    """Find the path of the calibration samples; None where there are none and nothing needs them."""
    source = recipe.calibrate.data or (bundled_data(model, "calibration") if needed else None)
    if source is None and needed:
        raise UserError(f"{needed} needs calibration images; name some with --calib FOLDER or FILE")
    return source


def require_balance_data(recipe: Recipe, tokens: Mapping[str, int], source: str | Path) -> None:
    """Refuse a balance that weighs a modality without a token in the calibration data."""
    if missing := [name for name in weighed(recipe.options.balance or "off") if not tokens[name]]:
        remedy = {"vision": "images", "answer": "an `answer` to each sample", "text": "questions"}
        add = " and ".join(remedy[name] for name in missing)
        what = f"the calibration data {Path(source).name} have no {' and no '.join(missing)} tokens"
        raise UserError(f"{what}, which options.balance weighs; add {add}, or set options.balance=off")
