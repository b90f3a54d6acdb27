"""GGUF files against the package `gguf` that llama.cpp's authors publish: blocks, tensors and metadata."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch

from tests.kit.launching import called
from tests.kit.published import LARGE
from tests.kit.tiny import build
from vlmcompress.cli import main
from vlmcompress.export.formats import Parts
from vlmcompress.export.formats import gguf as exporter
from vlmcompress.export.gguf import REGISTRY, GgufFile, ModelFacts, TensorRule
from vlmcompress.export.gguf.tensors import tensors_to_write
from vlmcompress.export.gguf.tokenizer import _scores
from vlmcompress.models import build_meta_model
from vlmcompress.numerics import NVFP4, ActFormat, Format, Scheme, round_to_nearest
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.tensor_headers import Spec

ROWS, COLUMNS = 48, 256
QUANTIZE = ("--scheme", "rtn", "--format", "gguf", "--reduce", "resize:tokens=6")
FORMS = [
    ("Q4_0", Format("int", 4, 32)),
    ("Q4_0", Format("int", 4, 128)),
    ("Q4_0", Format("int", 4, -1)),
    ("Q4_1", Format("int", 4, 32, symmetric=False)),
    ("Q8_0", Format("int", 8, 32)),
    ("Q8_0", Format("int", 8, -1)),
    ("NVFP4", NVFP4),
]


def quantized(fmt: Format):
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[5] = 0
    return round_to_nearest(weight, fmt, scale_dtype=torch.float16)


@pytest.mark.parametrize(("kind", "fmt"), FORMS)
def test_ggml_reads_the_blocks_as_the_same_weights(kind, fmt):
    qt = quantized(fmt)
    stored = exporter.FORMAT.tensors(qt, Scheme(fmt))["weight"]
    assert exporter.FORMAT.storage(Scheme(fmt)) == kind
    weights = torch.from_numpy(gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind]))
    if kind == "NVFP4":
        assert torch.equal(weights, qt.q.float() * qt.scale.float().repeat_interleave(16, 1))
        return
    original = qt.dequantize(torch.float32)
    step = qt.scale.float().repeat_interleave(COLUMNS // qt.scale.shape[1], 1)
    allowed = step * 15 / 2048 if kind == "Q4_1" else torch.zeros_like(step)
    assert ((weights - original).abs() <= allowed).all()


def test_codes_and_scales_of_q4_0_are_unchanged():
    qt = quantized(Format("int", 4, 64))
    blocks = exporter.FORMAT.tensors(qt, Scheme(qt.format))["weight"].view(ROWS, COLUMNS // 32, 18)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1).view(ROWS, COLUMNS)
    assert torch.equal(scales[:, ::2], qt.scale) and torch.equal(scales[:, 1::2], qt.scale)
    assert torch.equal(codes.to(torch.int8) - 8, qt.q)


def test_a_scale_that_is_no_float16_is_refused():
    qt = round_to_nearest(torch.randn(4, 32) * 1e-7, Format("int", 4, 32), scale_dtype=torch.float32)
    with pytest.raises(UserError, match="no 16-bit floats"):
        exporter.FORMAT.tensors(qt, Scheme(qt.format))


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (Scheme(Format("int", 3, 32)), "integer weights of 4 bits"),
        (Scheme(Format("int", 8, 32, symmetric=False)), "integer weights of 4 bits"),
        (Scheme(Format("int", 4, 16)), "each 32 weights"),
        (Scheme(Format("float", 8, -1)), "integer weights of 4 bits"),
        (Scheme(Format("int", 8, -1), ActFormat("int", 8, dynamic=True)), "activations"),
    ],
)
def test_a_scheme_that_no_type_holds_is_refused(scheme, reason):
    with pytest.raises(UserError, match=reason):
        exporter.FORMAT.storage(scheme)


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="whole blocks"):
        exporter.FORMAT.specs(Scheme(Format("int", 4, -1)), 8, 48, "F16")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny Qwen2-VL and its GGUF with rounded 4-bit weights."""
    folder = tmp_path_factory.mktemp("gguf")
    source = build("qwen2_vl", folder / "source")
    assert main(["quantize", str(source), *QUANTIZE, "-o", str(folder / "out")]) == 0
    return source, folder / "out"


