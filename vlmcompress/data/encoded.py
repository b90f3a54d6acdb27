"""Encoded samples that are made when they are asked for, as those of a long run do not all fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from vlmcompress.data.encode import Inputs, encode
from vlmcompress.data.samples import Sample

if TYPE_CHECKING:
    from vlmcompress.models import VLM

MOST = 2 << 30
"""Bytes of encoded samples that are kept; those behind are encoded whenever they are asked for."""


class Encoded(Sequence[Inputs]):
    """The inputs of samples as `encode` makes them, one sample each.

    Args:
        max_length: as of `encode`, which refuses longer samples.
        most: bytes of them that are kept in memory.
    """

    def __init__(self, samples: Sequence[Sample], vlm: VLM, *, max_length: int | None = None, most: int = MOST) -> None:
        self._samples, self._vlm, self._max_length = samples, vlm, max_length
        self._room, self._kept = most, dict[int, Inputs]()

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Inputs: ...
    @overload
    def __getitem__(self, index: slice) -> list[Inputs]: ...
    def __getitem__(self, index: int | slice) -> Inputs | list[Inputs]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if index < 0 or index >= len(self):
            raise IndexError(index)
        found = self._kept.get(index)
        if found is None:
            found = encode([self._samples[index]], self._vlm, max_length=self._max_length)[0]
            size = sum(value.nbytes for value in found.values())
            if size <= self._room:
                self._room -= size
                self._kept[index] = found
        return found

    def __iter__(self) -> Iterator[Inputs]:
        return (self[index] for index in range(len(self)))
