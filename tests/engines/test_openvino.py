"""OpenVINO itself, on graphs of tiny float32 models, against transformers: prompts, first tokens, greedy answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import openvino as ov
import pytest
import torch
from openvino import opset13
from safetensors.torch import load_file, save_file

from tests.kit.float_models import SETTINGS, answers, edit, floats, job, questions
from tests.kit.published import for_openvino
from tests.kit.tiny import build
from vlmcompress import engines
from vlmcompress.cli import main
from vlmcompress.engines import hf, openvino
from vlmcompress.export.formats import openvino as exporter
from vlmcompress.export.openvino import REGISTRY
from vlmcompress.numerics import Format, round_to_nearest

SIZES = {  # of images that no processor has to make smaller, where the pipeline and torchvision round otherwise
    "gemma3": [(56, 56)],
    "gemma4": [(56, 56)],
    "internvl": [(56, 56)],
    "llava": [(56, 56)],
    "llava-next": [(112, 112), (112, 56)],
    "qwen2-vl": [(112, 84), (56, 56)],
    "qwen2-5-vl": [(112, 84), (168, 140)],
    "qwen3-vl": [(128, 96), (64, 128)],
}
FAST = "qwen2-5-vl"
QUICK = (FAST, "llava")
LINEARS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
LAYERS = {  # of the decoder of FAST, memory name -> name on disk
    f"model.language_model.layers.{layer}.{name}.weight": f"model.layers.{layer}.{name}.weight"
    for layer in range(2)
    for name in LINEARS
}


@pytest.fixture(autouse=True)
def images_as_pillow_scales_them(monkeypatch):
    monkeypatch.setenv("VISION_PREPROCESS", openvino.ENVIRONMENT["VISION_PREPROCESS"])


def source_of(family: str, folder: Path) -> Path:
    return for_openvino(family, floats(family, folder))


def write(source: Path, out: Path, *flags: str) -> Path:
    assert (
        main(["quantize", str(source), *(flags or ("--scheme", "none")), "--format", "openvino", "-o", str(out)]) == 0
    )
    return out


def check_equal(replies: dict, expected: dict, most: float = 1e-4) -> None:
    for name, answer in expected.items():
        reply = replies[name]
        assert not isinstance(reply, Exception), reply
        assert (reply["prompt_tokens"], reply["finish"]) == (answer["prompt_tokens"], answer["finish"])
        pairs = zip(reply["first"], answer["first"], strict=True)  # most likely first; texts of bytes are alike
        assert max(abs(mine[1] - theirs[1]) for mine, theirs in pairs) < most
    equal = [_without_pieces(replies[name]["text"]) == _without_pieces(expected[name]["text"]) for name in expected]
    assert sum(equal) >= len(equal) - 1  # one near tie may fall otherwise


def _without_pieces(text: str) -> str:
    """A text without characters of which there are only parts: each detokenizer shows those in its own number."""
    return text.replace("\ufffd", "")


def test_each_family_has_its_sizes():
    assert sorted(SIZES) == sorted(REGISTRY.names())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(SIZES)]
)
def test_answers_are_those_of_transformers(family, tmp_path):
    source = source_of(family, tmp_path / "source")
    out, requests = write(source, tmp_path / "out"), questions(tmp_path, SIZES[family])
    most = 0.01 if family == "llava-next" else 1e-4  # the image as a whole is made smaller
    check_equal(answers(openvino, out, tmp_path, requests), answers(hf, source, tmp_path, requests), most)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sees"), [("gemma3", None), ("gemma4", None), ("gemma4", "vision")])
def test_blocks_of_sliding_attention_forget(family, sees, tmp_path):
    """Prompts are longer than the window of 64 tokens, which the pipeline reads from the nodes of a mask. `sees`: whether
    tokens of an image see each other in those blocks of Gemma 4, as in its large models."""
    source = source_of(family, tmp_path / "source")
    if sees:
        edit(source, "config.json", text_config={"use_bidirectional_attention": sees})
    out, requests = (
        write(source, tmp_path / "out"),
        questions(tmp_path, SIZES[family], prelude="It is a long story. " * 6),
    )
    replies, expected = answers(openvino, out, tmp_path, requests), answers(hf, source, tmp_path, requests)
    check_equal(replies, expected)
    assert min(reply["prompt_tokens"] for reply in replies.values()) > 2 * 64


@pytest.mark.parametrize(
    ("scheme", "fmt", "kind"),
    [
        pytest.param("rtn", Format("int", 4, 32), "i4", marks=pytest.mark.slow),
        ("rtn", Format("int", 4, 64, symmetric=False), "u4"),
        pytest.param("w8a16", Format("int", 8, -1), "i8", marks=pytest.mark.slow),
    ],
)
def test_openvino_computes_with_the_same_codes(scheme, fmt, kind, tmp_path):
    """Constants hold the codes bit for bit, and answers are those of transformers with codes times scales in float32."""
    source = source_of(FAST, tmp_path / "source")
    options = [f"options.group_size={fmt.group}"] if fmt.group > 0 else []
    options += [f"options.symmetric={str(fmt.symmetric).lower()}"] if scheme == "rtn" else []
    out = write(source, tmp_path / "out", "--scheme", scheme, *(word for text in options for word in ("--set", text)))
    tensors, stored = load_file(source / "model.safetensors"), constants(out)
    assert stored.keys() == LAYERS.keys()
    for name, (codes, element) in stored.items():
        expected = round_to_nearest(tensors[LAYERS[name]], fmt, scale_dtype=torch.float16)
        lowest = 0 if fmt.symmetric else 2 ** (fmt.bits - 1)
        assert element == getattr(ov.Type, kind)
        assert torch.equal(codes.view(expected.q.shape).int() - lowest, expected.q.int())
        tensors[LAYERS[name]] = expected.dequantize(torch.float32)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    requests = questions(tmp_path, SIZES[FAST])
    check_equal(answers(openvino, out, tmp_path, requests), answers(hf, source, tmp_path, requests))


def constants(folder: Path) -> dict[str, tuple[torch.Tensor, ov.Type]]:
    """Codes of the decoder's layers as OpenVINO unpacks them, and their types, by name."""
    nodes = [
        node
        for node in ov.Core().read_model(folder / exporter.LANGUAGE).get_ops()
        if node.get_friendly_name() in LAYERS
    ]
    codes = ov.compile_model(ov.Model([opset13.convert(node, "i16") for node in nodes], []), "CPU")({})
    kinds = {node.get_friendly_name(): node.get_element_type() for node in nodes}
    return {name: (torch.from_numpy(codes[i].copy()), kind) for i, (name, kind) in enumerate(kinds.items())}


