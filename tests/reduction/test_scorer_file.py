"""The file of a scorer: read back as it was written, and every kind of bad file refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.methods import learned
from vlmcompress.utils.errors import UserError

FACTS = {"model_type": "llava", "source": "mine", "width": 8, "hidden": 4, "keep": 0.25}
WEIGHTS = learned.initial(torch.randn(8), torch.rand(8) + 0.1, 4, seed=0)


def config(model_type="llava", width=8):
    return SimpleNamespace(model_type=model_type, get_text_config=lambda: SimpleNamespace(hidden_size=width))


@pytest.fixture
def path(tmp_path):
    scorer_file.save_scorer(tmp_path / "s.safetensors", WEIGHTS, FACTS)
    return tmp_path / "s.safetensors"


def test_a_written_scorer_is_read_back(path):
    scorer = scorer_file.read(path)
    assert scorer.facts == FACTS and scorer.weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(scorer.weights[name], value) for name, value in WEIGHTS.items())
    again = scorer_file.save_scorer(path.with_name("again.safetensors"), WEIGHTS, FACTS)
    assert again.sha256 == scorer.sha256, "equal content gives equal bytes"


def test_files_with_the_earlier_name_of_a_tensor_are_read(path):
    named = {name.replace("output", "worth"): value for name, value in WEIGHTS.items()}
    earlier = scorer_file.save_scorer(path.with_name("earlier.safetensors"), named, FACTS)
    assert torch.equal(earlier.weights["output"], WEIGHTS["output"]) and earlier.weights.keys() == WEIGHTS.keys()


def test_a_reducer_gets_its_network(path):
    chosen = scorer_file.load_scorer(config(), parse_reducer(f"learned:0.5,scorer={path}"))
    assert torch.equal(chosen.reducer.network.on(torch.device("cpu"))["token"], WEIGHTS["token"])
    assert len(chosen.reducer.sha256) == 64 and chosen == scorer_file.with_scorer_hash(
        parse_reducer(f"learned:0.5,scorer={path}")
    )
    assert str(chosen) == f"learned:0.5,scorer={path}" and "network" not in chosen.plain()
    for other in (parse_reducer("coverage:0.5"), parse_reducer("dymu")):
        assert scorer_file.load_scorer(config(), other) is other


def test_a_checkpoint_has_the_file_at_its_place(path, tmp_path):
    chosen = scorer_file.carried(scorer_file.with_scorer_hash(parse_reducer(f"learned:0.5,scorer={path}")))
    assert chosen.plain()["scorer"] == scorer_file.CARRIED
    folder = tmp_path / "out"
    (folder / "reducer").mkdir(parents=True)
    (folder / scorer_file.CARRIED).write_bytes(path.read_bytes())
    assert scorer_file.load_scorer(config(), chosen, folder).reducer.network is not None
    scorer_file.save_scorer(folder / scorer_file.CARRIED, WEIGHTS | {"bias": torch.ones(4)}, FACTS)
    with pytest.raises(UserError, match="it was changed"):
        scorer_file.load_scorer(config(), chosen, folder)
    elsewhere = parse_reducer(f"learned:0.5,scorer=../../s.safetensors,sha256={chosen.reducer.sha256}")
    with pytest.raises(UserError, match=r"should be 'reducer/scorer\.safetensors'"):
        scorer_file.load_scorer(config(), elsewhere, folder)


def test_a_file_that_changes_during_a_run_is_not_carried(path):
    chosen = scorer_file.with_scorer_hash(parse_reducer(f"learned:0.5,scorer={path}"))
    assert scorer_file.content(chosen) == path.read_bytes()
    scorer_file.save_scorer(path, WEIGHTS | {"bias": torch.ones(4)}, FACTS)
    with pytest.raises(UserError, match="changed during the run"):
        scorer_file.content(chosen)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"model_type": "qwen2_5_vl"}, "of another model, 'mine': its model_type is llava, here it is qwen2_5_vl"),
        ({"width": 16}, "of another model, 'mine': its width is 8, here it is 16"),
    ],
)
def test_the_scorer_of_another_model_is_refused(path, other, text):
    with pytest.raises(UserError, match=text) as caught:
        scorer_file.load_scorer(config(**other), parse_reducer(f"learned:0.5,scorer={path}"))
    assert "\n" not in str(caught.value) and "learn-reducer" in str(caught.value)


def written(weights=WEIGHTS, text=None, **facts):
    content = json.dumps({"schema_version": 1, **FACTS, **facts}) if text is None else text
    return safetensors.torch.save(
        {name: value.contiguous() for name, value in weights.items()}, {scorer_file.FACTS: content}
    )


BAD = {
    "nothing there": (None, "cannot read scorer .*FileNotFoundError"),
    "cut off": (written()[:-40], "no safetensors file, or cut off"),
    "no safetensors": (b"\x80\x04pickle", "no safetensors file"),
    "a huge header": (b"\xff" * 8 + b"{}", "no safetensors file"),
    "weights of a model": (safetensors.torch.save({"a": torch.ones(2)}), "holds no scorer"),
    "of a later version": (written(schema_version=2), "of schema 2, this vlmcompress reads 1; upgrade"),
    "no facts": (written(text='{"schema_version": 1}'), "does not say what it is of"),
    "facts nested without end": (written(text="[" * 100_000), "does not say what it is of"),
    "facts that are given twice": (written(text='{"schema_version": 1, "width": 8, "width": 9}'), "does not say"),
    "facts that are no JSON": (written(text="{"), "does not say what it is of"),
    "a width that is a text": (written(width="8"), "does not say what it is of"),
    "too wide": (written(hidden=10**9), "does not say what it is of"),
    "NaN": (written(WEIGHTS | {"key": torch.full((4, 4), torch.nan)}), "tensor 'key' holds NaN or Inf"),
    "of another shape": (
        written(WEIGHTS | {"output": torch.ones(5)}),
        r"'output' is torch.float32 \[5\], should be float32 \[4\]",
    ),
    "of another type": (written(WEIGHTS | {"output": torch.ones(4).double()}), "'output' is torch.float64"),
    "one missing": (written({k: v for k, v in WEIGHTS.items() if k != "bias"}), "'bias' is missing"),
    "one too many": (written(WEIGHTS | {"more": torch.ones(1)}), "'more' is unknown"),
    "a name that draws on the terminal": (
        written(WEIGHTS | {"a\x1b[2J\nb": torch.ones(1)}),
        r"tensor 'a\?\[2J\?b' is unknown",
    ),
    "no spread": (written(WEIGHTS | {"spread": torch.zeros(8)}), "'spread' holds numbers that are not above 0"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_in_one_line(kind, tmp_path):
    content, text = BAD[kind]
    path = tmp_path / "s.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=text) as caught:
        scorer_file.read(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "s.safetensors"
    with path.open("wb") as file:
        file.truncate(scorer_file.LARGEST + 1)
    with pytest.raises(UserError, match="more than the 67,108,864 that are read"):
        scorer_file.read(path)


def test_special_files_are_refused_at_once(tmp_path):
    """A folder, a pipe that nobody writes to, a device without an end, a name that no file can have."""
    os.mkfifo(tmp_path / "pipe")
    for path, text in (
        (tmp_path, "IsADirectoryError"),
        (tmp_path / "pipe", "a device or a pipe"),
        (Path("/dev/zero"), "a device or a pipe"),
        (tmp_path / "a\0b", "NUL character"),
    ):
        with pytest.raises(UserError, match=f"cannot read scorer .*{text}") as caught:
            scorer_file.read(path)
        assert "\n" not in str(caught.value)


def test_text_from_a_file_is_quoted_short_and_printable(path):
    facts = FACTS | {"model_type": "x" * 10_000, "source": "\x1b[31m mine\n" * 100}
    scorer_file.save_scorer(path, WEIGHTS, facts)
    with pytest.raises(UserError, match="of another model") as caught:
        scorer_file.load_scorer(config(), parse_reducer(f"learned:0.5,scorer={path}"))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600 + len(str(path))


def test_a_missing_scorer_is_refused_before_anything_is_loaded():
    with pytest.raises(UserError, match="'learned' has no scorer; train one with"):
        scorer_file.load_scorer(config(), parse_reducer("learned:0.5"))