def test_the_files_hold_the_layers_that_were_quantized(written):
    source, out = written
    file = gguf.GGUFReader(out / "model.gguf")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    weight = _tensor(source, "model.layers.1.self_attn.q_proj.weight")
    expected = round_to_nearest(weight, Format("int", 4, 32), scale_dtype=torch.float16)
    stored = tensors["blk.1.attn_q.weight"]
    assert stored.tensor_type.name == "Q4_0" and list(stored.shape) == [128, 128]
    assert np.array_equal(_weights(stored), expected.dequantize(torch.float32).numpy())
    assert tensors["token_embd.weight"].tensor_type.name == "BF16"
    assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    tower = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "mmproj.gguf").tensors}
    stored, weight = tower["v.blk.1.attn_k.weight"], _tensor(source, "visual.blocks.1.attn.qkv.weight")
    weight = weight.chunk(3)[1].float().numpy()
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weight, stored.tensor_type), stored.tensor_type)
    errors = [np.square(values - weight).mean() for values in (_weights(stored), theirs)]
    assert stored.tensor_type.name == "Q8_0" and errors[0] < 1.01 * errors[1]
    assert tower["v.blk.1.attn_k.bias"].tensor_type.name == "F32"


@pytest.mark.parametrize(
    ("mmproj", "dtype", "quantized", "matrix", "rest"),
    [
        (None, "BF16", True, "Q8_0", "F16"),
        (None, "BF16", False, "F16", "F16"),
        (None, "F32", True, "F32", "F32"),
        ("F16", "BF16", True, "F16", "F16"),
        ("Q8_0", "F32", False, "Q8_0", "F16"),
    ],
)
def test_matrices_of_a_tower_have_8_bits_where_llama_cpp_quantizes_them(mmproj, dtype, quantized, matrix, rest):
    """The others are convolutions, what is not multiplied with, rows of no whole blocks, and what a graph transposes."""
    shapes = {"v.blk.0.ffn_up.weight": (8, 64), "mm.0.weight": (8, 32), "v.blk.0.ffn_down.weight": (8, 48)}
    shapes |= {"v.patch_embd.weight": (8, 3, 14, 14), "mm.patch_merger.weight": (8, 32), "v.class_embd": (1, 32)}
    shapes |= {"mm.input_projection.weight": (32, 64), "v.position_embd.weight": (9, 32), "v.blk.0.ln1.weight": (32,)}
    parts = Parts(
        specs={name: Spec(dtype, shape) for name, shape in shapes.items()},
        read=lambda name: torch.zeros(shapes[name]),
        entries={},
        layers={"x": (Scheme(Format("int", 4, 32)), (8, 32))} if quantized else {},
        quantized={},
        config={},
        image={},
        title="",
        mmproj=mmproj,
    )
    rules = GgufFile({}, tuple(TensorRule(name, name) for name in shapes))
    plans = tensors_to_write(rules, parts, ModelFacts({}, {}), "vision")
    expected = dict.fromkeys(shapes, rest) | dict.fromkeys(list(shapes)[:2], matrix)
    expected |= dict.fromkeys(("v.position_embd.weight", "v.class_embd", "v.blk.0.ln1.weight"), "F32")
    assert {plan.name: plan.kind for plan in plans} == expected
    for plan in plans:
        assert sum(piece.nbytes for piece in plan.make()) == plan.nbytes


def test_equal_inputs_give_equal_files(written, tmp_path):
    source, out = written
    assert main(["quantize", str(source), *QUANTIZE, "-o", str(tmp_path / "again")]) == 0
    for name in ("model.gguf", "mmproj.gguf"):
        again = (tmp_path / "again" / name).read_bytes()
        # the file has the name of the source's folder only
        assert again == (out / name).read_bytes()


def test_the_format_gives_the_group_size_unless_the_recipe_does(written):
    _, out = written
    record = json.loads((out / "vlmcompress.json").read_text())
    assert record["recipe"]["options"]["group_size"] == 32
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"


def test_the_script_has_the_limits_of_the_processor(written):
    """What `resize` asked for reaches llama.cpp, which reads it from its flags alone; the least is the source's: 4 tokens."""
    program, flags, _ = called(written[1] / "serve" / "llamacpp.sh")
    least = flags.index("--image-min-tokens")
    assert program == "llama-server" and flags[least : least + 4][1::2] == ["4", "6"]
    assert flags[least + 2] == "--image-max-tokens"


