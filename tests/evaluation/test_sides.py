"""What results say of a checkpoint: the same size as everywhere, and how it was made."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit import rtn
from tests.kit.echo import Echo, write_rows
from tests.kit.pictures import file_of, picture
from tests.kit.tiny import build
from vlmcompress.evaluation import sides
from vlmcompress.evaluation.accuracy.accuracy import EvalOptions, evaluate_all
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.evaluation.report.findings import Findings
from vlmcompress.evaluation.results import Calibration
from vlmcompress.export import manifest
from vlmcompress.export import write as checkpoint
from vlmcompress.models.data.provenance import provenance
from vlmcompress.models.data.sources import load_samples
from vlmcompress.utils.text import size, smaller


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """Source and output, the latter of several files."""
    folder = tmp_path_factory.mktemp("made")
    source = build("llava", folder / "llava")
    parts = rtn.parts(source, rtn.SCHEMES["w4-symmetric"], rtn.SCHEMES["fp8"], kv_cache=True)
    record = manifest.build(
        source,
        family="llava",
        recipe={"scheme": "gptq", "seed": 3, "options": {"bits": 4}, "vision": "fp8", "kv_cache": "fp8"},
        calibration={
            "source": "/home/me/images",
            "samples": 8,
            "images": 7,
            "tokens": {"text": 10, "vision": 90},
            "prefix": "quantized",
            "text": {"source": "words.jsonl", "samples": 2},
        },
        errors={"a": {"text": 0.1}},
        warnings=["damped"],
    )
    checkpoint.write(replace(parts, manifest=parts.manifest | record, shard_size="200KB"), folder / "out")
    return source, folder / "out"


def test_calibration_images_in_the_test_data_are_found(made, tmp_path):
    """By their pixels: the report warns, as the candidate is judged on what it was calibrated on."""
    source, out = made
    record = json.loads((out / manifest.MANIFEST).read_text())
    (tmp_path / "a.png").write_bytes(file_of(picture(8, 6, 1)))
    data = write_rows(
        tmp_path / "d.jsonl",
        {"id": "0", "image": "a.png", "question": "q", "answer": "a"},
        {"id": "1", "question": "q", "answer": "a"},
    )
    facts = provenance(load_samples(data, samples=None, seed=0), [], data)
    for folder, hashes in (("same", facts["image_hashes"]), ("other", ["0" * 16]), ("old", None)):
        shutil.copytree(out, tmp_path / folder)
        calibration = record["calibration"] | ({} if hashes is None else {"image_hashes": hashes})
        (tmp_path / folder / manifest.MANIFEST).write_text(json.dumps(record | {"calibration": calibration}))
    engine = Echo(lambda request: "a")
    candidates = [tmp_path / folder for folder in ("same", "other", "old")] + [source]
    results = list(evaluate_all(candidates, source, [data], None, EvalOptions(engine, engine)))
    assert [result.suites[0].calibrated for result in results] == [1, 0, None, None]
    warned = ["was calibrated on images of 1 of the 2 samples" in " ".join(Findings(r).headline) for r in results]
    assert warned == [True, False, False, False]


def test_one_size_everywhere(made):
    """Tensors without the headers of their files: the manifest, the doctor and results agree on both sides."""
    source, out = made
    assert len(list(out.glob("*.safetensors"))) > 1
    recorded = manifest.read_manifest(out)["size"]
    before, after = recorded["weights_before"], recorded["weights_after"]
    assert (sides.side(source, {}).weight_bytes, sides.side(out, {}).weight_bytes) == (before, after)
    details = {check.name: check.detail for check in doctor.diagnose(out)}
    assert details["size"] == f"{size(before)} -> {size(after)} ({smaller(before, after)})"
    assert f", {size(after)}, in" in details["weights"]


def test_how_it_was_made(made):
    source, out = made
    side = sides.side(out, {"name": "hf"})
    assert side.made is not None and sides.side(source, {}).made is None
    described = side.made.model_dump(exclude={"calibration", "versions"})
    assert described == {
        "source": "llava",
        "family": "llava",
        "scheme": "gptq",
        "options": {"bits": 4},
        "formats": [
            "weights FP8 per channel, activations FP8 per token, dynamic",
            "weights INT4 group 128, activations 16 bit",
        ],
        "bits": None,
        "vision": "fp8",
        "kv_cache": "fp8",
        "skip": [],
        "resize": "",
        "reducer": "",
        "seed": 3,
        "warnings": ["damped"],
    }
    assert side.made.calibration == Calibration(
        source="images", samples=8, images=7, tokens={"text": 10, "vision": 90}, prefix="quantized", text=2,
        text_source="words.jsonl",
    )  # fmt: skip
    assert side.made.versions.keys() >= {"vlmcompress", "torch"} and side.scheme == "gptq"


def test_unreadable_facts_are_left_out(tmp_path):
    """A measurement of hours is not lost for a manifest or a file of weights that is not as it should be."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / manifest.MANIFEST).write_text(json.dumps({"schema_version": 1, "recipe": ["gptq"]}))
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    side = sides.side(tmp_path, {})
    assert (side.made, side.scheme, side.weight_bytes) == (None, "", 0)
