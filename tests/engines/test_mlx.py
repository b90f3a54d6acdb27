"""mlx-vlm itself, on folders of tiny models, against transformers: prompts, first tokens, greedy answers."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.kit import mtp_oracle
from tests.kit.float_models import SETTINGS, answers, edit, floats, job, questions
from tests.kit.published import for_mlx
from tests.kit.tiny import build
from vlmcompress import engines
from vlmcompress.cli import main
from vlmcompress.engines import EngineSettings, hf, mlx, mlx_reducers, mlx_worker
from vlmcompress.engines.local import start_process, stop_process
from vlmcompress.engines.vllm import PYTHON_VARIABLE
from vlmcompress.engines.vllm.serve import free_port, wait
from vlmcompress.export import readers
from vlmcompress.export.formats import _mlx_config
from vlmcompress.models import all_specs
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer
from vlmcompress.reduction.methods import Signals
from vlmcompress.utils.errors import UserError

FAST = "qwen2-5-vl"
EXACT = 1e-4
FAMILIES = {  # images, and how far log-probabilities are off
    "llava": ([(56, 56)], EXACT),
    "lfm2-vl": ([(64, 64)], EXACT),
    "qwen2-vl": ([(112, 84), (56, 56)], EXACT),
    "qwen3-5-moe": ([(112, 84)], EXACT),
    "gemma4": ([(56, 56)], EXACT),
    "mistral3": ([(112, 112)], EXACT),
    "idefics3": ([(112, 112), (112, 56)], 0.01),  # from here on images are scaled, by Pillow, and GELU is approximated
    "llava-onevision": ([(112, 84)], 0.01),
    "qwen3-5": ([(256, 256)], 0.01),
    "qwen3-vl": ([(256, 256), (128, 96)], 0.01),
    "gemma3": ([(56, 56)], 0.05),  # here and below mlx-vlm computes images in another way: docs/exporting.md, MLX
    "glm4v": ([(112, 84)], 0.05),
    "internvl3-5": ([(56, 56)], 0.1),
}
REDUCED = {
    "llava": ([(56, 56)], EXACT),
    "idefics3": ([(112, 112)], 0.01),
    "internvl3-5": ([(56, 56)], 0.1),
    "qwen2-vl": ([(112, 84), (168, 140)], EXACT),
    FAST: ([(112, 84), (168, 140)], EXACT),
    "qwen3-vl": ([(128, 96)], EXACT),
    "qwen3-5-moe": ([(112, 84)], 0.01),
}


@pytest.fixture
def without_packages(tmp_path, monkeypatch) -> None:
    """The engine's Python has the standard library alone."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))


def test_a_missing_mlx_is_one_line(tmp_path, without_packages, capsys):
    folder = build(FAST, tmp_path / "folder")
    advice = r"pip install '\.\[mlx\]' in the checkout of vlmcompress, or point VLMCOMPRESS_ENGINE_PYTHON to a Python "
    with pytest.raises(UserError, match=rf"^MLX can't be imported by .* \(.*'mlx_vlm'\); {advice}"):
        mlx.ENGINE.answer(folder, questions(tmp_path, [(56, 56)])[:1], media=tmp_path)
    with pytest.raises(UserError, match=f" has no mlx-vlm; {advice}"):
        mlx.serve(folder, "127.0.0.1", 8000, [], [])


def test_the_server_gets_only_flags_that_it_has(tmp_path, capsys):
    folder = build(FAST, tmp_path / "folder")
    edit(folder, "config.json", quantization={"bits": 4, "group_size": 64})  # as MLX's own folders have it
    for flags, message in (
        (["--images", "2"], "mlx-vlm's server has no --images-per-request; leave it out"),
        (["--max-model-len", "100"], "mlx-vlm's server has no --max-model-len; leave it out"),
    ):
        assert main(["serve", str(folder), *flags]) == 2
        assert message in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "none"), "--engine", "mlx"]) == 2
    assert "no checkpoint, its config.json can't be read" in capsys.readouterr().err


def test_a_reducer_is_not_lost_on_the_way(tmp_path, capsys):
    folder = build("lfm2-vl", tmp_path / "folder")
    write_reducer(folder, "divprune:0.5")
    with pytest.raises(ValueError, match=r"^in MLX fewer tokens are for .* by .*, not for Lfm2Vl by divprune$"):
        mlx_worker.start(job(folder, tmp_path))
    assert main(["serve", str(folder), "--engine", "mlx"]) == 2
    assert "not for Lfm2Vl by divprune" in capsys.readouterr().err
    folder = build(FAST, tmp_path / "other")
    write_reducer(folder, "divprune:0.5,merge=nearest")
    with pytest.raises(ValueError, match="^in MLX the reducer divprune has no option merge$"):
        mlx_worker.start(job(folder, tmp_path))