def test_scores_order_merges_as_sentencepiece_does():
    scores = dict(zip(["ab", "ab", "abab", "x"], _scores(["ab", "ab", "abab", "x"], ["a b", "ab ab"]), strict=True))
    assert scores["ab"] > scores["abab"] > scores["x"]


def test_the_format_is_known_by_its_name():
    assert "gguf" in FORMATS


def _weights(tensor):
    return gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)


def _tensor(source, name):
    from safetensors.torch import load_file

    return load_file(source / "model.safetensors")[name]


def test_a_quantized_checkpoint_keeps_its_codes(written, tmp_path):
    """Scales of a checkpoint in bfloat16 are float16 numbers, too, where they are not tiny."""
    source, _ = written
    flags = ["--scheme", "rtn", "--set", "options.group_size=64", "-o", str(tmp_path / "packed")]
    assert main(["quantize", str(source), *flags]) == 0
    assert (
        main(["export", str(tmp_path / "packed"), "--format", "gguf", "--mmproj", "f16", "-o", str(tmp_path / "out")])
        == 0
    )
    weight = _tensor(source, "model.layers.0.mlp.down_proj.weight")
    expected = round_to_nearest(weight, Format("int", 4, 64), scale_dtype=torch.bfloat16)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    stored = tensors["blk.0.ffn_down.weight"]
    assert np.array_equal(_weights(stored), expected.dequantize(torch.float32).numpy())
    tower = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "mmproj.gguf").tensors}
    assert tower["v.blk.1.attn_k.weight"].tensor_type.name == "F16"
    assert json.loads((tmp_path / "out" / "vlmcompress.json").read_text())["recipe"]["mmproj"] == "f16"


def test_a_tokenizer_unknown_to_llama_cpp_is_refused_before_a_run(written, tmp_path, capsys):
    source = build("qwen2_vl", tmp_path / "source")
    path = source / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(content))
    assert main(["quantize", str(source), "--scheme", "rtn", "--format", "gguf", "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "without a known name" in error


GEMMA4 = {
    "hidden_size": (
        {"hidden_size": 2560},
        "see each other in decoders of other widths than 1536 and 2560; this one is 2560",
    ),
    "causal": ({"use_bidirectional_attention": None}, "wide and has use_bidirectional_attention None"),
    "pad": (
        {"pad_token_id": 3, "hidden_size_per_layer_input": 128},
        "row 0 of the embedding per layer for images, this",
    ),
    "shared": ({"num_kv_shared_layers": 2}, "reuses keys and values of blocks -1"),
    "one kind": (
        {"layer_types": ["full_attention"] * 3},
        "with a window and with full attention; this model has one kind",
    ),
}


@pytest.mark.parametrize("kind", GEMMA4)
def test_a_gemma_4_that_llama_cpp_runs_otherwise_is_refused(kind, tmp_path):
    changes, reason = GEMMA4[kind]
    config = build_meta_model(build("gemma4", tmp_path, **LARGE)).config.to_dict()
    assert not REGISTRY.get("gemma4").problems(ModelFacts(config, {}))
    config["text_config"] |= changes
    problems = REGISTRY.get("gemma4").problems(ModelFacts(config, {}))
    assert any(reason in problem for problem in problems) and not any("\n" in problem for problem in problems)


def test_limits_of_an_image_are_in_tokens():
    """GLM's processor counts the pixels of an image and its copy; Gemma 4's has a budget, which images are scaled up to."""
    image = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "max_soft_tokens": 280}
    image["size"] = {"shortest_edge": 8 * 28 * 28, "longest_edge": 400 * 28 * 28}
    limits = {
        name: REGISTRY.get(name).limits(ModelFacts({}, image)) for name in ("qwen2-vl", "glm-ocr", "gemma4", "llava")
    }
    assert limits == {"qwen2-vl": (8, 400), "glm-ocr": (4, 200), "gemma4": (240, 280), "llava": None}


def test_glm_ocr_is_written_without_its_draft_head(tmp_path):
    source = build("glm-ocr", tmp_path / "source", num_hidden_layers=16, num_nextn_predict_layers=1)
    flags = ["--scheme", "none", "--format", "gguf", "-o", str(tmp_path / "out")]
    assert main(["quantize", str(source), *flags]) == 0
    file = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    blocks = {tensor.name.split(".")[1] for tensor in file.tensors if tensor.name.startswith("blk.")}
    assert blocks == set(map(str, range(16))) and file.fields["glm4.block_count"].contents() == 16
