"""Visual tokens of images and videos by the family's own rule, before and after a reducer, and the patches of the encoder.

Images are counted by `ModelSpec.layout` with the model's processor, videos by `Images.video` with frames as resized by the
processor (tested against the processors of transformers 5.17). For a folder without a processor a substitute has the settings
that config.json implies (`Images.placeholders` and `processor`); `CountRule.notes` says so.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoImageProcessor

from vlmcompress import models
from vlmcompress.models import Layout, ModelSpec, Piece, square_patches
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.hooks.resizing import ceiling_note
from vlmcompress.reduction.support import reads_pixels
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors

Size = tuple[int, int]
LARGEST = 50_000_000
"""Most pixels of an image or a frame, as the processor is given a blank image of that size."""
MOST_FRAMES = 100_000
LARGE = ((4096, 4096), (8192, 2048), (2048, 8192), (1536, 1024), (1024, 1536), (1344, 1344))
"""Sizes that are tried to find the image with the most tokens."""


@dataclass(frozen=True)
class Pictures:
    """The media of a prompt: sizes `(width, height)` of its images, and `(frames, width, height)` of its video."""

    images: tuple[Size, ...]
    video: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Counted:
    """Visual tokens of a prompt.

    Attributes:
        images: layout of each image.
        film: the grid `(frames, rows, columns)` of the video's tokens; None without one.
        video: all tokens of the video, including a newline after it.
        patches: number of patches of each encoder input.
        largest: tokens of the largest possible image, or of the video if it has more.
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


class CountRule:
    """The rule of one model to `count` the visual tokens of pictures.

    Attributes:
        notes: assumptions, and a processor's limit far above what the model's card recommends, as messages.
    """

    def __init__(self, path: Path, config: Any, spec: ModelSpec | None):
        """`path`: the model's folder; `config`: its config, as transformers has it; `spec`: None: of no family."""
        if spec is None:
            raise UserError(
                f"visual tokens of '{config.model_type}' are not known here; plan its text with --images-per-request 0"
            )
        self.spec, self.config = spec, config
        self.notes: tuple[str, ...] = ()
        try:
            self.processor: Any = models.load_processor(path)
        except UserError:
            self.processor, self.notes = _stand_in(path, config, spec)
        if note := ceiling_note(spec, self.processor):
            self.notes = (*self.notes, note)

    def count(self, pictures: Pictures) -> Counted:
        """Count the tokens of pictures. UserError for sizes that the processor refuses, or for a video if the family's are not
        counted."""
        # In order: the images, tile by tile; the video, frame by frame; and what the largest possible image would take.
        layouts = layouts_of(self.spec, self.processor, pictures.images)
        patches = [count for layout in layouts for piece in layout.pieces for count in self._patches(piece)]
        film = self._video(*pictures.video) if pictures.video else None
        video = math.prod(film) + bool(self.spec.images.newlines) if film else 0
        if film:
            frames, rows, columns = film
            # Families of that grid encode a frame in its own size, others in the tower's one size.
            whole = self.spec.images.grid == "thw"
            patches += [self._side**2 * rows * columns if whole else square_patches(self.config.vision_config)] * frames
        largest = max((self._try(size) for size in LARGE), default=0)
        longest = max([largest, video, *(layout.tokens for layout in layouts)])
        return Counted(layouts, film, video, tuple(patches), longest)

    def _try(self, size: Size) -> int:
        try:
            return layouts_of(self.spec, self.processor, [size])[0].tokens
        except UserError:
            return 0

    @property
    def _side(self) -> int:
        return self.spec.images.token_side(self.config) if self.spec.images.token_side else 1

    def _patches(self, piece: Piece) -> list[int]:
        """Number of patches of each encoder input for a piece of an image."""
        if piece.tiles is None:
            return [piece.rows * piece.columns * self._side**2]
        return [square_patches(self.config.vision_config)] * piece.tiles

    def _video(self, frames: int, width: int, height: int) -> tuple[int, int, int]:
        """The grid of a video's tokens."""
        if width * height > LARGEST or frames > MOST_FRAMES:
            raise UserError(
                f"video {frames}x{width}x{height} is larger than {MOST_FRAMES:,} frames of {LARGEST / 1e6:.0f} Mpx"
            )
        if self.spec.images.video is None:
            raise UserError(
                f"videos of {self.spec.family} are not counted here; give the frames as --images-per-request"
            )
        try:
            return self.spec.images.video(self.processor, frames, width, height)
        except ValueError as error:
            raise UserError(f"video {frames}x{width}x{height}: the model's processor refuses it ({error})") from error


