"""What visual tokens should say, and the projector's supervised start, without the language model.

The token of a patch should be the embedding of the name of the picture there (" nothing" for background), plus a
vector for its row and one for its column, which begin as mixtures of the embeddings of " top", " left" and so on, and are
learned with the language model while it reads such tokens. The projector's loss is the squared distance from that, beside
the cross entropy of choosing the name among all names by distances.

A projector names most pictures right that it was trained on and a third of others, so a language model that learned from
the tokens of the former would trust tokens that are mostly wrong later. It learns from those of two further projectors:
each has been trained on every second picture and shows the others.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.photo.scene import SIDE, Item, Scene

from .pool import Pool
from .tower import WIDTH

PATCHES = 48  # of a scene in a step, half of them of things
SHRINKAGE = 0.05  # of the covariance towards that of equal directions
WHITENED = 600  # scenes whose patches say what varies
LINES = ("top", "centre", "bottom"), ("left", "centre", "right")  # words for rows and for columns
_AT = (torch.arange(SIDE) + 0.5) / SIDE
NEAR = torch.stack(
    [(1 - 2 * _AT).relu(), 0.5 - (_AT - 0.5).abs(), (2 * _AT - 1).relu()], 1
)  # shares of these at each line
SHARPNESS = 8.0  # of the choice among names, in the words' own variance


class Projector(nn.Module):
    """LLaVA's two layers on DINOv2's 384 channels, behind a fixed linear map that a checkpoint's first layer takes in."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, hidden)
        self.mean, self.white = nn.Buffer(torch.zeros(WIDTH)), nn.Buffer(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1((x - self.mean) @ self.white)))

    def whiten(self, features: Tensor, labels: Tensor) -> None:
        """Make the variance of `features` [n, 384] 1 within a label in all directions: what tells names apart is small."""
        self.mean = features.mean(0)
        centres = torch.stack([features[labels == k].mean(0) for k in range(int(labels.max()) + 1)])
        rest = features - torch.nan_to_num(centres)[labels]
        within = rest.T @ rest / len(rest)
        values, axes = torch.linalg.eigh(within + SHRINKAGE * within.trace() / WIDTH * torch.eye(WIDTH))
        white = axes * values.rsqrt() @ axes.T
        self.white = white / ((features - self.mean) @ white).std()

    def shipped(self) -> dict[str, Tensor]:
        """The tensors of the two layers with the map in the first one."""
        weight = self.linear_1.weight.detach() @ self.white.T
        bias = self.linear_1.bias.detach() - weight @ self.mean
        second = {f"linear_2.{name}": p.detach() for name, p in self.linear_2.named_parameters()}
        return {"linear_1.weight": weight, "linear_1.bias": bias} | second


class Words(nn.Module):
    """What the tokens of patches should be, from the language model's `table` of embeddings [words, hidden]."""

    def __init__(self, table: nn.Embedding, encode: Callable[[str], Sequence[int]], names: list[str]):
        super().__init__()
        self.names = [*names, "nothing"]
        self.number = {name: k for k, name in enumerate(self.names)}
        self.nothing = len(names)  # the number of background
        self.table = table
        self.ids = [list(encode(f" {name}")) for name in self.names]
        words = (torch.stack([table.weight[encode(f" {word}")[0]] for word in line]) for line in LINES)
        self.rows, self.columns = (nn.Parameter(NEAR @ of_words.detach()) for of_words in words)

    def name(self) -> Tensor:
        """[names, hidden]."""
        return torch.stack([self.table.weight[ids].mean(0) for ids in self.ids])

    def place(self) -> Tensor:
        """[patches, hidden]."""
        return (self.rows[:, None] + self.columns).flatten(0, 1)

    def ideal(self, labels: Tensor) -> Tensor:
        """The tokens of an image with such names [patches]: [patches, hidden]."""
        return self.name()[labels] + self.place()

    def labels(self, scene: Scene, items: np.ndarray, half: int | None = None) -> Tensor:
        """The number of the name under each patch of a scene; `items`: the number of the thing there, or -1.

        -1 on pictures that are not of a `half`.
        """
        numbers = [self.number[item.name] if half in (None, half_of(item)) else -1 for item in scene.items]
        numbers.append(self.nothing)
        return torch.tensor(numbers)[torch.from_numpy(items.reshape(-1)).long()]  # -1, background, is the last


