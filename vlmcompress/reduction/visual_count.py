"""Visual tokens of images and videos by the family's own rule, before and after a reducer, and the patches behind them.

Images go by `ModelSpec.layout` with the model's processor. Where the folder has no processor, a stand-in takes the sizes from
config.json, and what only a processor's files say, the limits of pixels, from transformers' defaults; `Counted.notes` says so.

Videos, with f frames of the size that the processor makes of them (checked against the processors of transformers 5.17):

    Qwen          ceil(f / 2) grids of the frame; Qwen3-VL resizes all frames together to a number of pixels
    InternVL      f times the tokens of one tile
    OneVision     f pooled grids of ceil(n / 2)^2, and one newline
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoImageProcessor

from vlmcompress import models
from vlmcompress.models import Layout, ModelSpec
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks.views import tokens_left
from vlmcompress.reduction.support import chooses_images
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors

Size = tuple[int, int]
LARGEST = 50_000_000
"""Pixels of an image or a frame; a blank image of that size is given to the processor."""
MOST_FRAMES = 100_000
LARGE = ((4096, 4096), (8192, 2048), (2048, 8192), (1536, 1024), (1024, 1536), (1344, 1344))
"""Sizes among which the image with the most tokens is looked for."""


@dataclass(frozen=True)
class Pictures:
    """What a prompt shows: sizes `(width, height)` of its images, and `(frames, width, height)` of its video."""

    images: tuple[Size, ...]
    video: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Counted:
    """Visual tokens of a prompt.

    Attributes:
        images: layout of each image.
        film: the grid `(frames, rows, columns)` of the video's tokens; None without one.
        video: all tokens of the video, a newline behind it included.
        patches: of each piece that the encoder sees by itself.
        largest: tokens of the largest image that a request may bring, or of the video where it has more.
    """

    images: tuple[Layout, ...]
    film: tuple[int, int, int] | None
    video: int
    patches: tuple[int, ...]
    largest: int

    @property
    def tokens(self) -> int:
        """All visual tokens."""
        return sum(layout.tokens for layout in self.images) + self.video


class Rule:
    """The rule of one model: `count` pictures, and what a reducer leaves of them.

    Attributes:
        notes: what was assumed, for people.
    """

    def __init__(self, path: Path, config: dict[str, Any], spec: ModelSpec | None):
        if spec is None:
            raise UserError(
                f"visual tokens of '{config.get('model_type')}' are not known here; plan its text with "
                "--images-per-request 0"
            )
        self.spec, self.config = spec, config
        self.notes: tuple[str, ...] = ()
        try:
            self.processor: Any = models.load_processor(path)
        except UserError:
            self.processor = _stand_in(path, config, spec)
            self.notes = self.processor.notes

    def count(self, pictures: Pictures) -> Counted:
        """Count the tokens of pictures. UserError for sizes that the processor refuses, or a video where none are counted."""
        layouts = layouts_of(self.spec, self.processor, pictures.images)
        patches = [
            piece
            for layout, size in zip(layouts, pictures.images, strict=True)
            for piece in self._patches(layout, size)
        ]
        film, patch = self._video(*pictures.video) if pictures.video else (None, 0)
        video = math.prod(film) + (self.spec.family == "llava-onevision") if film else 0
        largest = max((self._try(size) for size in LARGE), default=0)
        longest = max([largest, video, *(layout.tokens for layout in layouts)])
        return Counted(layouts, film, video, (*patches, *([patch] * film[0] if film else ())), longest)

    def _try(self, size: Size) -> int:
        try:
            return layouts_of(self.spec, self.processor, [size])[0].tokens
        except UserError:
            return 0

    def _patches(self, layout: Layout, size: Size) -> list[int]:
        """Patches of each piece of an image that the encoder sees by itself."""
        vision = self.config.get("vision_config") or {}
        if self.spec.visual_grid == "thw":
            return [layout.tokens * int(vision.get("spatial_merge_size") or 2) ** 2]
        if self.spec.visual_grid == "shapes":
            factor = int(self.config.get("downsample_factor") or 2) ** 2
            return [piece.rows * piece.columns * factor for piece in layout.pieces]
        per_tile = (_first(vision.get("image_size"), 384) // _first(vision.get("patch_size"), 14)) ** 2
        return [per_tile] * (self._tiles(size) if self.spec.visual_grid == "anyres" else len(layout.pieces))

    def _tiles(self, size: Size) -> int:
        from transformers.image_processing_utils import select_best_resolution

        images_of = self.processor.image_processor
        side = images_of.size.get("shortest_edge") or images_of.size["height"]
        canvas = select_best_resolution((size[1], size[0]), images_of.image_grid_pinpoints)
        return 1 + (canvas[0] // side) * (canvas[1] // side)

    def _video(self, frames: int, width: int, height: int) -> tuple[tuple[int, int, int], int]:
        """The grid of a video's tokens, and the patches of each frame of it, which the encoder sees by itself."""
        if width * height > LARGEST or frames > MOST_FRAMES:
            raise UserError(
                f"video {frames}x{width}x{height} is larger than {MOST_FRAMES:,} frames of {LARGEST / 1e6:.0f} Mpx"
            )
        family, vision = self.spec.family, self.config.get("vision_config") or {}
        per_tile = (_first(vision.get("image_size"), 384) // _first(vision.get("patch_size"), 14)) ** 2
        if family == "internvl":
            side = math.isqrt(int(self.processor.image_seq_length))
            return (frames, side, side), per_tile
        if family == "llava-onevision":
            side = math.isqrt(int(self.processor.num_image_tokens))
            return (frames, math.ceil(side / 2), math.ceil(side / 2)), per_tile
        if self.spec.visual_grid == "thw":
            rows, columns = _video_grid(self.processor, self.spec, frames, width, height)
            merge = int(vision.get("spatial_merge_size") or 2) ** 2
            return (math.ceil(frames / 2), rows, columns), rows * columns * merge
        raise UserError(f"videos of {family} are not counted here; give the frames as --images-per-request")


def layouts_of(spec: ModelSpec, processor: Any, sizes: Sequence[Size]) -> tuple[Layout, ...]:
    """The layouts of a prompt's images by their sizes. UserError for a size that is too large or that the processor refuses."""
    layouts = []
    for width, height in sizes:
        if width * height > LARGEST:
            raise UserError(f"image {width}x{height} is {width * height / 1e6:.1f} Mpx, more than {LARGEST / 1e6:.0f}")
        what = f"image {width}x{height}: the model's processor refuses it"
        with foreign_errors(what, "; see the sizes in vision_config, or copy the processor's files"):
            layouts.append(spec.layout(processor, width, height, len(sizes)))
    return tuple(layouts)


def kept(counted: Counted, chosen: ReducerChoice, spec: ModelSpec) -> int | None:
    """Visual tokens that a reducer leaves of a prompt; None where that depends on what an image shows.

    vLLM's plugin reduces a video as one grid, and within the encoder each of its frames. UserError for a reducer that it does
    not give videos to.
    """
    if counted.film and chosen.asks:
        raise UserError(f"--reduce {chosen}: vLLM's plugin takes no videos with '{chosen.method}'; use divprune")
    if spec.visual_grid == "anyres" and hasattr(chosen.module, "merge"):
        return None
    full = sum(layout.tokens for layout in counted.images)
    if chooses_images(chosen.module):
        if len({layout.tokens for layout in counted.images}) > 1:
            return None
        return (tokens_left(full, len(counted.images), chosen) if counted.images else 0) + counted.video
    grids = _grids(counted, chosen)
    left = [chosen.module.budget(grid, chosen.options) for grid in grids]
    if None in left:
        return None
    return full + counted.video - sum(math.prod(grid) - count for grid, count in zip(grids, left, strict=True))


def per_block(counted: Counted, left: int, chosen: ReducerChoice | None, blocks: int) -> Sequence[int]:
    """Visual tokens in each decoder block: `left`, unless a method within the language model has another count by block."""
    grids = _grids(counted, chosen) if chosen and chosen.module.STAGE == "llm" else []
    counts = [chosen.left(grid, blocks) for grid in grids] if chosen else []
    if not counts or None in counts:
        return [left] * blocks
    rest = counted.tokens - sum(math.prod(grid) for grid in grids)
    return [rest + sum(block) for block in zip(*counts, strict=True)]


def _grids(counted: Counted, chosen: ReducerChoice) -> list[tuple[int, int, int]]:
    """The grids that are reduced by themselves, of all images and of the video."""
    images = [grid for layout in counted.images for grid, _ in layout.grids()]
    if counted.film is None:
        return images
    frames, rows, columns = counted.film
    return images + ([(1, rows, columns)] * frames if hasattr(chosen.module, "merge") else [counted.film])


def _video_grid(processor: Any, spec: ModelSpec, frames: int, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of tokens of a frame of a video, as the processors of the Qwen family resize it."""
    from transformers.models.qwen2_vl import image_processing_qwen2_vl, video_processing_qwen2_vl
    from transformers.models.qwen3_vl import video_processing_qwen3_vl

    of = getattr(processor, "video_processor", None)
    together = spec.family not in ("qwen2-vl", "qwen2-5-vl")
    if of is None:
        source: Any = (
            video_processing_qwen3_vl.Qwen3VLVideoProcessor
            if together
            else video_processing_qwen2_vl.Qwen2VLVideoProcessor
        )
        of = source(patch_size=processor.image_processor.patch_size, merge_size=processor.image_processor.merge_size)
    unit, low, high = of.patch_size * of.merge_size, of.size["shortest_edge"], of.size["longest_edge"]
    try:
        if together:
            high_wide = video_processing_qwen3_vl.smart_resize(
                num_frames=frames, height=height, width=width, factor=unit, min_pixels=low, max_pixels=high,
                temporal_factor=of.temporal_patch_size,
            )  # fmt: skip
        else:
            high_wide = image_processing_qwen2_vl.smart_resize(height, width, unit, min_pixels=low, max_pixels=high)
    except ValueError as error:
        raise UserError(f"video {frames}x{width}x{height}: the model's processor refuses it ({error})") from error
    return high_wide[0] // unit, high_wide[1] // unit


def _stand_in(path: Path, config: dict[str, Any], spec: ModelSpec) -> Any:
    """What the layouts ask of a processor, from config.json, and from preprocessor_config.json where that is there alone."""
    vision = config.get("vision_config") or {}
    side, patch = _first(vision.get("image_size"), 384), _first(vision.get("patch_size"), 14)
    note = "the folder has no processor: sizes are those of config.json"
    whole: tuple[str, ...] = ()
    image_processor: Any = None
    if (path / "preprocessor_config.json").is_file():
        try:
            with models.quiet():
                image_processor = AutoImageProcessor.from_pretrained(path, local_files_only=True)
        except (ValueError, OSError, TypeError, KeyError, AttributeError, ImportError):
            image_processor = None
    if image_processor is None:
        image_processor = _images(config, spec, side, patch)
        whole = (note,)
        if spec.visual_grid == "thw":
            whole = (
                f"{note}, and an image has up to transformers' {image_processor.size['longest_edge'] / 1e6:.2f} Mpx",
            )
    tokens = config.get("image_seq_length") or config.get("mm_tokens_per_image") or (side // patch) ** 2
    attributes = {
        "image_processor": image_processor,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": config.get("vision_feature_select_strategy", "default"),
        "patch_size": patch,
        "image_seq_length": tokens,
        "num_image_tokens": (side // patch) ** 2,
        "notes": whole,
    }
    if spec.family == "llava-onevision":
        attributes["vision_aspect_ratio"] = config.get("vision_aspect_ratio") or "anyres_max_9"
    return SimpleNamespace(**attributes)


def _images(config: dict[str, Any], spec: ModelSpec, side: int, patch: int) -> Any:
    """An image processor's settings where there are none."""
    square = {"height": side, "width": side}
    if spec.visual_grid == "thw":
        from transformers import Qwen2VLImageProcessor

        merge = int((config.get("vision_config") or {}).get("spatial_merge_size") or 2)
        return Qwen2VLImageProcessor(patch_size=patch, merge_size=merge)
    if spec.visual_grid == "anyres" and (points := config.get("image_grid_pinpoints")):
        return SimpleNamespace(size={"shortest_edge": side}, image_grid_pinpoints=points)
    if spec.family == "internvl":
        return SimpleNamespace(size=square, min_patches=1, max_patches=12)
    if spec.family in ("llava", "gemma3"):
        return SimpleNamespace(
            do_resize=True, size={"shortest_edge": side}, do_center_crop=True, crop_size=square, do_pad=False
        )
    raise UserError(
        f"visual tokens of {spec.family} depend on its processor; copy preprocessor_config.json from the source"
    )


def _first(value: Any, default: int) -> int:
    """A side that is one number, or the first of several."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else default