def layouts_of(spec: ModelSpec, processor: Any, sizes: Sequence[Size]) -> tuple[Layout, ...]:
    """The layouts of a prompt's images by their sizes. UserError for sizes that are too large or refused by the processor."""
    layouts = []
    for width, height in sizes:
        if width * height > LARGEST:
            raise UserError(f"image {width}x{height} is {width * height / 1e6:.1f} Mpx, more than {LARGEST / 1e6:.0f}")
        what = f"image {width}x{height}: the model's processor refuses it"
        with foreign_errors(what, "; see the sizes in vision_config, or copy the processor's files"):
            layouts.append(spec.layout(processor, width, height, len(sizes)))
    return tuple(layouts)


def kept_tokens(counted: Counted, chosen: ReducerChoice, spec: ModelSpec) -> int | None:
    """Visual tokens of a prompt after a reducer; None if that depends on the images' content.

    vLLM's plugin reduces a video as one grid. Raises UserError if it does not support videos with this reducer.
    """
    if counted.film and reads_pixels(chosen.reducer):
        raise UserError(f"--reduce {chosen}: vLLM's plugin takes no videos with '{chosen.method}'; use divprune")
    full = sum(layout.tokens for layout in counted.images)
    grids = _grids(counted, chosen)
    left = [chosen.reducer.budget(grid) for grid in grids]
    if None in left:
        return None
    return full + counted.video - sum(math.prod(grid) - count for grid, count in zip(grids, left, strict=True))


def per_block(counted: Counted, left: int, chosen: ReducerChoice | None, blocks: int) -> Sequence[int]:
    """Visual tokens in each decoder block: `left`, unless a method within the language model varies them by block."""
    grids = _grids(counted, chosen) if chosen and chosen.reducer.STAGE == "llm" else []
    counts = [chosen.left(grid, blocks) for grid in grids] if chosen else []
    if not counts or None in counts:
        return [left] * blocks
    rest = counted.tokens - sum(math.prod(grid) for grid in grids)
    return [rest + sum(block) for block in zip(*counts, strict=True)]


def _grids(counted: Counted, chosen: ReducerChoice) -> list[tuple[int, int, int]]:
    """The separately reduced grids of all images and the video."""
    images = [grid for layout in counted.images for grid, _ in layout.grids()]
    if counted.film is None:
        return images
    return [*images, counted.film]


def _stand_in(path: Path, config: Any, spec: ModelSpec) -> tuple[Any, tuple[str, ...]]:
    """A substitute for the processor with what layouts read, from config.json and, if only that file exists, from
    preprocessor_config.json; and the assumptions made, as messages.
    """
    notes: tuple[str, ...] = ()
    image_processor: Any = None
    if (path / "preprocessor_config.json").is_file():
        with (
            contextlib.suppress(ValueError, OSError, TypeError, KeyError, AttributeError, ImportError),
            models.quiet_transformers(),
        ):
            image_processor = AutoImageProcessor.from_pretrained(path, local_files_only=True)
    if image_processor is None:
        if spec.images.processor is None:
            raise UserError(
                f"visual tokens of {spec.family} depend on its processor; copy preprocessor_config.json from the source"
            )
        image_processor = spec.images.processor(config)
        note = "the folder has no processor: sizes are those of config.json"
        if spec.images.grid == "thw":
            most = image_processor.size["longest_edge"] / 1e6
            note += f", and an image has up to transformers' {most:.2f} Mpx"
        notes = (note,)
    # Dotted names are settings of the image processor, which has them; the others are of the processor itself.
    settings = spec.images.placeholders(config) if spec.images.placeholders else {}
    whole = {name: value for name, value in settings.items() if "." not in name}
    return SimpleNamespace(image_processor=image_processor, **whole), notes
