"""Sources whose tensors are stored in other types than config.json declares: what is written of them has one type and runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from tests.kit import tiny
from tests.kit.inputs import encode
from vlmcompress import models
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export.convert import convert
from vlmcompress.models import FloatType
from vlmcompress.quantization.run import quantize
from vlmcompress.recipe import resolve
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import Spec

WEIGHTS = "model.safetensors"
Cast = Callable[[torch.Tensor], torch.Tensor]
FORMS: dict[str, tuple[Cast, str | None]] = {
    "float32 labelled bfloat16": (lambda t: t.float(), None),
    "bfloat16 labelled float16": (lambda t: t, "float16"),
    "norms and biases in float32": (lambda t: t.float() if t.ndim == 1 else t, None),
    "bfloat16 labelled float32": (lambda t: t, "float32"),
}
"""How tensors are stored, and what config.json declares instead of bfloat16."""
WRITTEN = {"bfloat16 labelled float16": torch.float16}


def stored_as(model: Path, folder: Path, cast: Cast, label: str | None = None) -> Path:
    """A copy of a model whose tensors are cast, and whose config.json has another type."""
    shutil.copytree(model, folder)
    save_file({name: cast(t) for name, t in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS, {"format": "pt"})
    if label:
        config = models.read_config(folder)
        (folder / "config.json").write_text(json.dumps(FloatType(label).config(config)))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def get(family: str) -> Path:
        return folder / family if (folder / family).exists() else tiny.build(family, folder / family)

    return get


def written(source: Path, out: Path, **keys) -> dict:
    return quantize(resolve({"model": str(source), "out": str(out), "scheme": "rtn"} | keys).recipe).manifest


def logits(out: Path) -> torch.Tensor:
    """Of an image and a question, in plain transformers with the type of config.json."""
    plain = AutoModelForImageTextToText.from_pretrained(out, dtype="auto").eval()
    vlm = models.VLM(plain, models.load_processor(out), models.spec_for(models.read_config(out)), out)
    batch = {
        key: value.to(plain.dtype) if value.is_floating_point() else value for key, value in encode(vlm, 1).items()
    }
    with torch.no_grad():
        return plain(**batch).logits.float()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["llava", "qwen2-5-vl"])
def test_one_type_is_written_and_runs(model, tmp_path, kind, form):
    """Oracle: the checkpoint of the model as it is published. Its logits are near, its tensors are all of one type."""
    source = stored_as(model(kind), tmp_path / "source", *FORMS[form])
    dtype = WRITTEN.get(form, torch.bfloat16)
    manifest, plain = written(source, tmp_path / "out"), written(model(kind), tmp_path / "plain")
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {dtype}
    assert models.read_config(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")
    if dtype == torch.bfloat16:  # casting to float32 and back changes no number
        expected = load_file(tmp_path / "plain" / WEIGHTS)
        assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)
    after, before = logits(tmp_path / "out"), logits(tmp_path / "plain")
    assert torch.nn.functional.cosine_similarity(after, before, dim=-1).min() > 0.99
    line = f"written in {str(dtype).removeprefix('torch.')}, the model's type (--dtype: another)"
    assert (line in "".join(manifest["warnings"])) == (form != "bfloat16 labelled float32") and not plain["warnings"]
    assert all(finding.ok for finding in doctor.diagnose(tmp_path / "out", source))


def test_a_type_can_be_chosen(model, tmp_path):
    """A float32 model stays so, with a note that it can be halved. `dtype` does that; the sizes that were planned are exact."""
    source = stored_as(model("llava"), tmp_path / "source", lambda t: t.float(), "float32")
    wide, half = written(source, tmp_path / "wide"), written(source, tmp_path / "half", dtype="bfloat16")
    assert "--dtype bfloat16 halves that" in "".join(wide["warnings"]) and not half["warnings"]
    for out, dtype in (("wide", torch.float32), ("half", torch.bfloat16)):
        floats = {t.dtype for t in load_file(tmp_path / out / WEIGHTS).values() if t.is_floating_point()}
        assert floats == {dtype} and logits(tmp_path / out).isfinite().all()
    assert half["size"]["weights_after"] < 0.6 * wide["size"]["weights_after"]
    from vlmcompress.quantization.plan import make_plan

    plan = make_plan(resolve({"model": str(source), "scheme": "rtn", "dtype": "bfloat16"}).recipe)
    assert plan.bytes_after == half["size"]["weights_after"]


@pytest.mark.parametrize(
    ("kind", "part"), [("qwen3-5", "linear_attn.A_log"), ("glm4v-moe", "mlp.gate.e_score_correction_bias")]
)
def test_deliberate_float32_stays_float32(model, tmp_path, kind, part):
    """As transformers keeps it, or the family's blocks compute with it; a matrix next to it is cast."""
    source = stored_as(model(kind), tmp_path / "source", lambda t: t.float())
    written(source, tmp_path / "out")
    before, after = load_file(source / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    kept = [name for name in after if name.endswith(part)]
    assert kept and all(torch.equal(after[name], before[name]) for name in kept)
    patterns = models.Source.of(source).float_type.float32
    rest = {t.dtype for name, t in after.items() if t.is_floating_point() and not any(p in name for p in patterns)}
    assert rest == {torch.bfloat16}
    assert next(finding for finding in doctor.diagnose(tmp_path / "out") if finding.name == "types").ok


def test_numbers_beyond_a_type_are_refused(model, tmp_path):
    large = stored_as(model("llava"), tmp_path / "large", lambda t: t.float() * (1e6 if t.ndim > 1 else 1))
    with pytest.raises(UserError, match="has numbers too large for float16; use --dtype bfloat16 or float32"):
        written(large, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_the_doctor_finds_a_mix_in_the_checkpoint_of_another_tool(model, tmp_path):
    """A norm in float32 after layers in bfloat16 ends in an error in transformers; `export` writes all in one type."""
    written(model("llava"), tmp_path / "out")
    (tmp_path / "out" / "vlmcompress.json").unlink()
    mixed = stored_as(tmp_path / "out", tmp_path / "mixed", lambda t: t.float() if t.ndim == 1 and len(t) > 3 else t)
    with pytest.raises(RuntimeError, match="dtype"):
        logits(mixed)
    finding = next(finding for finding in doctor.diagnose(mixed) if finding.name == "types")
    assert not finding.ok and "42 tensors are not in bfloat16, the model's type" in finding.detail
    convert(mixed, tmp_path / "mended", "compressed-tensors")
    assert torch.equal(logits(tmp_path / "mended"), logits(tmp_path / "out"))


@pytest.mark.parametrize(
    ("config", "stored", "name"),
    [
        ({"torch_dtype": "float16"}, {"BF16": 9}, "float16"),
        ({"text_config": {"dtype": "float16"}}, {"BF16": 9}, "float16"),
        ({"dtype": None}, {"BF16": 3, "F32": 2}, "float32"),
        ({"dtype": "auto"}, {"BF16": 9, "F32": 2}, "bfloat16"),
        ({"dtype": "float32"}, {"F16": 9}, "float16"),
        ({"dtype": "float32"}, {"F16": 9, "F32": 1}, "float32"),
        ({}, {"I8": 9}, "bfloat16"),
    ],
)
def test_the_stored_type_is_found(config, stored, name):
    specs = [Spec(dtype, (4, rows)) for dtype, rows in stored.items()]
    kind = FloatType.of(config, specs)
    assert kind.name == name and FloatType.of(config, specs, "bfloat16").name == "bfloat16"
    output = kind.config(config)
    assert FloatType.of(output, []).name == name and output.keys() - config.keys() <= {"dtype"}
