"""What a draft head sees of images: `draft --images`, and optionally a vector of them, `--image-vector`.

    hidden      at each visual token the target's hidden state and the placeholder's embedding, as in vLLM by default
    all         the same with the image's features instead of that embedding

ViSpec (arXiv 2509.15235) adds a vector of the image to each row: here the mean of the request's features so far, times a
matrix. All but `hidden` need our plugin. The draft's config records it under `KEY`, in the part that vLLM passes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlmcompress.utils.errors import UserError

KEY = "vlmcompress"
SCHEMA = 1
SPECULATOR = "vlmcompress-eagle3"
"""`speculators_model_type` of a draft that needs our plugin, which a vLLM without it refuses."""
ARCHITECTURE = "VlmcompressEagle3LlamaForCausalLM"
"""Its model class in vLLM, from the plugin."""
ROWS = ("hidden", "all")
_KEYS = {"schema", "images", "vector"}


@dataclass(frozen=True)
class DraftImages:
    """What a draft sees of images.

    Attributes:
        rows: one of `ROWS`.
        vector: whether a vector of the images is added to each row.
    """

    rows: str = "hidden"
    vector: bool = False

    @property
    def plain(self) -> bool:
        """Whether vLLM supports this without our plugin."""
        return self.rows == "hidden" and not self.vector

    def settings(self) -> dict[str, Any]:
        """The content of the config under `KEY`."""
        return {"schema": SCHEMA, "images": self.rows, "vector": self.vector}


def read_draft_images(config: Mapping[str, Any]) -> DraftImages:
    """Read a draft's `transformer_layer_config`. Raises `UserError` for an invalid block."""
    block = config.get(KEY)
    if block is None:
        return DraftImages()
    where = f"config.json of the draft: {KEY}"
    if not isinstance(block, Mapping) or set(block) != _KEYS:
        raise UserError(f"{where} is damaged; train the draft again")
    if block["schema"] != SCHEMA:
        raise UserError(f"{where}.schema is {block['schema']!r}, this vlmcompress reads {SCHEMA}; upgrade it")
    if block["images"] not in ROWS:
        raise UserError(
            f"{where}.images is {block['images']!r}, which is none of {', '.join(ROWS)}; train the draft again"
        )
    if type(block["vector"]) is not bool:
        raise UserError(f"{where}.vector is {block['vector']!r}, should be true or false; train the draft again")
    return DraftImages(block["images"], block["vector"])


def mean_feature(features: Tensor) -> Tensor:
    """The mean `[d]` float32 of an image's features `[n, d]`."""
    return features.float().mean(0)
