"""What visual tokens should say, and the projector's supervised training, without the language model.

The token of a patch should be the embedding of the name of the picture there (" nothing" for background), plus a
vector for its row and one for its column, which begin as mixtures of the embeddings of " top", " left" and so on, and are
learned with the language model while it reads such tokens. The projector's loss is the squared distance from that, next to
the cross entropy of choosing the name among all names by distances; of a thing not patch by patch, most of which don't
tell what they are part of, but of the mean of its patches' tokens, which a language model's attention can take.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eval.photo.scene import SIDE, Scene
from eval.photo.vocab import alike

from .pool import Pool
from .tower import WIDTH

SCENES, OF_THING, OF_GROUND = (
    32,
    16,
    4,
)  # scenes of a step, and of one of them at most so many patches of a thing, and of background
DROPPED = 0.6  # share of the whitened channels that a step does without
SHRINKAGE = 0.05  # of the covariance towards that of equal directions
WHITENED = 1000  # scenes whose patches say what varies
LINES = ("top", "centre", "bottom"), ("left", "centre", "right")  # words for rows and for columns
_AT = (torch.arange(SIDE) + 0.5) / SIDE
NEAR = torch.stack(
    [(1 - 2 * _AT).relu(), 0.5 - (_AT - 0.5).abs(), (2 * _AT - 1).relu()], 1
)  # shares of these at each line
SHARPNESS = 8.0  # of the choice among names, in the words' own variance


class Projector(nn.Module):
    """LLaVA's two layers on DINOv2's 384 channels, after a fixed linear map that a checkpoint's first layer takes in."""

    def __init__(self, hidden: int):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, hidden)
        self.mean, self.white = nn.Buffer(torch.zeros(WIDTH)), nn.Buffer(torch.eye(WIDTH))

    def forward(self, x: Tensor, dropped: float = 0.0) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(F.dropout((x - self.mean) @ self.white, dropped))))

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

    def labels(self, scene: Scene, items: np.ndarray) -> Tensor:
        """The number of the name under each patch of a scene; `items`: the number of the thing there, or -1."""
        numbers = [*(self.number[item.name] for item in scene.items), self.nothing]
        return torch.tensor(numbers)[torch.from_numpy(items.reshape(-1)).long()]  # -1, background, is the last


@dataclass
class Batch:
    """Some patches of some scenes, those of a thing in one group and each of background in its own."""

    features: Tensor  # (n, channels)
    patches: Tensor  # (n): their numbers in the image
    groups: Tensor  # (n)
    labels: Tensor  # (groups): numbers of names


class Targets:
    """The loss of visual tokens against what `words` say now."""

    @torch.no_grad()
    def __init__(self, words: Words):
        self.name, self.place = words.name(), words.place()
        self.variance = (self.name[:, None] + self.place[None, ::17]).var()

    def loss(self, tokens: Tensor, batch: Batch) -> Tensor:
        """The loss of the tokens [n, hidden] of a batch's patches."""
        rest = tokens - self.place[batch.patches]
        sums = torch.zeros(len(batch.labels), rest.shape[1]).index_add(0, batch.groups, rest)
        means = sums / torch.bincount(batch.groups)[:, None]
        distance = F.mse_loss(means, self.name[batch.labels]) / self.variance
        return distance + F.cross_entropy(self.scores(means), batch.labels)

    def scores(self, rest: Tensor) -> Tensor:
        """(n, names): minus the squared distances of tokens without their place from the names."""
        return -torch.cdist(rest, self.name).square() / self.variance / rest.shape[1] * SHARPNESS


def sample(random: Random, pool: Pool, words: Words, scenes: int = SCENES) -> Batch:
    """Draw scenes, and patches of all that is in them."""
    features, patches, groups, labels = [], [], [], []
    for k in random.sample(range(len(pool.scenes)), min(scenes, len(pool.scenes))):
        names, items = words.labels(pool.scenes[k], pool.items[k]).tolist(), pool.items[k].reshape(-1)
        ground = np.flatnonzero(items < 0).tolist()
        drawn = [random.sample(thing, min(len(thing), OF_THING)) for _, thing in pool.things(k)]
        drawn += [[patch] for patch in random.sample(ground, min(len(ground), OF_GROUND))]
        for group in drawn:
            features.append(torch.from_numpy(pool.features[k][group]).float())
            patches += group
            groups += [len(labels)] * len(group)
            labels.append(names[group[0]])
    return Batch(torch.cat(features), *map(torch.tensor, (patches, groups, labels)))


def train(projector: Projector, words: Words, pool: Pool, steps: int, random: Random) -> None:
    """Train `projector` on a pool."""
    targets = Targets(words)
    first = sample(random, pool, words, WHITENED)
    projector.whiten(first.features, first.labels[first.groups])
    optimizer = torch.optim.AdamW(projector.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        batch = sample(random, pool, words)
        targets.loss(projector(batch.features, DROPPED), batch).backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50, 0.02 + 3 * (1 - step / steps))
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def measure(projector: Projector, words: Words, pool: Pool) -> dict[str, float]:
    """Shares of a pool's background patches, and of its things, with the right name nearest; a thing is the mean of its
    patches, and has the right name also if that is nearer than three drawn others (`choice`)."""
    targets, random = Targets(words), Random(0)
    right: dict[str, list[bool]] = {"background": [], "things": [], "choice": []}
    for k in range(len(pool.scenes)):
        items = torch.from_numpy(pool.items[k].reshape(-1))
        rest = projector(torch.from_numpy(pool.features[k]).float()) - targets.place
        right["background"] += (targets.scores(rest[items < 0]).argmax(1) == words.nothing).tolist()
        for item, patches in pool.things(k):
            name = item.name
            scores = targets.scores(rest[patches].mean(0, keepdim=True))[0, : words.nothing]
            score = scores[words.number[name]]
            others = random.sample([other for other in words.names[:-1] if not alike(name, other)], 3)
            right["things"].append(bool(score == scores.max()))
            right["choice"].append(all(bool(score > scores[words.number[other]]) for other in others))
    return {name: round(sum(hits) / len(hits), 3) for name, hits in right.items()}
