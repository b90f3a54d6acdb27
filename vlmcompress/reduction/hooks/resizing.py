"""Make images smaller before the encoder, by a setting of the model's own processor (`models.ImageSetting`).

Unlike a reducer this also saves the encoder's work, and every engine that follows the processor applies it, without a plugin.
llama.cpp takes limits from flags (`export.launch_files.token_limits`). SGLang 0.5.23 follows the processor: only videos use
its `SGLANG_IMAGE_MAX_PIXELS` (`srt/multimodal/processors/qwen_vl.py`). There is one setting for all images: a limit, which
affects large images but not small ones. To keep a share of the tokens, the limit is measured on images: it is the largest one
that leaves at most that share of their tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmcompress.models import VLM, ImageSetting, ModelSpec
from vlmcompress.reduction.resize import Resize
from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError

Sizes = tuple[tuple[int, int], ...]
"""Width and height of each image of a prompt."""

_FILES = ("preprocessor_config.json", "processor_config.json")


def resize_problem(spec: ModelSpec) -> str | None:
    """Why images of this family cannot be made smaller, in one line; None when they can."""
    if spec.images.sizes is not None:
        return None
    what = f"every image of {spec.family} has the same number of tokens, whatever its size"
    return f"{what}; use a reducer such as coverage"


def image_settings(spec: ModelSpec, processor: Any) -> list[ImageSetting]:
    """The processor's settings, with increasing tokens; the last is the current one. Raises UserError if there are none."""
    if spec.images.sizes is None:
        raise UserError(f"resize: {resize_problem(spec)}")
    return list({setting.tokens: setting for setting in spec.images.sizes(processor)}.values())


def ceiling_note(spec: ModelSpec, processor: Any) -> str | None:
    """One line if the processor lets an image have more than twice the tokens that the model's card recommends, else None.

    Above it Qwen2.5-VL was slower and its boxes were worse (mlx-vlm issue 1175).
    """
    recommended = spec.images.recommended
    if recommended is None or (most := image_settings(spec, processor)[-1].tokens) <= 2 * recommended:
        return None
    return (
        f"an image may have up to {most:,} tokens, and the cards of {spec.family} recommend {recommended:,}: larger ones are "
        f"slower, and boxes in them may be worse; quantize --reduce resize:tokens={recommended} (in a recipe resize: {{tokens: "
        f"{recommended}}}) lowers the limit"
    )


def choose_setting(spec: ModelSpec, processor: Any, resize: Resize) -> ImageSetting:
    """The setting for a `Resize` with `tokens`. Raises UserError if the processor has none with so few tokens."""
    every = image_settings(spec, processor)
    assert resize.tokens is not None
    index = bisect.bisect_right(every, resize.tokens, key=lambda setting: setting.tokens)
    if not index:
        least = every[0].tokens
        raise UserError(
            f"{resize}: the processor's smallest setting has {least} tokens an image; ask for at least those"
        )
    return every[index - 1]


def settle(spec: ModelSpec, processor: Any, prompts: Sequence[Sizes], resize: Resize) -> Resize:
    """Determine the `tokens` for a share.

    Args:
        processor: the model's processor.
        prompts: sizes of the images of each prompt on which the share is measured.
        resize: a `Resize` with a share; one with `tokens` is returned unchanged.

    Raises:
        UserError: the processor has no setting that leaves so few tokens, or there are no images.
    """
    if resize.settled:
        return resize
    assert resize.keep is not None
    counted = Counter(sizes for sizes in prompts if sizes)
    if not counted:
        raise UserError(f"{resize}: the share is measured on images, and the data have none; give tokens=N, or images")
    every = image_settings(spec, processor)
    now = _total(spec, processor, counted)

    def left(setting: ImageSetting) -> int:
        return _total(spec, setting.applied(processor), counted)

    # A setting with more tokens per image almost always leaves more tokens; the loop below handles exceptions.
    place = bisect.bisect_right(every, resize.keep * now, key=left) - 1
    while place > 0 and left(every[place]) > resize.keep * now:  # where a larger setting had fewer tokens
        place -= 1
    if place < 0 or (least := left(every[place])) > resize.keep * now:
        least = left(every[0])
        raise UserError(
            f"{resize}: the processor's smallest setting, {every[0].tokens} tokens an image, leaves {least / now:.1%} of these "
            "images' tokens; ask for a larger share, and for a reducer after it"
        )
    return resize.model_copy(update={"tokens": every[place].tokens})


def config_entries(setting: ImageSetting, config: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """What changes along with a setting in a loaded config: its part's name and that part, an entry's name, and its value."""
    for key, value in setting.config.items():
        where, part = (key, getattr(config, key)) if isinstance(value, Mapping) else ("config.json", config)
        for name, entry in (value if isinstance(value, Mapping) else {key: value}).items():
            yield where, part, name, entry


def resized(vlm: VLM, resize: Resize) -> VLM:
    """The model with the processor for a `Resize` with `tokens`; its config is adapted in place."""
    setting = choose_setting(vlm.spec, vlm.processor, resize)
    config = vlm.model.config
    for _, part, name, value in config_entries(setting, config):
        setattr(part, name, value)
    return dataclasses.replace(vlm, processor=setting.applied(vlm.processor))


def setting_files(folder: Path, setting: ImageSetting) -> dict[str, Mapping[str, Any]]:
    """A checkpoint's image processing files with this setting: name -> content."""
    contents: dict[str, Mapping[str, Any]] = {}
    for name in _FILES:
        content = json_files.read(folder / name) if (folder / name).is_file() else {}
        section = content if name == _FILES[0] else content.get("image_processor")
        if isinstance(section, Mapping) and section:
            changed = {**section, **setting.image_processor, **_older(section, setting)}
            contents[name] = changed if section is content else {**content, "image_processor": changed}
    return contents


def _older(section: Mapping[str, Any], setting: ImageSetting) -> dict[str, Any]:
    """Values for the keys that older Qwen files use instead of `size`, and which would override it."""
    size = setting.image_processor.get("size", {})
    names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    return {old: size[new] for old, new in names.items() if old in section and new in size}


def _total(spec: ModelSpec, processor: Any, counted: Mapping[Sizes, int]) -> int:
    """Visual tokens of all prompts."""
    return sum(
        times * sum(spec.layout(processor, *size, len(sizes)).tokens for size in sizes)
        for sizes, times in counted.items()
    )
