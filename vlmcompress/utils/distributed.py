"""Several processes that do one run together, as `torchrun -m vlmcompress quantize ...` starts them.

Each worker takes a share of the calibration samples, and of a block's groups or a training step's samples; all workers get
the sums, and rank 0 writes. In a single process these functions cost nothing.
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
_GONE = "another worker of this run ended early (see its message); run again to resume"


class SharedError(UserError):
    """An error of one worker that ends all of them; rank 0 reports it."""


class NoNumber(UserError):
    """An environment variable holds no number, or none that can be, so that this worker's rank is unknown."""


def rank() -> int:
    """This worker's rank, from 0; read from the environment, so that it is valid before the process group exists."""
    if (started := _started()) <= 1:
        return 0
    if (number := _number("RANK", 0)) >= started:
        raise NoNumber(f"RANK is {number}, but WORLD_SIZE is {started}; start torchrun, or unset both")
    return number


def world_size() -> int:
    """The number of workers in the process group; 1 without one."""
    if _started() == 1:
        return 1
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this worker is the one that writes and reports."""
    return rank() == 0


def has_formed() -> bool:
    """Whether this worker has ever joined a process group; an error before that occurs in all workers."""
    return bool(_formed)


@contextmanager
def process_group(problem: str | None = None) -> Iterator[None]:
    """Join the workers into a process group within the context, each with its own accelerator if the machine has any.

    Args:
        problem: an error of this worker that ends all workers with a `SharedError`; None: no error.

    Raises:
        UserError: a machine has more workers than accelerators, or the workers cannot connect.
    """
    if _started() == 1 or world_size() > 1:
        raise_any(problem)
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.accelerator.is_available():
        place, count = _number("LOCAL_RANK", 0), torch.accelerator.device_count()
        workers = _number("LOCAL_WORLD_SIZE", place + 1)  # torchrun's number of workers on this machine
        if workers > count:  # NCCL refuses two workers on one GPU
            raise UserError(
                f"there are {workers} workers here and {count} accelerators; start torchrun --nproc-per-node {count}"
            )
        torch.accelerator.set_device_index(place)
    _try(dist.init_process_group, "the workers of this run cannot connect; start them with torchrun")
    _formed.append(True)
    try:
        raise_any(problem)
        yield
    finally:
        dist.destroy_process_group()


def shard(items: Sequence[T]) -> Sequence[T]:
    """This worker's share of a list that all workers hold: every `world_size`-th item, starting at `rank`."""
    return items[rank() :: world_size()] if world_size() > 1 else items


def all_sum(x: Tensor) -> Tensor:
    """Sum a tensor, whose shape is the same in all workers, over all workers, in place."""
    return _reduce(x, "SUM")


def all_sum_float(value: float) -> float:
    """The sum of all workers' numbers, in double precision; bit-identical in all workers."""
    if world_size() == 1:
        return value
    import torch

    return float(all_sum(torch.tensor(value, dtype=torch.float64)))


def all_max(x: Tensor) -> Tensor:
    """Take the elementwise maximum of a tensor over all workers, in place."""
    return _reduce(x, "MAX")


def merge_dicts(part: dict[Any, Any], kinds: Sequence[type] = ()) -> dict[Any, Any]:
    """The union of all workers' dictionaries. `kinds`: the classes in them that are neither tensors nor Python's own."""
    return {key: value for gathered in _gather(part, kinds) for key, value in gathered.items()}


def raise_any(problem: str | None) -> None:
    """Wait for all workers, and raise `SharedError` in each of them if one has a problem."""
    if problems := [text for text in _gather(problem) if text]:
        raise SharedError(problems[0])


@contextmanager
def shared_errors() -> Iterator[None]:
    """Wait for all workers at the end of the context; a `UserError` that one of them raised there is raised in all."""
    if world_size() == 1:
        yield
        return
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    raise_any(problem)


def _started() -> int:
    """How many workers were started."""
    return _number("WORLD_SIZE", 1)


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    if text and not re.fullmatch("[0-9]{1,9}", text):
        raise NoNumber(
            f"the environment variable {variable} is '{text}', which is not a number; start torchrun, or unset it"
        )
    return int(text or otherwise)


def _gather(data: Any, kinds: Sequence[type] = ()) -> list[Any]:
    """The data of all workers, in the order of their ranks."""
    if world_size() == 1:
        return [data]
    import torch
    import torch.distributed as dist

    place = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    file = io.BytesIO()
    torch.save(data, file)
    packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(place)
    # As tensors, since `all_gather_object` unpickles what it gets. All have to be of one size, so the shorter ones are padded.
    sizes = [torch.zeros(1, dtype=torch.int64, device=place) for _ in range(world_size())]
    _try(lambda: dist.all_gather(sizes, torch.tensor([len(packed)], device=place)))
    longest = max(int(size) for size in sizes)
    gathered = [torch.empty(longest, dtype=torch.uint8, device=place) for _ in sizes]
    _try(lambda: dist.all_gather(gathered, torch.nn.functional.pad(packed, (0, longest - len(packed)))))
    files = (io.BytesIO(part[: int(size)].cpu().numpy().tobytes()) for part, size in zip(gathered, sizes, strict=True))
    with torch.serialization.safe_globals(list(kinds)):
        return [torch.load(other, map_location=place, weights_only=True) for other in files]


def _reduce(x: Tensor, operation: str) -> Tensor:
    if world_size() > 1:
        import torch.distributed as dist

        _try(lambda: dist.all_reduce(x, op=getattr(dist.ReduceOp, operation)))
    return x


def _try(act: Callable[[], object], otherwise: str = _GONE) -> None:
    """Run a collective operation; raise `UserError` with the text `otherwise` if the other workers have ended."""
    try:
        act()
    except (RuntimeError, ValueError) as error:
        raise UserError(otherwise) from error
