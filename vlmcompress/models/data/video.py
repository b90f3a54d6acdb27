"""Videos of samples, whose frames are decoded once the processor has selected those that the model gets.

A processor that has a rate or a number of frames (Qwen3-VL: 2 a second) chooses them by its own `sample_frames`. For one with
neither, frames are chosen as in vLLM 0.32 (`multimodal/video.py`): if it has bounds for their number, as in Qwen2-VL and
Qwen2.5-VL, by its rule at 2 a second, Qwen's own rate; otherwise (LLaVA-OneVision, InternVL) 32 at equal distances, or all of
a shorter video. A list of images is a video that has been sampled already, at a frame a second, and all of it is used. The
processor determines the size of frames.

Files are decoded by OpenCV, as in vLLM by default, through `transformers.video_utils.load_video`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlmcompress.utils import identity
from vlmcompress.utils.errors import BadSample, UserError
from vlmcompress.utils.images import open_raster
from vlmcompress.utils.messages import error_text

RATE, FRAMES = 2.0, 32
"""Frames per second, or per video, for processors that specify neither; as in vLLM."""
FRAMES_FILE = ".frames"
"""Suffix of a file with a list of frames: PNG in base64, joined by commas, as in the `data:video/jpeg` that vLLM reads."""
MOST = 4 << 30
"""Most bytes of a video's selected frames."""


def require_video_support(processor: Any, name: str, images: bool) -> None:
    """Raise `BadSample` if a model's processor takes no videos, or none together with images.

    Args:
        name: the sample's name in messages.
        images: whether the sample also has images.
    """
    kind, video_processor = type(processor).__name__, getattr(processor, "video_processor", None)
    if video_processor is None or not getattr(processor, "video_token", None):
        raise BadSample(f"{name} shows a video, which {kind} does not take; give images in its place")
    if images and {*video_processor.model_input_names} & {*processor.image_processor.model_input_names}:
        raise BadSample(
            f"{name} shows images and a video, of which {kind} would keep the video alone; give one of the two"
        )


def require_no_videos(samples: Iterable[Any]) -> None:
    """Raise `BadSample` if one of the samples, which are meant for a reducer, has a video."""
    for sample in samples:
        if sample.videos:
            raise BadSample(
                f"{sample.name} shows a video, and reducers learn and are calibrated from images; drop the row"
            )


@dataclass(frozen=True)
class LazyFrames(Iterable[Image.Image]):
    """Frames that the function `make` draws or decodes whenever they are read, so that many videos take no memory."""

    make: Callable[[], list[Image.Image]]

    def __iter__(self) -> Iterator[Image.Image]:
        return iter(self.make())


