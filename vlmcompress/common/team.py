"""Several processes that do one run together, as `torchrun -m vlmcompress quantize ...` starts them.

Each worker takes a share of the calibration samples, and of the groups of a block or the samples of a training step; sums go to
all of them, and the first one writes. A process that is alone is a team of one, for which all of this costs nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vlmcompress.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_met: list[bool] = []  # whether this worker ever met the others
_GONE = "another worker of this run ended before its work was done (see its message); run again with --resume"


class AgreedError(UserError):
    """An error of one worker that all end with; the first one tells it."""


def rank() -> int:
    """The number of this worker, the first being 0; as the environment says, so that it holds before the team has met."""
    return int(os.environ.get("RANK", "0")) if _asked() > 1 else 0


def size() -> int:
    """The number of workers that have met."""
    if _asked() == 1:
        return 1
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def first() -> bool:
    """Whether this worker is the one that writes and tells."""
    return rank() == 0


def has_met() -> bool:
    """Whether this worker has ever met the others: what is wrong before is wrong for all of them."""
    return bool(_met)


@contextmanager
def met(problem: str | None = None) -> Iterator[None]:
    """Within the context the workers know each other, each with an accelerator of its own where there are some.

    Args:
        problem: what one of them found that ends all of them, with an `AgreedError`; None: nothing.
    """
    if _asked() == 1 or size() > 1:
        agreed(problem)
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    _try(dist.init_process_group, "the workers of this run do not find each other; start them with torchrun")
    _met.append(True)
    try:
        agreed(problem)
        yield
    finally:
        dist.destroy_process_group()


def own(items: Sequence[T]) -> Sequence[T]:
    """This worker's share of a list that all of them have."""
    return items[rank() :: size()] if size() > 1 else items


def total(x: Tensor) -> Tensor:
    """The sum of all workers' tensors of one shape, in place."""
    return _reduced(x, "SUM")


def summed(value: float) -> float:
    """The sum of all workers' numbers, in double precision; the same bits in each of them."""
    if size() == 1:
        return value
    import torch

    return float(total(torch.tensor(value, dtype=torch.float64)))


def largest(x: Tensor) -> Tensor:
    """The maxima of all workers' tensors of one shape, in place."""
    return _reduced(x, "MAX")


def merged(part: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of all workers' dictionaries."""
    return {key: value for one in _gathered(part) for key, value in one.items()}


def agreed(problem: str | None) -> None:
    """Wait for all workers, and raise `UserError` in each of them if one has a problem."""
    if found := [one for one in _gathered(problem) if one]:
        raise AgreedError(found[0])


@contextmanager
def together() -> Iterator[None]:
    """Wait for all workers at the end of the context; a `UserError` that one of them met there is raised in all."""
    if size() == 1:
        yield
        return
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    agreed(problem)


def wait() -> None:
    """Wait until all workers have come here."""
    agreed(None)


def _asked() -> int:
    """How many workers were started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _gathered(one: Any) -> list[Any]:
    if size() == 1:
        return [one]
    import torch
    import torch.distributed as dist

    packed, found = io.BytesIO(), [None] * size()
    torch.save(one, packed)
    _try(lambda: dist.all_gather_object(found, packed.getvalue()))
    place = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return [torch.load(io.BytesIO(other or b""), map_location=place, weights_only=False) for other in found]


def _reduced(x: Tensor, how: str) -> Tensor:
    if size() > 1:
        import torch.distributed as dist

        _try(lambda: dist.all_reduce(x, op=getattr(dist.ReduceOp, how)))
    return x


def _try(act: Callable[[], object], otherwise: str = _GONE) -> None:
    """Do something together; where the others are not there, a line says so."""
    try:
        act()
    except (RuntimeError, ValueError) as error:
        raise UserError(otherwise) from error
