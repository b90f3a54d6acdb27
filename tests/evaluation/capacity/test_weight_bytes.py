"""Bytes of weights, exactly: oracle are the files that `quantize` writes. Without weight files the config gives the same."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.kit.families import recipe_of
from vlmcompress.engines.vllm import served_model
from vlmcompress.engines.vllm.served_model import read_served_model
from vlmcompress.evaluation.capacity import weight_bytes
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.models import tensor_headers
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve, targets
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import SCHEMES

pytestmark = pytest.mark.representatives


def bytes_on_disk(folder) -> int:
    return weight_bytes.stored_bytes(
        {
            name: served_model.Spec(entry["dtype"], tuple(entry["shape"]))
            for name, entry in tensor_headers(folder).items()
        }
    )


def test_every_family_awq(family, checkpoint, quantized):
    """The fixture's AWQ checkpoint of each family, and that checkpoint planned in its turn."""
    vocabulary = {key: value for key, value in recipe_of(checkpoint(family), "awq").items() if key != "scheme"}
    source = read_served_model(checkpoint(family))
    rows = {row.name: row for row in weight_bytes.formats(source, None, vocabulary=vocabulary)}
    written = quantized(family, "awq")
    assert rows["awq"].stored == bytes_on_disk(written)
    assert rows["bf16"].stored == bytes_on_disk(checkpoint(family))
    (alone,) = weight_bytes.formats(read_served_model(written), "h100")
    assert alone.stored == rows["awq"].stored and alone.key == weight_bytes.QUANTIZED


@pytest.mark.parametrize("scheme", ["fp8", "int8", "w8a16", "rtn"])
def test_other_formats(scheme, checkpoint, samples, tmp_path):
    source = checkpoint("qwen2-5-vl")
    settings = {
        "model": str(source),
        "out": str(tmp_path / "out"),
        "scheme": scheme,
        "calibrate": {"data": str(samples), "samples": 4},
    }
    quantize(resolve(settings).recipe)
    row = next(
        row for row in weight_bytes.formats(read_served_model(source), None) if scheme in (row.name, *row.others)
    )
    assert row.stored == bytes_on_disk(tmp_path / "out")
    assert row.stored == json.loads((tmp_path / "out" / MANIFEST).read_text())["size"]["weights_after"]


def test_a_config_alone_gives_the_same_bytes(family, checkpoint, tmp_path):
    """Of the tiny checkpoints, whose tensors are those of transformers."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(checkpoint(family) / "config.json", bare)
    full, outline = (weight_bytes.formats(read_served_model(path), "h100") for path in (checkpoint(family), bare))
    assert [(row.name, row.stored) for row in full] == [(row.name, row.stored) for row in outline]


def test_every_scheme_has_a_row(checkpoint):
    rows = weight_bytes.formats(read_served_model(checkpoint("llava")), None)
    named = {name for row in rows for name in (row.name, *row.others)}
    assert named - {"bf16"} == set(SCHEMES.names()) - {"none"}
    assert len({row.label for row in rows}) == len(rows)


def test_schemes_that_a_target_lacks_are_refused_by_name(checkpoint):
    rows = {row.name: row for row in weight_bytes.formats(read_served_model(checkpoint("llava")), "a100")}
    assert rows["fp8"].problem == targets.get_target("a100").format_problem("w8a8-fp")
    assert rows["fp8"].stored is None and rows["gptq-plus"].stored and "awq" in rows["gptq-plus"].others


def test_parts_of_devices_sum_up(checkpoint):
    """Two devices hold each matrix once and everything else twice; keys and values are copied where heads run out."""
    source = read_served_model(checkpoint("qwen2-5-vl"))  # two heads of keys
    total = weight_bytes.stored_bytes(source.stored)
    assert weight_bytes.device_bytes(total, source.stored, 1, 2) == total
    others = sum(
        s.nbytes for n, s in source.stored.items() if not n.endswith("weight") or "norm" in n or n == "proj.weight"
    )
    others += sum(s.nbytes for n, s in source.stored.items() if n.endswith(("patch_embed.proj.weight", "ln_q.weight")))
    two = weight_bytes.device_bytes(total, source.stored, 2, 2)
    assert 2 * two == pytest.approx(total + others, abs=2)
    keys = sum(s.nbytes for n, s in source.stored.items() if n.endswith(("k_proj.weight", "v_proj.weight")))
    four = weight_bytes.device_bytes(total, source.stored, 4, 2)
    assert 4 * four == pytest.approx(total + 3 * others + keys, abs=4)


def test_a_quantized_config_without_weights_is_refused(quantized, tmp_path):
    shutil.copy(quantized("llava", "awq") / "config.json", tmp_path)
    with pytest.raises(UserError, match="no weight files that show its size"):
        read_served_model(tmp_path)
