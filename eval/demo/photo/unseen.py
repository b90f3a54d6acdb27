"""Features of pictures that nobody drew, so that the language model can't learn the training pictures by heart.

Of each name the pictures' mean features are taken for a sample of a normal distribution: its mean is the name's, its
covariance that of all pictures around the means of their names. The patches of a thing in a scene are moved from their
picture's mean to that of a picture drawn from the distribution of another name: what varies over a thing's patches, and
from scene to scene, stays real. The projector has learned from the same sample, and in so many dimensions its means are
far from the true ones, so pictures are drawn farther from them: `SPREAD` is where the projector names as many as of
real pictures that it was not trained on.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from eval.photo.scene import Scene
from eval.photo.vocab import alike

from .pool import Pool

SPREAD = 2.4  # deviations from a name's mean, in those of the sample
SHRINKAGE = 1e-3  # of the covariance towards that of equal directions, so that it has a root


class Unseen:
    """The distribution of pictures that the pool's scenes show, and scenes with things drawn from it."""

    def __init__(self, pool: Pool):
        self.pool = pool
        sums: dict[int, list[Tensor]] = {}
        name_of: dict[int, str] = {}
        for scene, number, feature in _things(pool):
            item = scene.items[number]
            sums.setdefault(item.picture, []).append(feature)
            name_of[item.picture] = item.name
        self.picture = {picture: torch.stack(features).mean(0) for picture, features in sums.items()}
        of_name: dict[str, list[Tensor]] = {}
        for picture, mean in self.picture.items():
            of_name.setdefault(name_of[picture], []).append(mean)
        self.name = {name: torch.stack(means).mean(0) for name, means in of_name.items()}
        # A name's mean is itself one of few pictures, and so off by that much more.
        self.error = {name: (1 + 1 / len(means)) ** 0.5 for name, means in of_name.items()}
        rest = torch.cat([torch.stack(means) - self.name[name] for name, means in of_name.items()])
        covariance = rest.T @ rest / (len(rest) - len(of_name))
        shrunk = covariance + SHRINKAGE * covariance.diagonal().mean() * torch.eye(len(covariance))
        self.root = torch.linalg.cholesky(shrunk)

    def draw(self, random: Random, k: int) -> tuple[Scene, Tensor]:
        """The pool's scene k with unseen pictures of other names for its things, and features [patches, channels] of it."""
        scene, items = self.renamed(random, self.pool.scenes[k]), torch.from_numpy(self.pool.items[k].reshape(-1))
        features, moves = torch.tensor(self.pool.features[k], dtype=torch.float32), dict[int, Tensor]()
        for number in items[items >= 0].unique().tolist():
            item = scene.items[number]
            if item.picture not in moves:  # a picture that is there twice stays one
                off = SPREAD * self.error[item.name] * self.root @ torch.randn(len(self.root))
                moves[item.picture] = self.name[item.name] + off - self.picture[item.picture]
            features[items == number] += moves[item.picture]
        return scene, features

    def renamed(self, random: Random, scene: Scene) -> Scene:
        """The scene with other names for its things, of which none are alike."""
        names: dict[str, str] = {}
        for item in scene.items:
            while item.name not in names:
                name = random.choice(sorted(self.name))
                if not any(alike(name, other) for other in names.values()):
                    names[item.name] = name
        return replace(scene, items=[replace(item, name=names[item.name]) for item in scene.items])


def _things(pool: Pool) -> Iterator[tuple[Scene, int, Tensor]]:
    """Scenes of a pool, numbers of things in them, and the mean features [channels] of these."""
    for scene, features, items in zip(pool.scenes, pool.features, pool.items, strict=True):
        for number in np.unique(items[items >= 0]):
            yield scene, int(number), torch.from_numpy(features[items == number].astype(np.float32).mean(0))
