"""Positions of kept tokens, without an engine: packing is exact, and both parts add up to those of the full prompt.

The code is imported by the tests, as it imports vLLM, which takes some seconds in each process that collects tests.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def code() -> ModuleType:
    return import_module("vlmcompress.engines.vllm.plugin._positions")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_places_are_exact_in_every_dtype(dtype):
    """Of every size that there is; bfloat16 by itself would round 257 to 256."""
    some = torch.cat([torch.arange(70_000), torch.arange(0, code().LIMIT, 1009), torch.tensor([code().LIMIT - 1])])
    places = torch.stack([some, some.flip(0), some // 2], 1)
    rows = torch.randn(len(some), 2).to(dtype)
    unpacked, back = code().unpack(code().pack(rows, places))
    assert torch.equal(back, places)
    assert torch.equal(unpacked, rows)


def test_a_place_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="beyond 16,777,215"):
        code().pack(torch.zeros(1, 2), torch.tensor([[0, code().LIMIT, 0]]))


class Engine:
    """Stands where vLLM's model would: embeds text as zeros, and returns the positions that it is given."""

    def embed_input_ids(self, input_ids, rows, *, is_multimodal):
        embeds = torch.zeros(len(input_ids), 2)
        if rows:
            embeds[is_multimodal] = torch.cat(rows)
        return embeds

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds):
        return positions.clone()


def model() -> Any:
    """Images are grids `feature.grid`."""

    class Model(code().OriginalPositions, Engine):
        def __init__(self) -> None:
            self.reducer = SimpleNamespace(compact=False)
            self._places = torch.zeros(3, 65, dtype=torch.int64)
            self._positions = torch.zeros_like(self._places)

        def span(self, feature):
            return np.zeros((3, feature.mm_position.length), dtype=np.int64), max(feature.grid)

    return Model()


def prompt(*parts: Any) -> tuple[list[SimpleNamespace], list[torch.Tensor], torch.Tensor, torch.Tensor, int]:
    """Of text lengths and `(grid, kept)` in turn: images, their packed rows, which tokens are theirs, positions by the rule.

    The rule, one token at a time: text counts on; an image's tokens stand at its start plus their place; what follows it
    starts after its longest side.
    """
    features, packed, visual, positions, at = [], [], [], [], 0
    for part in parts:
        if isinstance(part, int):
            positions += [(at + i,) * 3 for i in range(part)]
            visual += [False] * part
            at += part
            continue
        grid, kept = part
        places = [(t, h, w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]
        where = SimpleNamespace(offset=len(positions), length=len(kept))
        features.append(SimpleNamespace(grid=grid, mm_position=where))
        chosen = torch.tensor([places[i] for i in kept])
        packed.append(code().pack(torch.randn(len(kept), 2), chosen))
        positions += [tuple(at + side for side in places[i]) for i in kept]
        visual += [True] * len(kept)
        at += max(grid)
    return features, packed, torch.tensor(visual), torch.tensor(positions).T, at


PROMPT = (3, ((1, 4, 6), [1, 7, 8, 23]), 2, ((1, 9, 2), [0, 17]), ((3, 2, 2), [0, 5, 11]), 4)


def test_both_parts_add_up_to_the_positions_of_the_full_prompt():
    """Oracle: the rule, token by token. With and without text between images, an image in front, text alone."""
    for parts in (PROMPT, PROMPT[1:], PROMPT[:2], (5,)):
        features, packed, visual, expected, end = prompt(*parts)
        ids, served = [0] * len(visual), model()
        coarse, delta = served.get_mrope_input_positions(ids, list(reversed(features)))
        assert delta == end - len(ids)
        embeds = served.embed_input_ids(torch.tensor(ids), packed, is_multimodal=visual)
        assert torch.equal(served.forward(None, coarse, None, embeds), expected)
        assert torch.equal(embeds[visual], torch.cat([part[:, :2] for part in packed] or [embeds[visual]]))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_chunks_may_cut_an_image_anywhere(size):
    features, packed, visual, expected, _ = prompt(*PROMPT)
    coarse, _ = (served := model()).get_mrope_input_positions([0] * len(visual), features)
    rows = iter(torch.cat(packed))
    for start in range(0, len(visual), size):
        part = slice(start, start + size)
        chunk = [next(rows)[None] for _ in range(int(visual[part].sum()))]
        served.embed_input_ids(torch.zeros(len(visual[part])), chunk, is_multimodal=visual[part])
        assert torch.equal(served.forward(None, coarse[:, part], None, None), expected[:, part])


def test_no_state_stays_between_steps():
    features, packed, visual, _, _ = prompt(*PROMPT)
    served = model()
    served.embed_input_ids(torch.zeros(len(visual)), packed, is_multimodal=visual)
    served.embed_input_ids(torch.zeros(4), [], is_multimodal=torch.zeros(4, dtype=torch.bool))
    positions = torch.arange(4).expand(3, -1)
    assert torch.equal(served.forward(None, positions, None, None), positions)