class Targets:
    """The loss of visual tokens against what `words` say now."""

    @torch.no_grad()
    def __init__(self, words: Words):
        self.name, self.place = words.name(), words.place()
        self.variance = (self.name[:, None] + self.place[None, ::17]).var()

    def loss(self, tokens: Tensor, labels: Tensor, patches: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of tokens [n, hidden] of `patches` [n], and which of them have the right name nearest."""
        rest = tokens - self.place[patches]
        distance = F.mse_loss(rest, self.name[labels]) / self.variance
        scores = self.scores(rest)
        return distance + F.cross_entropy(scores, labels), scores.argmax(1) == labels

    def scores(self, rest: Tensor) -> Tensor:
        """(n, names): minus the squared distances of tokens without their place from the names."""
        return -torch.cdist(rest, self.name).square() / self.variance / rest.shape[1] * SHARPNESS


def half_of(item: Item) -> int:
    """Which half of the pictures a thing's is in."""
    return item.picture % 2


def some_patches(random: Random, labels: Tensor, number: int = PATCHES) -> list[int]:
    """Up to a number of the labelled patches of a scene, half of them of things where there are enough."""
    things = ((labels >= 0) & (labels != labels.max())).nonzero().flatten().tolist()
    chosen = random.sample(things, min(len(things), number // 2))
    others = sorted(set((labels >= 0).nonzero().flatten().tolist()) - set(chosen))
    return chosen + random.sample(others, min(len(others), number - len(chosen)))


def start(projector: Projector, words: Words, pool: Pool, steps: int, random: Random, half: int | None = None) -> None:
    """Train `projector` for a number of steps of 32 scenes, on all pictures or a half of them."""
    targets = Targets(words)
    sampled = batch(random.sample(range(len(pool.scenes)), min(WHITENED, len(pool.scenes))), words, pool, random, half)
    projector.whiten(*sampled[:2])
    optimizer = torch.optim.AdamW(projector.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        tokens, labels, patches = batch(random.sample(range(len(pool.scenes)), 32), words, pool, random, half)
        loss, _ = targets.loss(projector(tokens), labels, patches)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50, 0.02 + 3 * (1 - step / steps))
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def measure(projector: Projector, words: Words, pool: Pool) -> dict[str, float]:
    """Shares of a pool's patches of things and of background with the right name nearest, and of things as a whole.

    A thing has the name whose log-probabilities at its patches have the highest sum.
    """
    targets, things, grounds, wholes = Targets(words), [], [], []
    for k, scene in enumerate(pool.scenes):
        labels = words.labels(scene, pool.items[k])
        tokens = projector(torch.from_numpy(pool.features[k]).float())
        right = targets.loss(tokens, labels, torch.arange(len(labels)))[1]
        things.append(right[labels != words.nothing])
        grounds.append(right[labels == words.nothing])
        scores = targets.scores(tokens - targets.place).log_softmax(-1)[:, : words.nothing]
        items = torch.from_numpy(pool.items[k])
        for number, item in enumerate(scene.items):
            wholes.append(scores[items == number].sum(0).argmax().item() == words.number[item.name])
    shares = {"things": torch.cat(things).float().mean(), "background": torch.cat(grounds).float().mean()}
    return {name: round(share.item(), 3) for name, share in shares.items()} | {
        "whole": round(sum(wholes) / len(wholes), 3)
    }


def batch(
    scenes: list[int], words: Words, pool: Pool, random: Random, half: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels and numbers of some patches of each scene."""
    tokens, labels, patches = [], [], []
    for k in scenes:
        names = words.labels(pool.scenes[k], pool.items[k], half)
        chosen = some_patches(random, names)
        tokens.append(torch.from_numpy(pool.features[k][chosen]).float())
        labels.append(names[chosen])
        patches.append(torch.tensor(chosen))
    return torch.cat(tokens), torch.cat(labels), torch.cat(patches)