def write_reducer(folder: Path, reducer: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = reducer_block.config_with_reducer(config, parse_reducer(reducer))
    (folder / "config.json").write_text(json.dumps(config))


def test_methods_and_families_are_those_of_the_tables():
    assert sorted(mlx_reducers.METHODS) == [*readers.ENGINES["mlx"].reducers]
    names = {name.lower().replace("_", "") for name in mlx_reducers.CLASSES}
    kinds = {kind.replace("_", "") for spec in all_specs() if spec.engine.mlx.fewer_tokens for kind in spec.model_types}
    assert names == kinds


@pytest.mark.slow
def test_drafts_of_an_mtp_head_are_those_of_its_weights(tmp_path):
    """mlx-vlm drafts with the head that stands in the folder: answers stay, and as many drafts are accepted as the head
    computed with transformers has right, but for a last one. In `generate_step` the head sees no prompt."""
    source, out = mtp_oracle.few_answers("qwen3-5", tmp_path / "source"), tmp_path / "out"
    assert main(["quantize", str(source), "--scheme", "none", "--format", "mlx", "-o", str(out)]) == 0
    command = [sys.executable, "-m", "tests.kit.mlx_drafts", str(out)]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert [plain for plain, *_ in rows] == [drafted for _, drafted, *_ in rows]
    oracle = mtp_oracle.Oracle(source)
    expected = [
        oracle.counts(prompt, row[0], prefilled=False) for prompt, row in zip(mtp_oracle.PROMPTS, rows, strict=True)
    ]
    equal = sum(tuple(row[2:]) == counts for row, counts in zip(rows, expected, strict=True))
    assert equal >= 4 and sum(row[3] for row in rows) >= 20


def test_a_lost_mtp_head_is_not_announced(tmp_path):
    """config.json has one and the tensors lack it: programs that build a module for it would miss its parameters."""
    source, out = mtp_oracle.without_head(build("qwen3-5", tmp_path / "source")), tmp_path / "out"
    assert main(["quantize", str(source), "--scheme", "rtn", "--format", "mlx", "-o", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0
    assert not any(name.startswith("mtp.") for name in load_file(out / "model.safetensors"))


@pytest.mark.parametrize("method", mlx_reducers.METHODS)
def test_reducers_in_mlx_choose_the_same_tokens(method):
    """Oracle: the methods in torch."""
    noise, windows = torch.Generator().manual_seed(0), iter(("2x2", "1x2", "3x3", "2x5", "64x64"))
    for grid, keep in (((1, 1, 1), 0.5), ((1, 5, 7), 0.3), ((1, 12, 9), 0.5), ((2, 6, 4), 0.25), ((1, 4, 4), 1.0)):
        rows = torch.randn(math.prod(grid), 24, generator=noise)
        rows[-1] = rows[0]  # a duplicate
        reducer = parse_reducer(f"pool:window={next(windows)}" if method == "pool" else f"{method}:{keep}")
        expected = reducer.reducer.reduce(Signals(grid, features=rows))
        parent = mlx_reducers.METHODS[method](rows.numpy(), grid, reducer.plain())
        assert (parent == np.arange(len(rows))).nonzero()[0].tolist() == expected.anchor.tolist()
        assert np.allclose(mlx_reducers.means(rows.numpy(), parent), expected.apply(rows), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", REDUCED)
def test_fewer_tokens_answer_as_in_transformers(family, tmp_path):
    source, (sizes, most) = floats(family, tmp_path / "source"), REDUCED[family]
    requests = questions(tmp_path, sizes)
    for reducer in ("divprune:0.5", "coverage:0.25", "pool:window=1x2"):
        expected = answers(hf, source, tmp_path, requests, reducer)
        folder = shutil.copytree(source, tmp_path / reducer)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(_mlx_config.published(config)))
        write_reducer(folder, reducer)
        run = mlx.ENGINE.answer(folder, requests, media=tmp_path, settings=SETTINGS)
        check_equal(run.answers, expected, most)


def check_equal(replies: dict, expected: dict, most: float = EXACT) -> None:
    for name, answer in expected.items():
        reply = replies[name]
        assert (reply.refused, reply.prompt_tokens, reply.finish) == (None, answer["prompt_tokens"], answer["finish"])
        pairs = zip(reply.first.values(), engines.first_tokens(answer["first"]).values(), strict=True)
        assert max(abs(mine - theirs) for mine, theirs in pairs) < most
    equal = [replies[name].text == expected[name]["text"] for name in expected]
    assert sum(equal) >= len(equal) - 1  # one near tie may fall otherwise


def test_quantized_folders_answer_as_the_same_codes_in_transformers(tmp_path):
    """With zero points, which mlx-vlm reads in its own format only, and half of the visual tokens, or what requests set: a
    share, a number of tokens, none after one that set it. What is out of range is refused alone."""
    source = floats(FAST, tmp_path / "source")
    folders = [tmp_path / "mlx", tmp_path / "dense"]
    for folder, flags in zip(folders, (["--format", "mlx"], []), strict=True):
        options = ["--group-size", "32", "--set", "options.symmetric=false", "--reduce", "divprune:0.5,keep_max=0.9"]
        assert main(["quantize", str(source), "--scheme", "rtn", *options, *flags, "-o", str(folder)]) == 0
    shares = [None, 0.25, None, 0.9, 5, 1, math.nan]
    pictures = questions(tmp_path, [(112, 84), (168, 140)], count=len(shares))
    requests = [replace(request, keep=keep) for request, keep in zip(pictures, [*shares, None], strict=True)]
    run = mlx.ENGINE.answer(folders[0], requests, media=tmp_path, settings=replace(SETTINGS, refusals=2))
    assert run.engine["name"] == "mlx" and run.engine["restarts"] == 0
    refused = [run.answers[request.id].refused for request in requests[5:7]]
    assert all("'keep' must be a share above 0 and at most 0.9" in str(reason) for reason in refused)
    check_equal(run.answers, answers(hf, folders[1], tmp_path, [*requests[:5], requests[7]]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family, tmp_path):
    source, (sizes, most) = floats(family, tmp_path / "source"), FAMILIES[family]
    requests = questions(tmp_path, sizes)
    expected = answers(hf, for_mlx(family, source), tmp_path, requests)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(_mlx_config.published(config)))
    check_equal(mlx.ENGINE.answer(source, requests, media=tmp_path, settings=SETTINGS).answers, expected, most)


@pytest.mark.slow
def test_images_stay_as_small_as_the_recipe_made_them(tmp_path):
    source = floats(FAST, tmp_path / "source")
    folders = [tmp_path / "mlx", tmp_path / "dense"]
    for folder, flags in zip(folders, (["--format", "mlx"], []), strict=True):
        reduce = ["--scheme", "none", "--reduce", "resize:tokens=6"]
        assert main(["quantize", str(source), *reduce, *flags, "-o", str(folder)]) == 0
    requests = questions(tmp_path, [(168, 140)])
    replies = mlx.ENGINE.answer(folders[0], requests, media=tmp_path, settings=SETTINGS).answers
    check_equal(replies, answers(hf, folders[1], tmp_path, requests), most=0.1)  # images are scaled by other code


def test_zero_points_are_refused_before_anything_starts(tmp_path, capsys):
    source = build(FAST, tmp_path / "source")
    out = str(tmp_path / "out")
    assert main(["quantize", str(source), "--scheme", "rtn", "--set", "options.symmetric=false", "-o", out]) == 0
    for command in (["eval", out, "--baseline", str(source)], ["serve", out], ["doctor", out]):
        assert main([*command, "--engine", "mlx"]) == 2
        assert "mlx-vlm does not load" in (line := capsys.readouterr().err) and "take --format mlx" in line


@pytest.mark.slow
def test_compressed_tensors_load_as_they_are(tmp_path):
    source, requests = build(FAST, tmp_path / "source"), questions(tmp_path, [(112, 84)])
    edit(source, "config.json", **_mlx_config.published(json.loads((source / "config.json").read_text())))
    for scheme in ("rtn", "fp8", "nvfp4"):
        folder, data = tmp_path / scheme, ["--calib", str(tmp_path)] * (scheme == "nvfp4")
        assert main(["quantize", str(source), "--scheme", scheme, *data, "-o", str(folder)]) == 0
        assert len(mlx.ENGINE.answer(folder, requests, media=tmp_path).answers) == len(requests)


@pytest.mark.slow
def test_the_server_answers_as_the_engine(tmp_path):
    """With half of the visual tokens, whose positions are known for one prompt at a time."""
    source, folder = floats("idefics3", tmp_path / "source"), tmp_path / "out"
    flags = ["--scheme", "rtn", "--reduce", "divprune:0.5", "--format", "mlx"]
    assert main(["quantize", str(source), *flags, "-o", str(folder)]) == 0
    # the server imports mlx-audio, which this environment leaves out, and no image needs
    audio = tmp_path / "packages" / "mlx_audio"
    audio.mkdir(parents=True)
    (audio / "__init__.py").touch()
    (audio / "audio_io.py").write_text("read = write = None")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(audio.parent), *sys.path])}
    requests, port, settings = questions(tmp_path, [(112, 112)]), free_port(), EngineSettings(max_tokens=8)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    command = [sys.executable, "-m", "vlmcompress", "serve", str(folder), "--port", str(port)]
    server = start_process(command, environment, log, piped=False)
    try:
        wait(server, folder, url, 300, log, "mlx-vlm's server")
        served = engines.get_engine(f"openai:{url}").answer("out", requests, media=tmp_path, settings=settings)
    finally:
        stop_process(server)
    direct = mlx.ENGINE.answer(folder, requests, media=tmp_path, settings=settings)
    for name, answer in served.answers.items():  # the server decodes special tokens, too
        assert re.sub("<[a-z0-9_]+>", "", answer.text) == direct.answers[name].text
