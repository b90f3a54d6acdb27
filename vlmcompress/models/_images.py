"""What a processor makes of an image: what each visual token shows, and settings with which there are fewer tokens.

Both are computed from an image's size alone. The layouts are the values of `ModelSpec.layout`, one for each way of cutting
an image up. They repeat the arithmetic of the family's processor and model in transformers, without opening an image.

The settings are those of `ModelSpec.sizes`, also one function for each way of cutting: each lists the settings from the one
with the fewest tokens to the one that the processor has. All of them keep the image's shape and are settings that the
family's own processor has, so that whatever engine reads the checkpoint's processor makes images of that size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmcompress.utils.errors import UserError

Box = tuple[float, float, float, float]
"""A box: left, top, right and bottom, in pixels of the original image; outside of it where padding is shown."""


@dataclass(frozen=True)
class Piece:
    """A part of an image that the encoder sees as a picture of its own: `rows x columns` tokens in raster order.

    newlines: a token that shows nothing ends each row ("rows"), or the piece ("end"), or there is none ("").
    Of a very narrow image LLaVA-NeXT leaves a piece without columns, newlines alone.
    """

    rows: int
    columns: int
    box: Box
    newlines: str = ""

    @property
    def tokens(self) -> int:
        """Number of visual tokens of the piece, newlines included."""
        return self.rows * self.columns + {"": 0, "end": 1, "rows": self.rows}[self.newlines]

    def cells(self) -> Iterator[Box | None]:
        """The box that each token shows; None for a newline."""
        left, top, right, bottom = self.box
        wide, high = (right - left) / max(self.columns, 1), (bottom - top) / max(self.rows, 1)
        for row in range(self.rows):
            for column in range(self.columns):
                x, y = left + column * wide, top + row * high
                yield x, y, x + wide, y + high
            if self.newlines == "rows":
                yield None
        if self.newlines == "end":
            yield None


@dataclass(frozen=True)
class Layout:
    """The visual tokens of one image, in the order of the prompt: those of each piece in turn."""

    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """Number of visual tokens of the image."""
        return sum(piece.tokens for piece in self.pieces)

    def cells(self) -> list[Box | None]:
        """The box that each token shows; None for one that shows nothing."""
        return [cell for piece in self.pieces for cell in piece.cells()]

    def grids(self) -> list[tuple[tuple[int, int, int], list[int]]]:
        """The grid `(1, rows, columns)` of each piece and the indices of its tokens among the image's, without newlines."""
        grids, start = [], 0
        for piece in self.pieces:
            index = [start + number for number, cell in enumerate(piece.cells()) if cell is not None]
            if index:
                grids.append(((1, piece.rows, piece.columns), index))
            start += piece.tokens
        return grids


Cut = Callable[[Any, int, int, int], Layout]
"""A function of `(processor, width, height, images)`: the layout of an image of that size among so many in a prompt."""