@dataclass(frozen=True)
class Video:
    """A video that is not decoded yet.

    Attributes:
        source: path or content of a file, or its frames.
        origin: the sample's name in messages.
    """

    source: bytes | Path | Iterable[Image.Image]
    origin: str

    @property
    def name(self) -> str:
        """The video's name in messages."""
        return f"{self.origin}: video '{self.source}'" if isinstance(self.source, Path) else f"{self.origin}: video"

    def frames(self, processor: Any) -> tuple[np.ndarray, Any]:
        """The frames that a model gets, `[frames, height, width, 3]` in RGB, and their `VideoMetadata`."""
        if isinstance(self.source, bytes):
            with tempfile.TemporaryDirectory(prefix="vlmcompress-video-") as folder:
                return self._decoded(self.save(Path(folder)), lambda about: _chosen(about, processor.video_processor))
        if isinstance(self.source, Path) and self.source.suffix != FRAMES_FILE:
            return self._decoded(self.source, lambda about: _chosen(about, processor.video_processor))
        from transformers.video_utils import VideoMetadata

        images = self._listed()
        (count, height, width, _), indices = images.shape, list(range(len(images)))
        # vLLM 0.32 (`multimodal/media/video.py: VideoMediaIO.load_base64`) takes a list for a frame a second.
        return images, VideoMetadata(count, width=width, height=height, fps=1.0, frames_indices=indices)

    def _listed(self) -> np.ndarray:
        """The frames of a list, or of a file of frames, `[frames, height, width, 3]`."""
        source: Any = self.source
        if isinstance(source, Path):
            source = [open_raster(io.BytesIO(base64.b64decode(frame))) for frame in source.read_text().split(",")]
        images = [np.asarray(image) for image in source]
        if len({image.shape for image in images}) != 1:
            raise BadSample(f"{self.name} has {len(images)} frames, not of one size; give images of one size")
        return np.stack(images)

    def digest(self) -> bytes:
        """SHA-256 of the file, or of the frames' pixels."""
        if isinstance(self.source, bytes):
            return hashlib.sha256(self.source).digest()
        if isinstance(self.source, Path):
            try:
                return bytes.fromhex(identity.sha256_once(self.source))
            except OSError as error:
                raise BadSample(f"{self.name} cannot be read ({error.strerror}); give a video file") from error
        digest = hashlib.sha256()
        for image in self.source:
            digest.update(identity.image_content(image))
        return digest.digest()

    def save(self, folder: Path) -> Path:
        """Save the video as a file in `folder`, for engines, named by its content; a hard link to the original if possible."""
        if isinstance(self.source, LazyFrames):  # both the name and the file need them: they are made once
            return replace(self, source=list(self.source)).save(folder)
        listed = not isinstance(self.source, bytes | Path)
        suffix = self.source.suffix if isinstance(self.source, Path) else FRAMES_FILE if listed else ".mp4"
        file = folder / f"{self.digest().hex()[:32]}{suffix}"  # OpenCV looks at the content, not at the name
        if file.exists():
            return file
        if isinstance(self.source, Path):
            try:
                os.link(self.source.resolve(), file)
            except OSError:  # another file system
                shutil.copyfile(self.source, file)
        elif isinstance(self.source, bytes):
            file.write_bytes(self.source)
        else:
            frames = self._listed()
            if len(frames) > FRAMES:  # vLLM would leave the rest out
                raise BadSample(
                    f"{self.name} has {len(frames)} frames, and engines take {FRAMES}; give fewer, or its file"
                )
            encoded = []
            for frame in frames:
                Image.fromarray(frame).save(buffer := io.BytesIO(), "PNG", compress_level=1)
                encoded.append(base64.b64encode(buffer.getvalue()).decode())
            file.write_text(",".join(encoded))
        return file

    def _decoded(self, path: Path, choose: Callable[[Any], np.ndarray]) -> tuple[np.ndarray, Any]:
        from transformers.video_utils import load_video

        if importlib.util.find_spec("cv2") is None:
            raise UserError(
                f"{self.name}: decoding a video needs OpenCV; pip install '.[video]' in the checkout of vlmcompress, or "
                "give its frames as a list of images"
            )
        os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # errors are reported below
        location: Any = str(path)  # transformers' annotation leaves paths out
        chosen: list[np.ndarray] = []

        def indices(metadata: Any, **_: Any) -> np.ndarray:
            if metadata.total_num_frames < 1:
                raise ValueError("OpenCV finds no frame in it")
            chosen[:] = [choose(metadata)]
            size = len(chosen[0]) * metadata.width * metadata.height * 3
            if size > MOST:
                raise BadSample(
                    f"{self.name}: {len(chosen[0])} frames of {metadata.width}x{metadata.height} take "
                    f"{size / 2**30:.0f} GiB, more than {MOST >> 30}; make the video smaller"
                )
            return np.unique(chosen[0])

        try:
            frames, metadata = load_video(location, backend="opencv", sample_indices_fn=indices)
            places = np.searchsorted(metadata.frames_indices, chosen[0])  # a processor may repeat a frame
            metadata.frames_indices = chosen[0].tolist()
            return frames[places], metadata
        except UserError:
            raise
        except Exception as error:  # decoders and processors raise anything on damaged files
            raise BadSample(
                f"{self.name} cannot be decoded ({error_text(error)}); write it again, or drop the row"
            ) from error


def _chosen(metadata: Any, video_processor: Any) -> np.ndarray:
    """Indices of the frames that the model gets, ascending."""
    total = metadata.total_num_frames
    settings = {name: getattr(video_processor, name, None) for name in video_processor.valid_kwargs.__annotations__}
    if settings.get("fps") is None and settings.get("num_frames") is None:
        if settings.get("max_frames") is None:
            return np.linspace(0, total - 1, min(FRAMES, total), dtype=int)
        settings["fps"] = RATE
    if settings.get("num_frames") is not None:  # transformers refuses a video that has fewer
        settings["num_frames"] = min(settings["num_frames"], total)
    indices = np.asarray(video_processor.sample_frames(metadata=metadata, **settings), dtype=int)
    return indices.clip(max=total - 1)  # float32 steps may round beyond the last frame


def arguments(decoded: Sequence[tuple[np.ndarray, Any]]) -> dict[str, Any]:
    """The processor's further arguments for videos: that frames are already sampled, and their metadata."""
    if not decoded:
        return {}
    return {"do_sample_frames": False, "video_metadata": [metadata for _, metadata in decoded]}
