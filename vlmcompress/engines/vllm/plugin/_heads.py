"""Rearrange attention heads: between a dimension of their own and rows, and between devices."""

from __future__ import annotations

from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce


def heads_first(x: Tensor, heads: int) -> Tensor:
    """Rearrange `[b, s, heads * d]` as `[b, heads, s, d]`. `vlmcompress.hf_hooks.tap.joined` is the inverse."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def all_heads(rows: Tensor, devices: int) -> Tensor:
    """Gather `[..., all heads * d]` from the heads of each of `devices`, `[..., heads * d]`."""
    return rows if devices == 1 else tensor_model_parallel_all_gather(rows.contiguous())


def mean_of_all(mean: Tensor, devices: int) -> Tensor:
    """Average over `devices` each one's mean over its own heads: the mean over all heads."""
    return mean if devices == 1 else tensor_model_parallel_all_reduce(mean.contiguous()) / devices