def square(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LLaVA-1.5: the image resized and cropped to one size."""
    if processor.num_additional_image_tokens != (processor.vision_feature_select_strategy == "default"):
        raise UserError("a LLaVA that keeps the CLS token is not supported; use one whose features are patches alone")
    images_of = processor.image_processor
    box, (wide, high) = (0.0, 0.0, float(width), float(height)), (width, height)
    if getattr(images_of, "do_pad", False):
        side = max(width, height)
        x, y = (width - side) / 2, (height - side) / 2
        box, (wide, high) = (x, y, x + side, y + side), (side, side)
    if images_of.do_resize:
        if short := images_of.size.get("shortest_edge"):
            scale = short / min(wide, high)
            wide, high = (short, int(high * scale)) if wide <= high else (int(wide * scale), short)
        else:
            wide, high = images_of.size["width"], images_of.size["height"]
    if images_of.do_center_crop:
        crop = images_of.crop_size
        box = _cut(box, (wide, high), ((wide - crop["width"]) / 2, (high - crop["height"]) / 2), crop)
        wide, high = crop["width"], crop["height"]
    return Layout((Piece(high // processor.patch_size, wide // processor.patch_size, box),))


def anyres(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LLaVA-NeXT and OneVision: the whole image, then its tiles put together, without padding, row by row."""
    from transformers.image_processing_utils import select_best_resolution

    whole = (0.0, 0.0, float(width), float(height))
    size, aspect = processor.image_processor.size, getattr(processor, "vision_aspect_ratio", None)
    side = size.get("shortest_edge") or size["height"]
    n = math.isqrt(processor.num_image_tokens) if aspect else side // processor.patch_size
    if aspect and images > 1:
        return Layout((Piece(n, n, whole, "end"),))
    canvas = select_best_resolution((height, width), processor.image_processor.image_grid_pinpoints)
    rows, columns = n * (canvas[0] // side), n * (canvas[1] // side)
    scale = min(canvas[1] / width, canvas[0] / height)
    x, y = (min(math.ceil(length * scale), edge) for length, edge in ((width, canvas[1]), (height, canvas[0])))
    unit = (x / width, y / height)  # pixels of the canvas for each of the image, across and down
    left, top = -((canvas[1] - x) // 2) / unit[0], -((canvas[0] - y) // 2) / unit[1]
    box = (left, top, left + canvas[1] / unit[0], top + canvas[0] / unit[1])
    used = (rows, columns)
    if width / height > columns / rows:
        used = (rows - (rows - int(round(height * (columns / width), 7))) // 2 * 2, columns)
    else:
        used = (rows, columns - (columns - int(round(width * (rows / height), 7))) // 2 * 2)
    start = ((columns - used[1]) / 2, (rows - used[0]) / 2)
    box = _cut(box, (columns, rows), start, {"width": used[1], "height": used[0]})
    if aspect:
        ratio = math.sqrt(used[0] * used[1] / (int(aspect.removeprefix("anyres_max_")) * n**2))
        used = (int(used[0] // ratio), int(used[1] // ratio)) if ratio > 1.1 else used
    return Layout((Piece(n, n, whole), Piece(used[0], used[1], box, "rows")))


def native(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of the Qwen family: one grid in the image's own shape."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    images_of = processor.image_processor
    unit = images_of.patch_size * images_of.merge_size
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    rows, columns = (side // unit for side in smart_resize(height, width, unit, min_pixels=low, max_pixels=high))
    return Layout((_whole(rows, columns, width, height),))


def filmed(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of GLM-V: one grid in the image's own shape, whose limits count an image as a video of some frames."""
    from transformers.models.glm4v.image_processing_glm4v import smart_resize

    images_of = processor.image_processor
    unit, frames = images_of.patch_size * images_of.merge_size, images_of.temporal_patch_size
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    sides = smart_resize(frames, height, width, frames, unit, min_pixels=low, max_pixels=high)
    return Layout((Piece(sides[0] // unit, sides[1] // unit, (0.0, 0.0, float(width), float(height))),))


def patched(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Mistral 3: one grid in the image's own shape, scaled down only where a side is too long."""
    unit = processor.patch_size * processor.spatial_merge_size
    ratio = max(1.0, max(width, height) / processor.image_processor.size["longest_edge"])
    columns, rows = ((math.floor(side / ratio) - 1) // unit + 1 for side in (width, height))
    return Layout((_whole(rows, columns, width, height),))


def budgeted(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Gemma 4: one grid in the image's own shape, scaled up or down to the budget of tokens."""
    from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

    images_of = processor.image_processor
    patch, pool = images_of.patch_size, images_of.pooling_kernel_size
    sides = get_aspect_ratio_preserving_size(height, width, patch, images_of.max_soft_tokens * pool**2, pool)
    rows, columns = (side // (patch * pool) for side in sides)
    return Layout((_whole(rows, columns, width, height),))


def pooled(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Gemma 3: the image resized to a square whatever its shape (pan and scan is off unless a call asks for it)."""
    n = math.isqrt(processor.image_seq_length)
    return Layout((_whole(n, n, width, height),))


def tiled(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of InternVL: tiles in the best fitting arrangement, then the whole image."""
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    images_of = processor.image_processor
    side = (images_of.size["height"], images_of.size["width"])
    across, down = get_optimal_tiled_canvas((height, width), side, images_of.min_patches, images_of.max_patches)
    return _tiles(math.isqrt(processor.image_seq_length), across, down, width, height)


def split(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of Idefics3 and SmolVLM: tiles of the image scaled up to whole ones, then the whole image."""
    from transformers.models.idefics3 import image_processing_idefics3

    source: Any = image_processing_idefics3
    images_of = processor.image_processor
    side, across, down = images_of.max_image_size["longest_edge"], 1, 1
    if images_of.do_image_splitting:
        if images_of.do_resize:
            size = source._resize_output_size_rescale_to_max_len(height, width, max_len=images_of.size["longest_edge"])
            high, wide = source._resize_output_size_scale_below_upper_bound(*size, max_len=source.MAX_IMAGE_SIZE)
        else:
            high, wide = height, width
        if wide >= high:
            across = math.ceil(wide / side)
            down = math.ceil(int(across * side / (wide / high)) / side)
        else:
            down = math.ceil(high / side)
            across = math.ceil(int(down * side * (wide / high)) / side)
    return _tiles(math.isqrt(processor.image_seq_len), across, down, width, height)


def adaptive(processor: Any, width: int, height: int, images: int) -> Layout:
    """Layout of LFM2-VL: one grid in the image's own shape, behind tiles of it where it is large."""
    images_of = processor.image_processor
    unit, factor = images_of.encoder_patch_size, images_of.downsample_factor
    limits = {"max_image_tokens": images_of.max_image_tokens, "encoder_patch_size": unit, "downsample_factor": factor}
    across = down = 1
    large = images_of._is_image_too_large(
        height=height, width=width, max_pixels_tolerance=images_of.max_pixels_tolerance, **limits
    )
    if large and images_of.do_image_splitting and not images_of.min_tiles == images_of.max_tiles == 1:
        across, down, *_ = images_of._get_grid_layout(
            height, width, images_of.min_tiles, images_of.max_tiles, images_of.tile_size
        )
    wide, high = images_of.smart_resize(
        height=height, width=width, min_image_tokens=images_of.min_image_tokens, **limits
    )
    columns, rows = (math.ceil(side // unit / factor) for side in (wide, high))
    whole = _whole(rows, columns, width, height)
    n = math.ceil(images_of.tile_size // unit / factor)
    pieces = _tiles(n, across, down, width, height).pieces[:-1]
    return Layout((*pieces, whole) if images_of.use_thumbnail or not pieces else pieces)


def _whole(rows: int, columns: int, width: int, height: int) -> Piece:
    """The piece that shows a whole image in `rows x columns` tokens."""
    return Piece(rows, columns, (0.0, 0.0, float(width), float(height)))


def _tiles(n: int, across: int, down: int, width: int, height: int) -> Layout:
    """Make pieces: `across x down` tiles of `n x n` tokens that fill the image, row by row, then one of the whole image."""
    whole = _whole(n, n, width, height)
    if across * down == 1:
        return Layout((whole,))
    xs = [width * i / across for i in range(across + 1)]
    ys = [height * i / down for i in range(down + 1)]
    tiles = [Piece(n, n, (xs[c], ys[r], xs[c + 1], ys[r + 1])) for r in range(down) for c in range(across)]
    return Layout((*tiles, whole))


def _cut(box: Box, size: tuple[float, float], start: tuple[float, float], part: dict) -> Box:
    """The crop of `box` that begins at `start` (x, y) and is as large as `part`, both in pixels of `box` drawn in `size`."""
    x, y = (box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1]
    left, top = box[0] + start[0] * x, box[1] + start[1] * y
    return left, top, left + part["width"] * x, top + part["height"] * y


@dataclass(frozen=True)
class ImageSetting:
    """A setting of a processor.

    Attributes:
        tokens: the most visual tokens of an image of an ordinary shape.
        image_processor: settings of the image processor that differ from those it has.
        config: entries of config.json that have to agree.
    """

    tokens: int
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, processor: Any) -> Any:
        """A copy of the processor that has this setting."""
        image_processor = processor.image_processor
        changed = copy.copy(processor)
        changed.image_processor = type(image_processor).from_dict(
            image_processor.to_dict() | dict(self.image_processor)
        )
        return changed


Sizes = Callable[[Any], list[ImageSetting]]
"""A function of a processor: its settings, those with the fewest tokens first; the last one is as it is now."""


def pixels(processor: Any) -> list[ImageSetting]:
    """Settings of the Qwen family: the most pixels of an image."""
    return _pixels(processor, 1)


def film_pixels(processor: Any) -> list[ImageSetting]:
    """Settings of GLM-V: the most pixels of an image that counts as a film of some frames."""
    return _pixels(processor, processor.image_processor.temporal_patch_size)


def _pixels(processor: Any, frames: int) -> list[ImageSetting]:
    images_of = processor.image_processor
    unit = (images_of.patch_size * images_of.merge_size) ** 2 * frames
    low, high = images_of.size["shortest_edge"], images_of.size["longest_edge"]
    least, most = max(1, -(-low // unit)), high // unit
    return [
        ImageSetting(tokens, {"size": {"shortest_edge": low, "longest_edge": tokens * unit}})
        for tokens in range(least, most)
    ] + [ImageSetting(most)]


def edges(processor: Any) -> list[ImageSetting]:
    """Settings of Mistral 3: the longer side of an image."""
    unit = processor.patch_size * processor.spatial_merge_size
    most = processor.image_processor.size["longest_edge"] // unit
    smaller = [ImageSetting(side**2, {"size": {"longest_edge": side * unit}}) for side in range(1, most)]
    return [*smaller, ImageSetting(most**2)]


def budgets(processor: Any) -> list[ImageSetting]:
    """Settings of Gemma 4: the budget of tokens, one of those that it was trained with."""
    now = processor.image_processor.max_soft_tokens
    trained = (70, 140, 280, 560, 1120)
    return [ImageSetting(budget, {"max_soft_tokens": budget}) for budget in trained if budget < now] + [
        ImageSetting(now)
    ]


def tiles(processor: Any) -> list[ImageSetting]:
    """Settings of InternVL: the most tiles of an image; from two on the whole image is added."""
    images_of, each = processor.image_processor, processor.image_seq_length
    settings = [
        ImageSetting(each * (count + (count > 1)), {"max_patches": count})
        for count in range(max(1, images_of.min_patches), images_of.max_patches)
    ]
    return [*settings, ImageSetting(each * (images_of.max_patches + (images_of.max_patches > 1)))]


def tile_edges(processor: Any) -> list[ImageSetting]:
    """Settings of Idefics3 and SmolVLM: the longer side of an image, in tiles."""
    images_of, each = processor.image_processor, processor.image_seq_len
    if not images_of.do_image_splitting or not images_of.do_resize:
        return [ImageSetting(each)]
    side = images_of.max_image_size["longest_edge"]
    now = images_of.size["longest_edge"]
    counts = range(1, math.ceil(now / side) + 1)
    settings = [ImageSetting(_split(each, count), {"size": {"longest_edge": count * side}}) for count in counts]
    return [*settings[:-1], ImageSetting(settings[-1].tokens)]


def _split(each: int, side: int) -> int:
    """Tokens of a square image that is `side` tiles long."""
    return each * (side**2 + 1) if side > 1 else each


def canvases(processor: Any) -> list[ImageSetting]:
    """Settings of LLaVA-NeXT and OneVision: the canvases of tiles that an image may lie on, without the largest ones."""
    points = [list(point) for point in processor.image_processor.image_grid_pinpoints]
    areas = sorted({high * wide for high, wide in points})
    settings = []
    for area in areas:
        left = {"image_grid_pinpoints": [point for point in points if point[0] * point[1] <= area]}
        changed = ImageSetting(0, left).applied(processor)
        tokens = max(anyres(changed, wide, high, 1).tokens for high, wide in left["image_grid_pinpoints"])
        settings.append(ImageSetting(tokens, left, left))
    settings.sort(key=lambda setting: setting.tokens)
    return [*settings[:-1], ImageSetting(settings[-1].tokens)]


def tiles_or_whole(processor: Any) -> list[ImageSetting]:
    """Settings of LFM2-VL: the most tiles of a large image, and below two of them the most tokens of a whole one."""
    images_of = processor.image_processor
    low, high = images_of.min_image_tokens, images_of.max_image_tokens
    whole = [
        ImageSetting(tokens, {"do_image_splitting": False, "max_image_tokens": tokens}) for tokens in range(low, high)
    ]
    if not images_of.do_image_splitting or images_of.max_tiles == 1:
        return [*whole, ImageSetting(high)]
    each = math.ceil(images_of.tile_size // images_of.encoder_patch_size / images_of.downsample_factor) ** 2
    besides = high if images_of.use_thumbnail else 0
    cut = [
        ImageSetting(max(count * each + besides, high), {"max_tiles": count})
        for count in range(max(2, images_of.min_tiles), images_of.max_tiles)
    ]
    last = ImageSetting(images_of.max_tiles * each + besides)
    return [*whole, ImageSetting(high, {"do_image_splitting": False}), *cut, last]
