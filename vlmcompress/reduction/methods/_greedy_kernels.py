"""Triton kernels for greedy selection on a GPU, where launching a kernel takes longer than a selection step.

In torch each kept token takes 3 to 12 kernel launches, thousands per image: on an H100 that took as long as the encoder. Here
one program selects all tokens of an image, with its state in registers, so all images take the time of one, with a few dozen
launches. `cover` is `_selecting.stepwise` and `spread` is `divprune._steps`, with the same arguments and results up to the
order of sums. Those are the references and run everywhere else; a test compares them in Triton's interpreter
(`TRITON_INTERPRET=1`), which needs no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8192
"""Most tokens of an image: one program holds a number per token in registers."""
_PERIOD = 32  # most tokens to choose before all gains are recomputed


def _warps(width: int) -> int:
    """Warps of a program with `width` numbers: 8 numbers per thread, up to the largest number of threads."""
    return max(1, min(32, width // 256))


@triton.jit(do_not_specialize=["count"])
def _spread(distance, nearest, chosen, n, count, N: tl.constexpr):
    image = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, N)
    distance += image * n * n
    token = tl.argmax(tl.load(nearest + image * n + j, mask=j < n, other=-float("inf")), 0)
    left = tl.full([N], float("inf"), tl.float32)  # distance to the nearest chosen token; -inf for chosen ones
    for step in range(count):
        tl.store(chosen + image * count + step, token)
        row = tl.load(distance + token.to(tl.int64) * n + j, mask=j < n, other=-float("inf"))
        left = tl.minimum(left, row)
        token = tl.argmax(left, 0)


def spread(distance: Tensor, count: int) -> Tensor:
    """Choose tokens that are far apart, `[b, count]`; see `divprune._steps`."""
    images, n, _ = distance.shape
    nearest = distance.masked_fill(distance == -torch.inf, torch.inf).amin(2).nan_to_num(posinf=0.0)
    chosen = torch.empty(images, count, dtype=torch.int64, device=distance.device)
    width = triton.next_power_of_2(n)
    with torch.cuda.device_of(distance):
        _spread[(images,)](distance, nearest, chosen, n, count, N=width, num_warps=_warps(width))
    return chosen


@triton.jit
def _gain(columns, level, token, m, i):
    """The gain of a column, with the same order of sums everywhere."""
    column = tl.load(columns + token.to(tl.int64) * m + i, mask=i < m, other=0.0)
    return tl.sum(tl.maximum(column - level, 0.0), 0)


@triton.jit
def _bounds(columns, best, bound, n, m, M: tl.constexpr):
    token, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, M)
    level = tl.load(best + image * m + i, mask=i < m, other=0.0)
    gain = _gain(columns + image * n * m, level, token, m, i)
    place = bound + image * n + token
    # Rounded up by more than the effect of another order of sums, so that it is an upper bound of `_cover`'s result.
    tl.store(place, tl.where(tl.load(place) == -float("inf"), -float("inf"), gain * 1.00001))


@triton.jit(do_not_specialize=["count", "start", "steps"])
def _cover(
    columns, best, bound, chosen, n, m, count, start, steps, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, M), tl.arange(0, N)
    columns += image * n * m
    level = tl.load(best + image * m + i, mask=i < m, other=0.0)
    upper = tl.load(bound + image * n + j, mask=j < n, other=-float("inf"))
    for step in range(steps):
        fresh = tl.zeros([N], tl.int32)  # 1 where the gain is current; the others are upper bounds (Minoux, 1978)
        token = tl.argmax(upper, 0)
        while tl.max(tl.where(j == token, fresh, 0), 0) == 0:
            upper = tl.where(j == token, _gain(columns, level, token, m, i), upper)
            fresh = tl.where(j == token, 1, fresh)
            token = tl.argmax(upper, 0)
        tl.store(chosen + image * count + start + step, token)
        level = tl.maximum(level, tl.load(columns + token.to(tl.int64) * m + i, mask=i < m, other=0.0))
        upper = tl.where(j == token, -float("inf"), upper)
    tl.store(best + image * m + i, level, mask=i < m)
    tl.store(bound + image * n + j, upper, mask=j < n)


def cover(columns: Tensor, best: Tensor, taken: Tensor, count: int) -> Tensor:
    """Choose columns whose maxima have a large sum, `[b, count]`; see `_selecting.stepwise`.

    After 1, 2, 4, ... up to 32 tokens (more often at first, when gains fall fast) all gains are recomputed on the whole GPU.
    In between one program uses them as upper bounds, as `_selecting.lazily` does.
    """
    images, n, m = columns.shape
    best, bound = best.clone(), torch.zeros_like(columns[..., 0]).masked_fill_(taken, -torch.inf)
    chosen = torch.empty(images, count, dtype=torch.int64, device=columns.device)
    wide, high = triton.next_power_of_2(n), triton.next_power_of_2(m)
    warps, start, steps = _warps(max(wide, high)), 0, 1
    while start < count:
        steps = min(steps, count - start)
        with torch.cuda.device_of(columns):
            _bounds[(n, images)](columns, best, bound, n, m, M=high, num_warps=warps)
            _cover[(images,)](columns, best, bound, chosen, n, m, count, start, steps, N=wide, M=high, num_warps=warps)
        start, steps = start + steps, min(2 * steps, _PERIOD)
    return chosen
