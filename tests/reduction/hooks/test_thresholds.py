"""DyMU's thresholds: learned as published, kept in a file, refused for another model."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.kit.reduction_data import NONE, ONE, TWO, checkpoint, encode, picture, tiny
from tests.kit.reduction_data import vlm as loaded
from vlmcompress import cli
from vlmcompress.reduction import choice, threshold_file
from vlmcompress.reduction.hooks import attach, learning
from vlmcompress.reduction.methods import Merger, fit_counter
from vlmcompress.reduction.methods.dymu import DyMU, schedule
from vlmcompress.utils.errors import UserError


def batches(vlm, images: int) -> list[dict[str, torch.Tensor]]:
    """One prompt each, and one without an image."""
    prompts = [([picture(seed, (84, 84))], "what?") for seed in range(images)]
    return [encode(vlm, prompt) for prompt in [*prompts, NONE]]


def slow_learn(vlm, inputs, keep):
    """Layer by layer on whole batches: the best pairs of all images together, then the mean of the thresholds."""
    tower = vlm.model.model.vision_tower
    levels = []
    for pixels in inputs:
        states = tower.pre_layrnorm(tower.embeddings(pixels))
        merger = Merger(DyMU(thresholds=(1.0, 1.0)), [(1, 4, 4)] * len(pixels), 2, aside=1)
        taus = []
        for number, layer in enumerate(tower.encoder.layers[:2]):
            normed = layer.layer_norm1(states)
            keys = layer.self_attn.k_proj(normed)
            states = states + layer.self_attn(normed, merger.bias(states.dtype))[0]
            scores = []
            for image, merged in enumerate(merger.merged):
                rows = keys[image, 1 : 1 + len(merged.anchor)].view(len(merged.anchor), 4, -1).mean(1)
                rows = torch.nn.functional.normalize(rows, dim=1)
                scores += (rows[::2] @ rows[1::2].T).max(1).values.tolist()
            pairs = schedule(16, round(16 * keep), 2)[number] * len(pixels)
            taus.append(max(0.0, sorted(scores, reverse=True)[pairs]))
            merger.reducer = DyMU(thresholds=(*taus, 1.0)[:2])
            states = merger.merge(number, states, keys, 4)
            states = states + layer.mlp(layer.layer_norm2(states))
        levels.append(taus)
    return [sum(column) / len(levels) for column in zip(*levels, strict=True)]


@pytest.mark.parametrize("keep", [0.4, 0.7])
def test_learnt_as_published(keep, monkeypatch):
    monkeypatch.setattr(learning, "BATCH", 6)
    vlm = tiny("llava")
    inputs_by_batch = batches(vlm, 11)
    learned = learning.learn_thresholds(vlm, inputs_by_batch, choice.parse_reducer(f"dymu:{keep}"))
    pixels = torch.cat([inputs["pixel_values"] for inputs in inputs_by_batch[:-1]])
    slow = slow_learn(vlm, [pixels[:6], pixels[6:]], keep)
    assert learned.method == "dymu" and learned.reducer.keep == keep
    assert learned.reducer.thresholds == pytest.approx(slow, abs=1e-6)


def test_one_batch_keeps_the_share_on_average():
    vlm = tiny("llava")
    inputs_by_batch = batches(vlm, 10)
    learned = learning.learn_thresholds(vlm, inputs_by_batch, choice.parse_reducer("dymu:0.5"))
    kept = learning.count_kept(vlm, inputs_by_batch, learned)
    assert abs(sum(kept) / 10 - 8) < 0.5 and len(set(kept)) > 1  # an odd row that finds no room merges in no layer
    with attach(vlm, learned) as attached:
        for inputs, count in zip(inputs_by_batch, kept, strict=False):
            vlm.model(**inputs)
            assert [len(unit.reduction.anchor) for unit in attached.reduced_units] == [count]
    assert learning.learn_thresholds(vlm, [], learned) == learned  # nothing is left to learn


def test_tiles_count_as_pictures():
    vlm = tiny("idefics3")
    inputs_by_batch = [encode(vlm, ONE), encode(vlm, TWO)]
    learned = learning.learn_thresholds(vlm, inputs_by_batch, choice.parse_reducer("dymu:0.5"))
    tiles = [len(learning.pictures(inputs)) for inputs in inputs_by_batch]
    assert tiles[0] < tiles[1] and len(learning.count_kept(vlm, inputs_by_batch, learned)) == sum(tiles)


def test_a_file_for_one_model(tmp_path):
    vlm, file = tiny("llava"), tmp_path / "new" / "dymu.json"
    inputs_by_batch = batches(vlm, 4)
    learned = learning.learn_thresholds(vlm, inputs_by_batch, choice.parse_reducer("dymu:0.5"))
    kept = learning.count_kept(vlm, inputs_by_batch, learned)
    content = threshold_file.save_thresholds(file, vlm, learned, kept, {"source": "here"})
    assert json.loads(json.dumps(content)) == json.loads(file.read_text()) and content["kept"]["mean"] == sum(kept) / 4
    named = choice.parse_reducer(f"dymu:thresholds={file}")
    with attach(vlm, named) as attached:
        assert attached.reducer.thresholds == learned.reducer.thresholds
    read = learning.learn_thresholds(vlm, [], choice.parse_reducer(f"dymu:0.9,thresholds={file}"))
    assert read.reducer == dataclasses.replace(learned.reducer, keep=0.9)
    other = next(vlm.model.model.vision_tower.parameters())
    other += 1
    try:
        with pytest.raises(UserError, match="another model.*: sha256 of its encoder.*vlmcompress learn-reducer"):
            attach(vlm, named)
    finally:
        other -= 1
    with pytest.raises(UserError, match="pictures of one size"):
        attach(tiny("qwen2-vl"), named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda content: content["model"]["encoder"].update(image_size=336),
            "its encoder has image_size 336, that of.*56",
        ),
        (lambda content: content.update(schema_version=2), "schema 2, this vlmcompress reads 1; update"),
        (lambda content: content["reduce"].update(thresholds=None), "holds no thresholds"),
        (lambda content: content["reduce"].update(thresholds=[2.0, 0.0]), "must be cosines"),
        (lambda content: content["reduce"].update(thresholds="dymu.json"), "holds no thresholds"),
        (lambda content: content["reduce"].update(method="dart"), "no option 'thresholds'"),
        (lambda content: content.pop("model"), "'model' is missing; make them with"),
        (lambda content: content.clear(), "'schema_version' is missing; make them with"),
    ],
)
def test_bad_files_of_thresholds_are_refused(change, message, tmp_path):
    vlm, file = tiny("llava"), tmp_path / "dymu.json"
    learned = choice.parse_reducer("dymu:thresholds=[0.5, 0.6]")
    content = threshold_file.save_thresholds(file, vlm, learned, [16], {})
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as caught:
        attach(vlm, choice.parse_reducer(f"dymu:thresholds={file}"))
    assert "\n" not in str(caught.value)


def test_models_without_thresholds_are_refused(tmp_path):
    vlm = tiny("llava")
    with pytest.raises(UserError, match="have none; name some with --calib"):
        learning.learn_thresholds(vlm, [encode(vlm, NONE)], choice.parse_reducer("dymu"))
    with pytest.raises(UserError, match="keep=0.1: 16 tokens cannot be merged into 2 in 2 layers"):
        learning.learn_thresholds(vlm, batches(vlm, 1), choice.parse_reducer("dymu:0.1"))
    with pytest.raises(UserError, match="has no thresholds; learn them with `vlmcompress learn-reducer MODEL"):
        attach(vlm, "dymu")
    with pytest.raises(UserError, match="3 thresholds and 2 layers.*another model's"):
        attach(vlm, "dymu", {"thresholds": (0.1, 0.2, 0.3)})
    (tmp_path / "x.json").write_text("{")
    for name in ("x.json", "absent.json"):
        with pytest.raises(UserError, match=f"{name} is not readable"):
            attach(vlm, choice.parse_reducer(f"dymu:thresholds={tmp_path / name}"))


def test_the_thresholds_verb_writes_a_file(capfd, tmp_path):
    images, file = tmp_path / "images", tmp_path / "dymu.json"
    images.mkdir()
    for seed in range(3):
        picture(seed).save(images / f"{seed}.png")
    arguments = ["learn-reducer", str(checkpoint("llava")), "--calib", str(images), "-o", str(file)]
    assert cli.main([*arguments, "--keep", "0.5"]) == 0
    output = capfd.readouterr().out
    assert output.startswith("Thresholds of 2 layers, with which 3 pictures keep ") and f"thresholds={file}" in output
    content = json.loads(file.read_text())
    assert content["reduce"]["keep"] == 0.5 and content["calibration"]["images"] == 3
    with attach(loaded("llava"), choice.parse_reducer(f"dymu:thresholds={file}")) as attached:
        assert attached.reducer.thresholds == tuple(content["reduce"]["thresholds"])
    for flags, message in (
        (["--keep", "2"], "keep must be a number above 0"),
        (["--keep", "0.1"], "cannot be merged into 2 in 2 layers"),
        (["--steps", "9"], "--steps is for a scorer, FILE.safetensors; leave it out for thresholds"),
    ):
        assert cli.main([*arguments, *flags]) == 2
        assert message in capfd.readouterr().err
    assert cli.main([*arguments[:1], str(checkpoint("qwen2-vl")), *arguments[2:]]) == 2
    assert "pictures of one size" in capfd.readouterr().err


def test_counts_from_pixels_are_met_exactly():
    """The transformers engine with a counter: what the counter says of each image, whatever the batch."""
    vlm = tiny("llava")
    inputs_by_batch = batches(vlm, 12)
    learned = learning.learn_thresholds(vlm, inputs_by_batch, choice.parse_reducer("dymu:0.6"))
    counter = learning.counter(vlm, inputs_by_batch, learned)
    assert counter.patch == 14 and counter.buckets[0] == 4 and counter.buckets[-1] == 16
    inputs = encode(vlm, ONE, TWO, NONE)
    printed = [counter.count(pixels) for pixels in inputs["pixel_values"]]
    wide = dataclasses.replace(counter, margin=0.0, weights=tuple(40 * weight for weight in counter.weights))
    spread = [wide.count(pixels) for pixels in inputs["pixel_values"]]
    assert len(set(spread)) > 1
    for token_counter, expected in ((counter, printed), (wide, spread)):
        with attach(vlm, learned, counter=token_counter) as attached:
            vlm.model(**inputs)
        assert [len(unit.reduction.anchor) for unit in attached.reduced_units] == expected


def test_counts_of_another_model_are_refused():
    vlm = tiny("llava")
    counter = fit_counter([torch.rand(3, 56, 56)], [9], 14, 16, least=4)
    learned = choice.parse_reducer("dymu:thresholds=[0.5, 0.6]")
    for wrong in ({"buckets": (4, 17)}, {"buckets": (3, 16)}, {"patch": 16}):
        with pytest.raises(
            UserError, match="another model's; this one's encoder makes 4 to 16 tokens of patches of 14"
        ):
            attach(vlm, learned, counter=dataclasses.replace(counter, **wrong))
    with pytest.raises(UserError, match="'uniform' decides itself"):
        attach(vlm, "uniform", counter=counter)
