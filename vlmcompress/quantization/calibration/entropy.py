"""Entropy of the input of each decoder block, by the measures of two papers; allocation rules rank blocks by it.

Both measure the input of the block's first linear layers (the output of its first norm) for the same tokens in every block: at
most `TOKENS`, drawn at random from all but padding, so that memory does not grow with the data.

`luq` (LUQ, arXiv 2509.23729): k-means over the token vectors with K = 100 clusters, and the entropy of the cluster sizes, in
bits (at most log2 K = 6.64):

    H = -sum_k p_k log2 p_k

As in the authors' script the tokens are those of the norm's output, scikit-learn's KMeans gets random_state 42 and keeps the
best of 10 starts; the paper speaks of the *output* of a block, which is the same tokens one norm earlier and one block later.
It uses all tokens of 100 samples; drawing `TOKENS` of them lowers H by about K / (2 TOKENS ln 2) = 0.01 bits. The measure is
noisy: on the demo models, whose blocks differ by at most 0.06 bits, another random_state changed H by 0.01 to 0.04 with one
start.

`qvlm` (Q-VLM's entropy proxy, arXiv 2410.08119): the entropy of a block's quantized input given that of the block before, the
paper's proxy for how much two adjacent blocks depend on each other,

    D = -sum_uv p(u, v) log2 p(v | u)

over the 4-bit codes u, v that the same element of the same token has in both blocks, so at most 4 bits. An element has a soft
membership in every code, exp(-(x - q_m)^2 / step) normalized over the grid points q_m. The paper leaves three choices open.
Ours: p(u, v) is the mean over elements of the product of both memberships; x is in units of the step (otherwise the softness
would depend on the unit of the activations); each channel's grid spans its values. The first block gets the entropy of its own
codes. The authors' code computes a different quantity, from normalized magnitudes without that grid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLUSTERS = 100
STARTS = 10  # starts of k-means; the best one is kept
TOKENS = 8192
PAIRED = 2048  # tokens for the conditional entropy
_CODES = 16  # 4 bits, as in the paper's main setting
_ROWS = 128  # tokens whose memberships are computed at a time


def cluster_entropy(x: Tensor, clusters: int = CLUSTERS) -> float:
    """Entropy in bits of the sizes of k-means clusters of `x [tokens, in]`; with fewer tokens there are fewer clusters."""
    from sklearn.cluster import KMeans

    means = KMeans(n_clusters=min(clusters, len(x)), n_init=STARTS, random_state=42)
    labels = means.fit_predict(x.float().numpy())
    share = torch.from_numpy(labels).long().bincount().double() / len(x)
    return _entropy(share)


def conditional_entropy(before: Tensor | None, x: Tensor, codes: int = _CODES) -> float:
    """Entropy in bits of the soft codes of `x [tokens, in]` given those of `before [tokens, in]`; see the module."""
    joint, grids = torch.zeros(codes, codes, dtype=torch.float64), []
    for rows in [x] if before is None else [before, x]:
        low, high = rows.amin(0), rows.amax(0)  # of each channel [in]
        step = (high - low) / (codes - 1)
        grids.append((rows, low, torch.where(step > 0, step, 1.0)))  # 1 where a channel is constant
    for start in range(0, len(x), _ROWS):
        parts = []
        for rows, low, step in grids:
            # Soft membership of each element in each code, exp(-(x - q_m)^2) normalized: [tokens * in, codes].
            position = ((rows[start : start + _ROWS] - low) / step).reshape(-1, 1)
            parts.append((position - torch.arange(codes)).square_().neg_().softmax(1))
        # p(u, v): the mean over elements of the product of both memberships, summed in float64.
        joint += (parts[0].T @ parts[-1] if before is not None else parts[0].sum(0).diag()).double()
    joint /= joint.sum()
    if before is None:
        return _entropy(joint.diagonal())
    return _entropy(joint.flatten()) - _entropy(joint.sum(1))  # H(v | u) = H(u, v) - H(u)


def _entropy(p: Tensor) -> float:
    return -torch.xlogy(p, p).sum().item() / math.log(2)
