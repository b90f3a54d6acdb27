"""Features of pictures that nobody drew, so that the language model can't learn the training pictures by heart.

Of each name the pictures' mean features are taken for a sample of a normal distribution: its mean is the name's, its
covariance that of all pictures around the means of their names. The patches of a thing in a scene are moved from their
picture's mean to that of a picture drawn from the distribution of another name: what varies over a thing's patches, and
from scene to scene, stays real. The projector has learned from the same sample, and in so many dimensions its means are
far from the true ones, so pictures are drawn farther from them: `SPREAD` is where the projector names as many as of
real pictures that it was not trained on.
"""

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
        for k, features in enumerate(pool.features):
            for item, patches in pool.things(k):
                mean = features[patches].astype(np.float32).mean(0)
                sums.setdefault(item.picture, []).append(torch.from_numpy(mean))
                name_of[item.picture] = item.name
        self.picture = {picture: torch.stack(features).mean(0) for picture, features in sums.items()}
        of_name: dict[str, list[Tensor]] = {}
        for picture, mean in self.picture.items():
            of_name.setdefault(name_of[picture], []).append(mean)
        self.name = {name: torch.stack(means).mean(0) for name, means in of_name.items()}
        self.names = sorted(self.name)
        # A name's mean is itself one of few pictures, and so off by that much more.
        self.error = {name: (1 + 1 / len(means)) ** 0.5 for name, means in of_name.items()}
        rest = torch.cat([torch.stack(means) - self.name[name] for name, means in of_name.items()])
        covariance = rest.T @ rest / (len(rest) - len(of_name))
        shrunk = covariance + SHRINKAGE * covariance.diagonal().mean() * torch.eye(len(covariance))
        self.root = torch.linalg.cholesky(shrunk)

    def draw(self, random: Random, k: int) -> tuple[Scene, Tensor]:
        """The pool's scene k with unseen pictures of other names for its things, and features [patches, channels] of it."""
        scene = self.pool.scenes[k]
        names = self.new_names(random, scene)
        features, moves = torch.tensor(self.pool.features[k], dtype=torch.float32), dict[int, Tensor]()
        for item, patches in self.pool.things(k):
            if item.picture not in moves:  # a picture that is there twice stays one
                name = names[item.name]
                off = SPREAD * self.error[name] * self.root @ torch.randn(len(self.root))
                moves[item.picture] = self.name[name] + off - self.picture[item.picture]
            features[patches] += moves[item.picture]
        return replace(scene, items=[replace(item, name=names[item.name]) for item in scene.items]), features

    def new_names(self, random: Random, scene: Scene) -> dict[str, str]:
        """Another name for each in a scene, of which none are alike."""
        names: dict[str, str] = {}
        for item in scene.items:
            while item.name not in names:
                name = random.choice(self.names)
                if not any(alike(name, other) for other in names.values()):
                    names[item.name] = name
        return names