@pytest.mark.slow
def test_one_core_is_enough(tmp_path, monkeypatch):
    """OpenVINO 2026.4 dies of SIGFPE where it compiles a graph in bfloat16 for one thread, which is all that it has there."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    out = write(build("qwen2-5-vl", tmp_path / "source"), tmp_path / "out")
    requests = questions(tmp_path, SIZES[FAST][:1])[:1]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the engine's process inherits it
    try:
        run = openvino.ENGINE.answer(out, requests, media=tmp_path, settings=replace(SETTINGS, dtype="auto"))
    finally:
        os.sched_setaffinity(0, cores)
    assert set(run.answers) == {requests[0].id}


def test_images_stay_as_small_as_the_recipe_made_them(tmp_path):
    source = source_of(FAST, tmp_path / "source")
    out = write(source, tmp_path / "out", "--scheme", "none", "--reduce", "resize:tokens=6")
    dense = tmp_path / "dense"
    assert main(["quantize", str(source), "--scheme", "none", "--reduce", "resize:tokens=6", "-o", str(dense)]) == 0
    requests = questions(tmp_path, [(168, 140)])
    replies, expected = answers(openvino, out, tmp_path, requests), answers(hf, dense, tmp_path, requests)
    check_equal(replies, expected, most=0.1)  # images are scaled by other code


@pytest.mark.slow
def test_the_script_of_the_folder_answers(tmp_path):
    """It gets what `VLMPipeline` makes of a question by the folder's own chat template, without our rendering of prompts."""
    out = write(source_of(FAST, tmp_path / "source"), tmp_path / "out", "--scheme", "none")
    request, _ = questions(tmp_path, [(112, 84)])[:2]
    command = [sys.executable, str(out / "serve" / "ask_openvino.py"), "What is number 0?", str(tmp_path / "0.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    run = engines.get_engine("openvino").answer(out, [request], media=tmp_path, settings=SETTINGS)
    assert run.engine["name"] == "openvino"
    assert _without_pieces(done.stdout).startswith(_without_pieces(run.answers["0"].text))


@pytest.mark.slow
def test_doctor_compares_with_the_same_weights(tmp_path, quick_engines, capsys):
    """All is fine with the source of a folder, and first tokens are not with another model's weights."""
    source = source_of(FAST, tmp_path / "source")
    command = ["doctor", str(write(source, tmp_path / "out")), "--engine", "openvino", "--prompts", "4", "--source"]
    assert main([*command, str(source)]) == 0
    assert "4 of 4 questions answered" in capsys.readouterr().out
    build(FAST, tmp_path / "seeded", seed=1)
    shutil.copy(tmp_path / "seeded" / "model.safetensors", source)
    assert main([*command, str(source)]) == 1
    assert "first tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_equal_inputs_give_equal_files(tmp_path):
    source = source_of(FAST, tmp_path / "source")
    first, second = (write(source, tmp_path / name, "--scheme", "rtn") for name in ("first", "second"))
    files = sorted(path.name for path in first.glob("openvino_*"))
    assert len(files) == 2 * 6
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_missing_openvino_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporter.OpenVino, "PACKAGES", ("no_such_package",))
    source = build(FAST, tmp_path / "source")
    assert main(["quantize", str(source), "--scheme", "none", "--format", "openvino", "-o", str(tmp_path / "out")]) == 2
    assert "no_such_package is not installed; pip install '.[openvino]'" in capsys.readouterr().err


def test_an_engine_gets_no_folder_of_another(tmp_path, capsys):
    """What a reducer's checkpoint would lose in another format is refused as well."""
    folder = build(FAST, tmp_path / "folder")
    with pytest.raises(ValueError, match="has no openvino_language_model.xml"):
        openvino.start(job(folder, tmp_path))
    edit(folder, "config.json", quantization_config={"quant_method": "openvino", "bits": 4})
    (folder / exporter.LANGUAGE).touch()
    for command in (["eval", "--engine", "hf"], ["eval"], ["bench"]):
        assert main([command[0], str(folder), *command[1:], "--baseline", str(folder)]) == 2
        assert "the format openvino; take eval --engine openvino (" in capsys.readouterr().err
    assert main(["serve", str(folder)]) == 2 and "ask_openvino.py" in capsys.readouterr().err
    assert main(["doctor", str(folder)]) == 2 and "eval --engine openvino" in capsys.readouterr().out


def test_a_reducer_is_not_lost_on_the_way(tmp_path, capsys):
    source = build(FAST, tmp_path / "source")
    reduced = tmp_path / "reduced"
    assert main(["quantize", str(source), "--scheme", "rtn", "--reduce", "divprune:0.5", "-o", str(reduced)]) == 0
    assert main(["export", str(reduced), "--format", "openvino", "-o", str(tmp_path / "out")]) == 2
    assert "does not run the reducer divprune" in capsys.readouterr().err
