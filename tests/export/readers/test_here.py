"""The table's row of transformers is true of the one that is installed: plain `from_pretrained`, without a loader of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import models
from vlmcompress.api import Recipe, quantize
from vlmcompress.export import readers
from vlmcompress.export.convert import convert
from vlmcompress.export.launch_files import launch_facts

IDS = torch.arange(5, 45)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llava", tmp_path_factory.mktemp("plain") / "source")


def loads(folder: Path) -> bool:
    """Whether transformers alone finds all tensors and no others."""
    try:
        with models.quiet_transformers():
            _, about = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except (RuntimeError, AttributeError, ImportError, ValueError):
        return False
    return not any(about[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys"))


@pytest.mark.parametrize(
    ("scheme", "form", "expected"),
    [("w4-asymmetric", "compressed-tensors", True), ("fp8", "modelopt", False), ("nvfp4", "modelopt", False)],
)
def test_plain_transformers_reads_what_the_table_says(
    scheme: str, form: str, expected: bool, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "first"
    rtn.write(source, out, rtn.SCHEMES[scheme])
    if form != "compressed-tensors":
        convert(out, tmp_path / "out", form)
        out = tmp_path / "out"
    verdict = readers.engine_support("transformers", launch_facts(models.read_config(out), {}, "out"))
    assert loads(out) is (verdict.reason is None) is expected


def test_a_quantized_embedding_needs_the_packages_loader(source: Path, tmp_path: Path) -> None:
    recipe = Recipe.of(source, tmp_path / "out", scheme="rtn", options={"group_size": 32}, embeddings="w8a16")
    quantize(recipe)
    verdict = readers.engine_support("transformers", launch_facts(models.read_config(tmp_path / "out"), {}, "out"))
    assert verdict.reason is None and verdict.loader and not loads(tmp_path / "out")
    model, _ = models.open_model(tmp_path / "out", dtype="auto")
    with torch.no_grad():
        assert model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits.isfinite().all()
