"""What a draft head gets of a request's images: none of their tokens, few, or all, and a vector of each (`draft --images`).

    hidden      at each visual token the target's hidden state, next to the placeholder's embedding: what vLLM does by itself
    all         the same with the image's features in the place of that embedding
    none        no visual token
    METHOD:KEEP of `all` the rows that a reducer leaves: it looks at the features, as one after the projector does

A draft with few visual tokens has less to attend to, as in SpecVLM (arXiv 2509.11815). Next to the rows, ViSpec
(arXiv 2509.15235) adds a vector of the image to each row: here the mean of the request's features so far, times a matrix.

vLLM keeps a draft's keys in the same blocks of its cache as the target's, and a block of the prefix cache holds what the
prompt's tokens up to its end decide. So whole blocks are left out, all of them within an image (`engines/vllm/plugin/_draft`),
and a few rows more than the share stay: what is dropped of an image is a number of blocks. Training does so, too.

All but `hidden` need our plugin. The draft's config says what it gets under `KEY`, in the part that vLLM passes on.
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
"""Its model in vLLM, by the plugin."""
BLOCK = 16
"""Tokens of a block of vLLM's cache on GPUs; its CPU build has at least 32."""
_KEYS = {"schema", "images", "vector", "block"}
WORDS = ("hidden", "all", "none")
_EVEN = choice.parse_reducer("uniform:0.5")  # where nothing should stay, and the blocks of the cache have room


@dataclass(frozen=True)
class DraftImages:
    """What a draft gets of images.

    Attributes:
        rows: one of `WORDS`, or the reducer that chooses.
        vector: whether a vector of the image is added to each row.
        block: tokens of a block of vLLM's cache where it is meant to be served.
    """

    rows: str | ReducerChoice = "hidden"
    vector: bool = False
    block: int = BLOCK

    @property
    def plain(self) -> bool:
        """Whether vLLM does it without our plugin."""
        return self.rows == "hidden" and not self.vector

    def settings(self) -> dict[str, Any]:
        """The content of the config under `KEY`."""
        rows = self.rows if isinstance(self.rows, str) else self.rows.plain()
        return {"schema": SCHEMA, "images": rows, "vector": self.vector, "block": self.block}

    def dropped_blocks(self, start: int, end: int, block: int) -> int:
        """How many blocks of `block` tokens are left out of an image that stands in the tokens `[start, end)` of a sequence.

        They lie within the image, and at least the share stays.
        """
        if self.rows == "none":
            least = 0
        elif isinstance(self.rows, ReducerChoice):
            least = self.rows.module.budget((1, 1, end - start), self.rows.options)
        else:
            return 0
        return max(0, min((end - start - least) // block, end // block - -(-start // block)))

    def reduction(self, features: Tensor, left: int) -> Reduction:
        """What becomes of an image's rows, of which there are as many as of `features [n, d]`, where `left` > 0 of them stay.

        Nothing here waits for the device.
        """
        count = len(features)
        if left == count:
            return Reduction.identity(count, features.device)
        reducer = self.rows if isinstance(self.rows, ReducerChoice) else _EVEN
        options = dataclasses.replace(reducer.options, keep=left / count)  # type: ignore[call-arg]
        signals = Signals(grid=(1, 1, count), features=features, finite=True)
        return methods.reduce(reducer.module, signals, options, check=False)


def parse_images(text: str, vector: bool = False, block: int = BLOCK) -> DraftImages:
    """Read the value of `--images`. UserError for another word, or a reducer that a draft can't have."""
    rows = text if text in WORDS else _checked(choice.parse_reducer(text), f"--images {text}")
    return DraftImages(rows, vector, block)


def read_draft_images(config: Mapping[str, Any]) -> DraftImages:
    """Read what a draft's `transformer_layer_config` says. UserError for a block that is not right."""
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
    """The reducer, if it needs nothing but features and keeps a share that can be chosen."""
    module, options = reducer.module, reducer.options
    fits = module.STAGE == "projected" and module.COUNT == "fixed" and not module.NEEDS - {"features"}
    if not fits or options.keep is None or options.scorer is not None:
        raise UserError(
            f"{where}: a draft's tokens are chosen by a method that looks at features alone and keeps a fixed share: "
            "coverage, divprune, cdpruner, dart, scope, uniform or random; or write hidden, all or none"
        )
    return reducer


def mean_feature(features: Tensor) -> Tensor:
    """The mean `[d]` float32 of an image's features `[n, d]`."""
    return features.float().mean(0)
