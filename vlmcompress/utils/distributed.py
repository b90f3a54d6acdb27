"""Several processes that do one run together, as `torchrun -m vlmcompress quantize ...` starts them.

Each worker takes a share of the calibration samples, and of the groups of a block or the samples of a training step; sums go to
all of them, and the first one, rank 0, writes. For a process that is alone each of these functions costs nothing.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_formed: list[bool] = []  # not empty once this worker has joined a process group
_GONE = "another worker of this run ended before its work was done (see its message); run again: it goes on"


class SharedError(UserError):
    """An error of one worker that ends all of them; the first one reports it."""


class NoNumber(UserError):
    """An environment variable that numbers workers holds something else, so that it is not known which one this is."""


def rank() -> int:
    """The number of this worker, from 0; read from the environment, so that it holds before the process group exists."""
    return _number("RANK", 0) if _started() > 1 else 0


def world_size() -> int:
    """The number of workers in the process group; 1 where there is none."""
    if _started() == 1:
        return 1
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this worker is the one that writes and reports."""
    return rank() == 0


def has_formed() -> bool:
    """Whether this worker has ever been in a process group: an error before that is one of all workers."""
    return bool(_formed)


@contextmanager
def process_group(problem: str | None = None) -> Iterator[None]:
    """Within the context the workers are a process group, each with an accelerator of its own where there are some.

    Args:
        problem: an error of this worker that ends all of them, with a `SharedError`; None: none.

    Raises:
        UserError: there are more workers on a machine than accelerators, or they do not find each other.
    """
    if _started() == 1 or world_size() > 1:
        raise_any(problem)
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.accelerator.is_available():
        place, count = _number("LOCAL_RANK", 0), torch.accelerator.device_count()
        workers = _number("LOCAL_WORLD_SIZE", place + 1)  # torchrun says how many there are on this machine
        if workers > count:  # NCCL refuses two workers on one GPU
            raise UserError(
                f"there are {workers} workers here and {count} accelerators; start torchrun --nproc-per-node {count}"
            )
        torch.accelerator.set_device_index(place)
    _try(dist.init_process_group, "the workers of this run do not find each other; start them with torchrun")
    _formed.append(True)
    try:
        raise_any(problem)
        yield
    finally:
        dist.destroy_process_group()


def shard(items: Sequence[T]) -> Sequence[T]:
    """This worker's share of a list that all workers have: every `world_size`-th item, from `rank` on."""
    return items[rank() :: world_size()] if world_size() > 1 else items


def all_sum(x: Tensor) -> Tensor:
    """Sum up a tensor of one shape over all workers, in place."""
    return _reduce(x, "SUM")


def all_sum_float(value: float) -> float:
    """The sum of all workers' numbers, in double precision; the same bits in each of them."""
    if world_size() == 1:
        return value
    import torch

    return float(all_sum(torch.tensor(value, dtype=torch.float64)))


def all_max(x: Tensor) -> Tensor:
    """Take the elementwise maximum of a tensor over all workers, in place."""
    return _reduce(x, "MAX")


def merge_dicts(part: dict[Any, Any]) -> dict[Any, Any]:
    """The entries of all workers' dictionaries."""
    return {key: value for gathered in _gather(part) for key, value in gathered.items()}


def raise_any(problem: str | None) -> None:
    """Wait for all workers, and raise `SharedError` in each of them if one has a problem."""
    if problems := [text for text in _gather(problem) if text]:
        raise SharedError(problems[0])


@contextmanager
def shared_errors() -> Iterator[None]:
    """Wait for all workers at the end of the context; a `UserError` that one of them met there is raised in all."""
    if world_size() == 1:
        yield
        return
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    raise_any(problem)


def barrier() -> None:
    """Wait until all workers have come here."""
    raise_any(None)


def _started() -> int:
    """How many workers were started."""
    return _number("WORLD_SIZE", 1)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise NoNumber(
            f"the environment variable {variable} is '{text}', which is no number; start torchrun, or unset it"
        )
    return int(text or otherwise)


def _gather(data: Any) -> list[Any]:
    """The data of all workers, in the order of their ranks."""
    if world_size() == 1:
        return [data]
    import torch
    import torch.distributed as dist

    packed, gathered = io.BytesIO(), [None] * world_size()
    torch.save(data, packed)
    _try(lambda: dist.all_gather_object(gathered, packed.getvalue()))
    place = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return [torch.load(io.BytesIO(other or b""), map_location=place, weights_only=False) for other in gathered]


def _reduce(x: Tensor, operation: str) -> Tensor:
    if world_size() > 1:
        import torch.distributed as dist

        _try(lambda: dist.all_reduce(x, op=getattr(dist.ReduceOp, operation)))
    return x


def _try(act: Callable[[], object], otherwise: str = _GONE) -> None:
    """Run a collective operation; UserError with the text `otherwise` where the other workers are gone."""
    try:
        act()
    except (RuntimeError, ValueError) as error:
        raise UserError(otherwise) from error
