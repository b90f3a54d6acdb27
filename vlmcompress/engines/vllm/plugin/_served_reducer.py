"""The reducer of the served checkpoint: how many tokens an image keeps, and which."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from vlmcompress import __version__
from vlmcompress.models import read_json, spec_for
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import methods, scorer_file
from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.methods import Grid, Reduction, Signals, TokenCounter
from vlmcompress.reduction.support import (
    engine_problem,
    reads_pixels,
    require_counter,
    require_reducible,
)
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.identity import json_digest
from vlmcompress.utils.messages import foreign_errors

UNITS = "kept_units"
"""The field of an image's tokens that stay, for methods that decide by pixels: one bool each."""
KEEP = "keep"
"""The processor argument that is ours: how much images keep."""
_READ = ("architectures", "model_type", reducer_block.KEY)


@dataclass(frozen=True)
class ServedReducer:
    """A method with its options, from the config of a model that vLLM loads.

    `counter`: computes from an image's pixels how many tokens it keeps, for methods with adaptive counts.
    """

    chosen: ReducerChoice
    counter: TokenCounter | None = None

    @staticmethod
    def of(hf_config: Any) -> ServedReducer:
        """Read the reducer of a config. Raises UserError if there is none, it is invalid, or vLLM cannot serve it."""
        config = {name: value for name in _READ if (value := getattr(hf_config, name, None)) is not None}
        carried = reducer_block.read_reducer(config)
        if carried is None:
            raise UserError(
                f"config.json carries no reducer, which {config.get('architectures')} needs; export it again"
            )
        reducer, where = carried.reducer, f"config.json: {reducer_block.KEY}"
        if reason := engine_problem(config["architectures"][0], reducer):
            raise UserError(f"{where}: {reason}")
        try:
            spec = spec_for({"model_type": carried.model_type})
            require_reducible(spec, hf_config, reducer)
            reducer = scorer_file.load_scorer(hf_config, reducer, hub.local(hf_config.name_or_path, "model"))
            if carried.count:
                require_counter(hf_config, reducer, carried.count)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        if reducer.takes_count and carried.count is None:
            raise UserError(f"{where}: 'count' is missing, which '{reducer.method}' needs in vLLM; export it again")
        return ServedReducer(reducer, carried.count)

    @staticmethod
    def in_folder(folder: Path) -> ServedReducer | None:
        """Read the reducer of a checkpoint's folder as vLLM's plugin will, without vLLM; None if it carries none.

        Raises UserError for a reducer that the plugin would refuse, its scorer's file included.
        """
        config = read_json(folder / "config.json", "config")
        if reducer_block.read_reducer(config) is None:
            return None
        with foreign_errors(f"{folder}: transformers cannot read config.json", "; export the checkpoint again"):
            hf_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return ServedReducer.of(hf_config)

    @property
    def pixels(self) -> bool:
        """Whether the method decides by pixels, in the processor."""
        return reads_pixels(self.chosen.reducer)

    def count(self, grid: Grid) -> int:
        """Number of tokens that an image keeps, or the maximum if that depends on the image.

        For methods within the encoder each frame of a video is an image.
        """
        if self.pixels:
            return math.prod(grid)
        if self.counter:
            return self.counter.buckets[-1]
        frames = grid[0] if self.merges else 1
        return frames * self.chosen.reducer.budget((grid[0] // frames, *grid[1:]))

    @functools.cached_property
    def largest(self) -> ServedReducer:
        """The reducer with the largest share that a request may set (see `ReducerChoice.largest`)."""
        return dataclasses.replace(self, chosen=self.chosen.largest)

    def keeping(self, keep: float, tokens: int) -> ServedReducer:
        """The reducer with what a request set for an image of `tokens` tokens (see `ReducerChoice.keeping`)."""
        return dataclasses.replace(self, chosen=self.chosen.keeping(keep, tokens))

    def of_item(self, item: Mapping[str, Any], modality: str, tokens: int) -> ServedReducer:
        """The reducer of a processed image or video of `tokens` tokens, with what its request set."""
        field = f"{modality}_{KEEP}"
        return self.keeping(float(item[field].data), tokens) if field in item else self

    def count_of(self, item: Mapping[str, Any], modality: str, grid: Grid) -> int:
        """Number of tokens that a processed image or video keeps, whose tokens are one grid."""
        if UNITS in item:
            return int(item[UNITS].data.sum())
        return self.of_item(item, modality, math.prod(grid)).count(grid)

    @property
    def merges(self) -> bool:
        """Whether the method merges tokens within the encoder's layers."""
        return self.chosen.reducer.MERGES

    def reduce(self, grid: Grid, features: Tensor | None = None, **signals: Any) -> Reduction:
        """Decide the reduction of one image, without synchronizing with the device, so values are not checked.

        Args:
            grid: grid of the image's tokens.
            features: `[n, d]`, the tokens; None before the encoder has run.
            signals: further fields of `Signals`.
        """
        return self.reduce_all([{"grid": grid, "features": features, **signals}])[0]

    def reduce_all(self, images: Sequence[Mapping[str, Any]]) -> list[Reduction]:
        """Decide the reductions of several images, given the arguments of `reduce` for each.

        Where the processor decided, `kept` is the index of the tokens that stay.
        """
        if self.pixels:
            return [Reduction.keep(image["kept"], math.prod(image["grid"])) for image in images]
        # A check for NaN would make the host wait for the encoder, while vLLM could prepare the next step.
        signals = [Signals(**image, finite=True) for image in images]
        return methods.reduce_all(self.chosen.reducer, signals, check=False)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen characters that identify the reducer, for cache keys of encoded images."""
        return json_digest([__version__, self.chosen.plain(), self.counter and self.counter.plain()])[:16]
