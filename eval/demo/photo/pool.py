"""A fixed pool of scenes with the frozen tower's features of them, on disk, so that training does not run the tower."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPVisionModel

from eval.photo.pictures import Album
from eval.photo.scene import Item, Scene, sample_scene

from .tower import LAYERS, WIDTH, Weights, as_clip, clip_config

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels
CHUNK = 50  # scenes in a file


def load_tower(dino: Weights, layers: int = LAYERS, exact: bool = False) -> CLIPVisionModel:
    """The tower in float32, its weights rounded to BF16 as in the checkpoint unless `exact`."""
    tower = CLIPVisionModel(clip_config(layers)).requires_grad_(False).eval()
    weights = as_clip(dino, layers)
    tower.load_state_dict(weights if exact else {name: value.bfloat16().float() for name, value in weights.items()})
    return tower


def normalized(images: np.ndarray) -> Tensor:
    """What the processor makes of images [n, 224, 224, 3]: [n, 3, 224, 224]."""
    pixels = torch.tensor(images).permute(0, 3, 1, 2).float() / 255
    return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]


@torch.inference_mode()
def features(tower: CLIPVisionModel, images: np.ndarray) -> Tensor:
    """What LLaVA's projector gets of images [n, 224, 224, 3], without the 64 zeros: [n, 256, 384]."""
    return tower(normalized(images), output_hidden_states=True).hidden_states[-2][:, 1:, :WIDTH]


def scene_of(split: str, number: int, album: Album) -> Scene:
    """The pool's scene of that number."""
    return sample_scene(Random(f"photo/{split}/{number}"), split, album)


@dataclass
class Pool:
    """Scenes of a split: features [n, 256, 384] in half precision, and the item under each patch [n, 256], or -1."""

    scenes: list[Scene]
    features: np.ndarray
    items: np.ndarray

    def things(self, k: int) -> list[tuple[Item, list[int]]]:
        """The things of scene `k` of which something shows, and the patches that each is on."""
        items = self.items[k].reshape(-1)
        numbers = np.unique(items[items >= 0])
        return [(self.scenes[k].items[number], np.flatnonzero(items == number).tolist()) for number in numbers]


def fill(folder: Path, split: str, number: int, tower: CLIPVisionModel, album: Album) -> None:
    """Write what is missing of the pool's first `number` scenes."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, number, CHUNK):
        path = folder / f"{split}-{first:05d}.npz"
        if path.exists():
            continue
        drawn = [scene_of(split, k, album).draw(album) for k in range(first, first + CHUNK)]
        values = torch.cat([features(tower, scene.pixels[None]) for scene in drawn]).half().numpy()
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, features=values, items=np.stack([scene.item.reshape(-1) for scene in drawn]).astype(np.int8))
        part.rename(path)


def load(folder: Path, split: str, album: Album) -> Pool:
    """All that is written of a split's pool."""
    files = sorted(folder.glob(f"{split}-*.npz"))
    parts = [np.load(file) for file in files]
    firsts = [int(file.stem.rpartition("-")[2]) for file in files]
    scenes = [scene_of(split, first + k, album) for first in firsts for k in range(CHUNK)]
    return Pool(scenes, *(np.concatenate([part[key] for part in parts]) for key in ("features", "items")))
