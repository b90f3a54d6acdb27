"""The visual tokens that a draft head gets: none, a few, or all, and optionally a vector of the images (`draft --images`).

    hidden      at each visual token the target's hidden state and the placeholder's embedding, as in vLLM by default
    all         the same with the image's features instead of that embedding
    none        no visual token
    METHOD:KEEP the rows of `all` that a reducer keeps; it uses the features, like a reducer after the projector

A draft with few visual tokens has less to attend to, as in SpecVLM (arXiv 2509.11815). Next to the rows, ViSpec
(arXiv 2509.15235) adds a vector of the image to each row: here the mean of the request's features so far, times a matrix.

vLLM stores a draft's keys in the same cache blocks as the target's, and a block of the prefix cache depends only on the tokens
up to its end. So only whole blocks within an image are dropped (`engines/vllm/plugin/_draft`), and slightly more rows
than the share are kept. Training does the same.

All modes but `hidden` need our plugin. The draft's config records the mode under `KEY`, in the part that vLLM passes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlmcompress.reduction import choice, methods
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.methods import Reduction, Signals
from vlmcompress.utils.errors import UserError

KEY = "vlmcompress"
SCHEMA = 1
SPECULATOR = "vlmcompress-eagle3"
"""`speculators_model_type` of a draft that needs our plugin, which a vLLM without it refuses."""
ARCHITECTURE = "VlmcompressEagle3LlamaForCausalLM"
"""Its model class in vLLM, from the plugin."""
BLOCK = 16
"""Tokens of a block of vLLM's cache on GPUs; its CPU build has at least 32."""
_KEYS = {"schema", "images", "vector", "block"}
WORDS = ("hidden", "all", "none")
_EVEN = choice.parse_reducer("uniform:0.5")  # keeps rows for `none`, which only drops whole blocks


@dataclass(frozen=True)
class DraftImages:
    """The visual tokens that a draft gets.

    Attributes:
        rows: one of `WORDS`, or the reducer that chooses the rows.
        vector: whether a vector of the images is added to each row.
        block: tokens per block of the cache of the vLLM that will serve it.
    """

    rows: str | ReducerChoice = "hidden"
    vector: bool = False
    block: int = BLOCK

    @property
    def plain(self) -> bool:
        """Whether vLLM supports this mode without our plugin."""
        return self.rows == "hidden" and not self.vector

    def settings(self) -> dict[str, Any]:
        """The content of the config under `KEY`."""
        rows = self.rows if isinstance(self.rows, str) else self.rows.plain()
        return {"schema": SCHEMA, "images": rows, "vector": self.vector, "block": self.block}

    def dropped_blocks(self, start: int, end: int, block: int) -> int:
        """Number of blocks of `block` tokens to drop of an image that occupies the tokens `[start, end)` of a sequence.

        The blocks lie within the image, and at least the reducer's share is kept.
        """
        if self.rows == "none":
            least = 0
        elif isinstance(self.rows, ReducerChoice):
            least = self.rows.reducer.budget((1, 1, end - start))
        else:
            return 0
        return max(0, min((end - start - least) // block, end // block - -(-start // block)))

    def reduction(self, features: Tensor, left: int) -> Reduction:
        """The reduction of an image's rows to `left` > 0 rows; there are as many rows as `features [n, d]`.

        It does not synchronize with the device.
        """
        count = len(features)
        if left == count:
            return Reduction.identity(count, features.device)
        reducer = self.rows if isinstance(self.rows, ReducerChoice) else _EVEN
        kept = dataclasses.replace(reducer.reducer, keep=left / count)  # type: ignore[call-arg]
        signals = Signals(grid=(1, 1, count), features=features, finite=True)
        return methods.reduce(kept, signals, check=False)


def parse_images(text: str, vector: bool = False, block: int = BLOCK) -> DraftImages:
    """Parse the value of `--images`. Raises `UserError` for an unknown word, or a reducer that a draft can't use."""
    rows = text if text in WORDS else _checked(choice.parse_reducer(text), f"--images {text}")
    return DraftImages(rows, vector, block)


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
    rows = block["images"]
    if isinstance(rows, Mapping):
        rows = _checked(choice.reducer_of_setting(rows, f"{where}.images"), f"{where}.images")
    elif rows not in WORDS:
        raise UserError(f"{where}.images is {rows!r}, which is none of {', '.join(WORDS)}; train the draft again")
    if type(block["vector"]) is not bool:
        raise UserError(f"{where}.vector is {block['vector']!r}, should be true or false; train the draft again")
    if type(block["block"]) is not int or block["block"] < 1:
        raise UserError(f"{where}.block is {block['block']!r}, should be a whole number; train the draft again")
    return DraftImages(rows, block["vector"], block["block"])


def _checked(reducer: ReducerChoice, where: str) -> ReducerChoice:
    """Return the reducer if it needs only features and keeps a configurable share; else raise `UserError`."""
    method = reducer.reducer
    fits = method.STAGE == "projected" and method.COUNT == "fixed" and not method.NEEDS - {"features"}
    if not fits or method.keep is None or method.scorer is not None:
        raise UserError(
            f"{where}: a draft's tokens are chosen by a method that uses only features and keeps a fixed share: "
            "coverage, divprune, cdpruner, dart, uniform or random; or write hidden, all or none"
        )
    return reducer


def mean_feature(features: Tensor) -> Tensor:
    """The mean `[d]` float32 of an image's features `[n, d]`."""
    return features.float().mean(0)
