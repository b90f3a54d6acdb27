"""mlx-vlm itself, on folders of tiny models, against transformers: prompts, first tokens, greedy answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.kit.float_models import SETTINGS, answers, edit, floats, job, questions
from tests.kit.tiny import build
from vlmcompress import engines
from vlmcompress.cli import main
from vlmcompress.engines import hf, mlx, mlx_worker
from vlmcompress.engines.vllm import PYTHON_VARIABLE
from vlmcompress.utils.errors import UserError

FAST = "qwen2-5-vl"


@pytest.fixture
def without_packages(tmp_path, monkeypatch) -> None:
    """The engine's Python has the standard library alone."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))


def test_where_mlx_is_missing_a_line_says_how_to_get_it(tmp_path, without_packages, capsys):
    folder = build(FAST, tmp_path / "folder")
    advice = r"pip install '\.\[mlx\]' in the checkout of vlmcompress, or point VLMCOMPRESS_ENGINE_PYTHON to a Python "
    with pytest.raises(UserError, match=rf"^MLX can't be imported by .* \(.*'mlx_vlm'\); {advice}"):
        mlx.ENGINE.answer(folder, questions(tmp_path, [(56, 56)])[:1], media=tmp_path)
    with pytest.raises(UserError, match=f" has no mlx-vlm; {advice}"):
        mlx.serve(folder, "127.0.0.1", 8000, [], [])


def test_the_server_gets_what_it_has(tmp_path, capsys):
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
    """mlx-vlm would ignore it."""
    folder = build(FAST, tmp_path / "folder")
    with pytest.raises(
        ValueError, match=r"MLX runs no reducer of visual tokens, such as divprune:0\.5; use --engine hf"
    ):
        mlx_worker.start(job(folder, tmp_path, "divprune:0.5"))
    edit(folder, "config.json", vlmcompress={"reduce": {"method": "divprune"}})
    with pytest.raises(ValueError, match=r"such as \{'method': 'divprune'\}"):
        mlx_worker.start(job(folder, tmp_path))
    assert main(["serve", str(folder), "--engine", "mlx"]) == 2
    assert "has a reducer of visual tokens, which MLX would ignore" in capsys.readouterr().err
