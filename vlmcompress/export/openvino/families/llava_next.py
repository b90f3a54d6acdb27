"""LLaVA-NeXT (1.6): an image as a whole and its tiles, which the pipeline cuts and puts together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from vlmcompress.export.openvino.families.llava import images, tower
from vlmcompress.export.openvino.spec import OpenvinoFamily, decoder_problems

NEWLINE = "model.image_newline"


def settings(read: Callable[[str], Tensor]) -> dict[str, Any]:
    """The embedding that ends each row of tiles, which the pipeline reads from config.json."""
    return {"image_newline": read(NEWLINE).float().tolist()}


def problems(config: Mapping[str, Any]) -> list[str]:
    """Reasons why the model cannot be written, or differs in the pipeline."""
    problems, sizes = decoder_problems(config), [tuple(size) for size in config["image_grid_pinpoints"]]
    if any((width, height) not in sizes for height, width in sizes):
        problems.append(
            "OpenVINO GenAI takes sizes of images for (width, height); image_grid_pinpoints must have both ways"
        )
    return problems


FAMILY = OpenvinoFamily(tower, "<image>", suffix="\n", images=images, settings=settings, problems=problems)
