"""Entropy of the input of each decoder block, by two papers' measures, by which allocation rules rank blocks.

Both measure the input of the block's first linear layers, the output of its first norm, for the same tokens in every block: at
most `TOKENS` of all that are not padding, drawn at random, so that memory does not grow with the data.

`luq` (LUQ, arXiv 2509.23729): k-means over the token vectors, K = 100 clusters, and the entropy of how many tokens fall into
which, in bits (at most log2 K = 6.64):

    H = -sum_k p_k log2 p_k

As in the authors' script the tokens are those of the norm's output, scikit-learn's KMeans gets random_state 42 and keeps the
best of 10 starts; the paper speaks of the *output* of a block, which is the same tokens one norm earlier and one block later.
It takes all tokens of 100 samples; a sample of `TOKENS` biases H downwards by about K / (2 TOKENS ln 2) = 0.01 bits. It is a
noisy measure: on the demo models, whose blocks lie within 0.06 bits, another random_state moved H by 0.01 to 0.04 when there
was one start.

`qvlm` (Q-VLM, arXiv 2410.08119, eq. 4 and 5): how uncertain a block's quantized input is once that of the block before is
known, the paper's proxy for how much two neighbours have to be searched together,

    D = -sum_uv p(u, v) log2 p(v | u)

over the 4-bit codes u, v that the same element of the same token has in both blocks, so at most 4 bits. An element belongs to
all codes softly, by exp(-(x - q_m)^2 / step) normalized over the grid points q_m. The paper leaves three things open, which are
ours: p(u, v) is the mean over elements of the product of both memberships; x is in units of the step (as printed the softness
hangs on the unit of the activations); each channel's grid spans what occurs in it. The first block has none before it and gets
the entropy of its own codes. The authors' code computes something else from normalized magnitudes, without that grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from llmcompressor.core import active_session
from llmcompressor.modifiers import Modifier
from pydantic import ConfigDict, PrivateAttr
from torch import Tensor, nn

from vlmcompress.models import Group
from vlmcompress.statistics.reservoir import Reservoir

CLUSTERS = 100
STARTS = 10  # starts of k-means, of which the closest clusters are kept
TOKENS = 8192
PAIRED = 2048  # tokens that the conditional entropy is taken over
_CODES = 16  # 4 bits, as in the paper's main setting
_ROWS = 128  # tokens whose memberships are in memory at a time


def cluster_entropy(x: Tensor, clusters: int = CLUSTERS) -> float:
    """Entropy in bits of the sizes of k-means clusters of `x [tokens, in]`; with fewer tokens there are fewer clusters."""
    from sklearn.cluster import KMeans

    means = KMeans(n_clusters=min(clusters, len(x)), n_init=STARTS, random_state=42)
    labels = means.fit_predict(x.float().numpy())
    share = torch.from_numpy(labels).long().bincount().double() / len(x)
    return _entropy(share)


def conditional_entropy(before: Tensor | None, x: Tensor, codes: int = _CODES) -> float:
    """Entropy in bits of the soft codes of `x [tokens, in]` given those of `before [tokens, in]`; see the module."""
    joint = torch.zeros(codes, codes, dtype=torch.float64)
    grids = [(rows, *_grid(rows, codes)) for rows in ([x] if before is None else [before, x])]
    for start in range(0, len(x), _ROWS):
        parts = [_memberships(rows[start : start + _ROWS], low, step, codes) for rows, low, step in grids]
        joint += (parts[0].T @ parts[-1] if before is not None else parts[0].sum(0).diag()).double()
    joint /= joint.sum()
    if before is None:
        return _entropy(joint.diagonal())
    return _entropy(joint.flatten()) - _entropy(joint.sum(1))


def _entropy(p: Tensor) -> float:
    return -torch.xlogy(p, p).sum().item() / math.log(2)


def _grid(x: Tensor, codes: int) -> tuple[Tensor, Tensor]:
    """Lowest value and step `[in]` of each channel of `x [tokens, in]`; the step is 1 where nothing varies."""
    low, high = x.amin(0), x.amax(0)
    step = (high - low) / (codes - 1)
    return low, torch.where(step > 0, step, 1.0)


def _memberships(x: Tensor, low: Tensor, step: Tensor, codes: int) -> Tensor:
    """Membership of each element of `x [tokens, in]` in each code: `[tokens * in, codes]`, rows sum to 1."""
    position = ((x - low) / step).reshape(-1, 1)
    return (position - torch.arange(codes)).square_().neg_().softmax(1)


class EntropyCollector(Modifier):
    """Modifier that measures the entropy of the input of one block after another, at its first linear layer.

    Attributes:
        blocks: the groups of each decoder block.
        store: a `statistics_folder.Collected`; blocks that it knows are not measured again.
        seed: seed of the choice of tokens.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    requires_calibration_data: bool = True

    blocks: list[list[Group]]
    store: Any
    seed: int = 0

    _kept: dict[int, Reservoir] = PrivateAttr(default_factory=dict)
    _observing: dict[int, Any] = PrivateAttr(default_factory=dict)  # hooks, which keep the tokens alive
    _before: Tensor | None = PrivateAttr(default=None)  # tokens of the block before
    _first: dict[int, Any] = PrivateAttr(default_factory=dict)

    def on_initialize(self, state, **kwargs) -> bool:
        for layer, groups in enumerate(self.blocks):
            if groups:
                self._first[layer] = state.model.get_submodule(groups[0].linears[0])
        return True

    def on_calibration_start(self, state, event, **kwargs) -> None:
        known = self.store.entropies()
        for layer, module in self._first.items():
            later = next((other for other in self._first if other > layer), None)
            if layer not in known or (later is not None and later not in known):
                self._kept[layer] = Reservoir(TOKENS, self.seed)
                self._observing[layer] = self.register_hook(module, _observer(self._kept[layer]), "forward_pre")

    def on_sequential_epoch_end(self, state, event, modules=(), **kwargs) -> None:
        for layer, module in self._first.items():
            if any(module is other for other in modules) and layer in self._kept:
                self.remove_hooks({self._observing.pop(layer)})
                self._finish(layer, self._kept.pop(layer).rows())

    def on_calibration_end(self, state, event, **kwargs) -> None:
        self.remove_hooks()

    def on_finalize(self, state, **kwargs) -> bool:
        return True

    def _finish(self, layer: int, x: Tensor) -> None:
        before = self._before
        self._before = x[:PAIRED]
        if layer not in self.store.entropies():
            bits = {"luq": cluster_entropy(x), "qvlm": conditional_entropy(before, self._before)}
            self.store.save_entropy(layer, bits)


def _observer(kept: Reservoir) -> Callable:
    def observe(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        state = active_session().state
        assert state.loss_masks is not None
        x, mask = args[0], state.loss_masks[state.current_batch_idx]
        kept.update(x[mask.to(x.device) > 0])

    return observe
