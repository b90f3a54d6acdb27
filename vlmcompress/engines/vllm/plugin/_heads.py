"""Attention heads: apart in a tensor, together in a row, and spread over devices."""

from __future__ import annotations

from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce


def heads_first(x: Tensor, heads: int) -> Tensor:
    """`[b, s, heads * d]` as `[b, heads, s, d]`. `vlmcompress.reduction.tap.joined` is the way back."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def all_heads(rows: Tensor, devices: int) -> Tensor:
    """`[..., all heads * d]` from the heads of this one of `devices`, `[..., heads * d]`."""
    return rows if devices == 1 else tensor_model_parallel_all_gather(rows.contiguous())


def mean_of_all(mean: Tensor, devices: int) -> Tensor:
    """The mean over all heads from that over the heads of this one of `devices`."""
    return mean if devices == 1 else tensor_model_parallel_all_reduce(mean.contiguous()) / devices
