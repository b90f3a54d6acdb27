"""Signals of made-up images, and a way to run any reducer on them as an engine would."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vlmcompress.reduction import methods
from vlmcompress.reduction.methods import REGISTRY, Merger, Reduction, Signals, learned
from vlmcompress.reduction.support import reads_pixels

LAYERS = 4
WIDTH = 12
NETWORK = learned.Network(learned.initial(torch.zeros(WIDTH), torch.ones(WIDTH), hidden=8, seed=0))
EXTRA = {
    "dymu": {"thresholds": (0.7, 0.75, 0.8, 0.85)},
    "vscan": {"window": 3},
    "learned": {"network": NETWORK},
}
"""Options without which a method does not run, or not on images this small."""
SERVED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in REGISTRY.names() if REGISTRY.get(name).SERVED and not reads_pixels(REGISTRY.get(name))),
    ("dart", {"pivots": 4}),
    ("divprune", {"merge": "nearest"}),
]
"""Methods that are served, with options of some; without those that a processor runs, before there is a device to wait for."""
KEEP, COUNT = 0.4, 19  # of 48 tokens


def signals(grid=(1, 6, 8), seed=0, heads=2) -> Signals:
    """Everything that any method needs, values that bfloat16 holds exactly; neighbours resemble each other somewhat."""
    generator = torch.Generator().manual_seed(seed)
    n = math.prod(grid)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().float()

    keys = draw(n, 8 * heads)
    keys = keys + keys.roll(1, 0)
    return Signals(
        grid=grid,
        features=draw(n, WIDTH),
        keys=keys.bfloat16().float(),
        heads=heads,
        saliency=draw(n).exp().bfloat16().float(),
        windowed=draw(n).exp().bfloat16().float(),
        query=draw(7, 12),
        pixels=draw(n // 3, 27).repeat_interleave(3, 0) if n % 3 == 0 else draw(n, 27),
        query_keys=draw(7, 8 * heads),
    )


def options(name, **chosen):
    """The reducer with options, and with what it needs in these tests; those it does not have are left out."""
    method = type(REGISTRY.get(name))
    fields = {field.name for field in dataclasses.fields(method)}
    return method(**{key: value for key, value in (EXTRA.get(name, {}) | chosen).items() if key in fields})


def run(reducer, signals) -> Reduction:
    """All of a method; of one that merges by layer, in an encoder whose layers leave features and keys as they are."""
    if not reducer.MERGES:
        return methods.reduce(reducer, signals)
    merged = Reduction.identity(signals.n)
    for layer in range(LAYERS):
        now = dataclasses.replace(rows(signals, merged), merged=merged)
        merged = merged.then(methods.merge_layer(reducer, now, layer, LAYERS))
    return merged


def served(name: str, image: Signals, **chosen: Any) -> torch.Tensor:
    """The rows that a method leaves of an image, as the engine's plugin asks for them."""
    reducer = options(name, keep=KEEP, **chosen)
    if not reducer.MERGES:
        return methods.reduce(reducer, image, check=False).apply(image.features)
    merger = Merger(reducer, [image.grid], LAYERS, device=image.device, counts=[COUNT])
    states, keys = image.features[None], image.keys[None]
    for layer in range(LAYERS):
        merger.bias(torch.float32)
        states = merger.merge(layer, states, keys, image.heads)
        keys = keys[:, : states.shape[1]]
    merger.spread(states)
    return states[0]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def digest(x: torch.Tensor) -> str:
    """Hash of a tensor's bits."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def rows(signals, merged) -> Signals:
    """The signals that the rows left by `merged` give, where every layer gives the same."""
    names = ("features", "keys", "saliency", "windowed")
    return dataclasses.replace(
        signals, merged=merged, pixels=None, **{name: merged.apply(getattr(signals, name)) for name in names}
    )


def cosine(a, b):
    """Of two rows, in Python's floats; 0 where one is 0."""
    a, b = a.double().tolist(), b.double().tolist()
    dot, size = sum(x * y for x, y in zip(a, b, strict=True)), math.hypot(*a) * math.hypot(*b)
    return dot / size if size else 0.0


def best(scores, k):
    """Indices of the k highest scores, best first, the lower index among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def features(seed: int, n: int = 45, width: int = 12) -> torch.Tensor:
    """Tokens of an image: all different, in groups, copies of each other, of whole numbers, or all alike, by the seed."""
    draw = torch.Generator().manual_seed(seed)
    tokens, kind = torch.randn(n, width, generator=draw), seed % 5
    copies = tokens[torch.randint(n // 3, (n,), generator=draw)]
    return [tokens, copies + tokens / 4, copies, copies.round(), torch.ones(n, width)][kind]
