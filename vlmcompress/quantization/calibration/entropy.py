"""Entropy of the input of each decoder block, as in LUQ (arXiv 2509.23729), whose allocation rule ranks blocks by it.

It is that of the input of the block's first linear layers (the output of its first norm), for the same tokens in every block:
at most `TOKENS`, drawn at random from all but padding, so that memory does not grow with the data. The token vectors are
clustered by k-means with K = 100, and the entropy is that of the cluster sizes, in bits (at most log2 K = 6.64):

    H = -sum_k p_k log2 p_k

As in the authors' script the tokens are those of the norm's output, scikit-learn's KMeans gets random_state 42 and keeps the
best of 10 starts; the paper speaks of the *output* of a block, which is the same tokens one norm earlier and one block later.
It uses all tokens of 100 samples; drawing `TOKENS` of them lowers H by about K / (2 TOKENS ln 2) = 0.01 bits. The measure is
noisy: on the demo models, whose blocks differ by at most 0.06 bits, another random_state changed H by 0.01 to 0.04 with one
start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLUSTERS = 100
STARTS = 10  # starts of k-means; the best one is kept
TOKENS = 8192


def cluster_entropy(x: Tensor, clusters: int = CLUSTERS) -> float:
    """Entropy in bits of the sizes of k-means clusters of `x [tokens, in]`; with fewer tokens there are fewer clusters."""
    from sklearn.cluster import KMeans

    means = KMeans(n_clusters=min(clusters, len(x)), n_init=STARTS, random_state=42)
    labels = means.fit_predict(x.float().numpy())
    share = torch.from_numpy(labels).long().bincount().double() / len(x)
    return -torch.xlogy(share, share).sum().item() / math.log(2)
