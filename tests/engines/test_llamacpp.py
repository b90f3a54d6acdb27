"""llama.cpp itself, on GGUF files of tiny float32 models, against transformers: prompts, first tokens, greedy answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit.tiny import build
from vlmcompress import engines
from vlmcompress.cli import main
from vlmcompress.engines import Request, Settings, hf, llamacpp
from vlmcompress.llamacpp import REGISTRY

ENDS = [258, 257]  # `<|im_end|>`, and `<|endoftext|>`, which llama.cpp takes for an end by its name
SETTINGS = Settings(max_tokens=8, logprobs=8, dtype="float32", max_num_seqs=1)
SIZES = {  # of images that no processor has to make smaller: llama.cpp pads where transformers stretches
    "gemma3": [(56, 56)],
    "idefics3": [(112, 112), (112, 56), (100, 80), (40, 40)],
    "internvl": [(56, 56)],
    "lfm2-vl": [(64, 64), (128, 64)],
    "llava": [(56, 56)],
    "mistral3": [(112, 112), (56, 112)],
    "qwen2-vl": [(112, 84), (56, 56)],
    "qwen2-5-vl": [(112, 84), (168, 140)],
    "qwen3-5": [(256, 256), (128, 96)],
    "qwen3-5-moe": [(256, 256), (128, 96)],
    "qwen3-vl": [(256, 256), (128, 96)],
    "qwen3-vl-moe": [(256, 256), (128, 96)],
}
OWN_KIND = (
    "gemma3",
    "idefics3",
    "lfm2-vl",
    "llava",
    "mistral3",
    "qwen3-5-moe",
)  # the others differ from these in data alone
FAMILIES = [pytest.param(name, marks=() if name in OWN_KIND else pytest.mark.slow) for name in sorted(SIZES)]
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}  # in another order in ggml than in transformers
VARIANTS: dict[str, dict] = {"qwen3-5": HEADS, "qwen3-5-moe": HEADS, "qwen3-vl-moe": {"mlp_only_layers": ()}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # as Ministral 3 has it
SPLITS = {"idefics3": ["\n\n"]}  # a token that llama.cpp's processor of the family asks for by name


def floats(family: str, folder: Path) -> Path:
    """A tiny float32 checkpoint with no parameter that is the same everywhere, so that each has to be in its place."""
    build(family, folder, **VARIANTS.get(family, {}))
    generator = torch.Generator().manual_seed(1)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if tensor.numel() > 1 and tensor.std() == 0:
            tensors[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        elif tensor.ndim > 1:
            tensors[name] = tensor * 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    _as_float32(config)
    if family.startswith("qwen2"):
        config["text_config"]["rms_norm_eps"] = 1e-12  # llama.cpp's `qwen2vl` of 2026-10 does not read it and takes 0
    if family == "qwen2-5-vl":
        config["vision_config"]["window_size"] = 112
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ENDS}))
    if family == "mistral3":
        config["text_config"]["rope_parameters"] |= YARN
    (folder / "config.json").write_text(json.dumps(config))
    if family in SPLITS:
        _add_tokens(folder / "tokenizer.json", SPLITS[family])
    return folder


def edit(file: Path, change: Callable[[dict], object]) -> None:
    """Change a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _as_float32(config: dict) -> None:
    for key, value in config.items():
        if key == "dtype":
            config[key] = "float32"
        elif isinstance(value, dict):
            _as_float32(value)


def _add_tokens(path: Path, tokens: list[str]) -> None:
    content = json.loads(path.read_text())
    first = 1 + max(entry["id"] for entry in content["added_tokens"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] += [{"id": first + i, "content": token, **plain} for i, token in enumerate(tokens)]
    path.write_text(json.dumps(content))


def questions(media: Path, sizes: list[tuple[int, int]], count: int) -> list[Request]:
    """Questions about `count` pictures, and one without."""
    noise, requests = random.Random(0), []
    for index in range(count):
        small = Image.frombytes("RGB", (8, 8), noise.randbytes(192))
        small.resize(sizes[index % len(sizes)], Image.Resampling.BICUBIC).save(media / f"{index}.png")
        image = {"type": "image_url", "image_url": {"url": (media / f"{index}.png").as_uri()}}
        text = {"type": "text", "text": f"What is number {index}?"}
        requests.append(Request(str(index), [{"role": "user", "content": [image, text]}]))
    return [*requests, Request("text", [{"role": "user", "content": "Hello there."}])]


def job(folder: Path, media: Path) -> dict:
    return {"model": str(folder), "media": str(media), "settings": vars(SETTINGS), "reduce": None}


def as_llama_cpp_computes(family: str, model) -> None:
    """What llama.cpp of 2026-10 does otherwise: LLaVA's CLS token comes behind the patches, and the features are all but the
    first token's."""
    if family == "llava":
        embeddings = model.model.vision_tower.embeddings
        original = embeddings.forward
        embeddings.forward = lambda *args, **kwargs: original(*args, **kwargs).roll(-1, 1)


def test_each_family_has_its_sizes():
    assert sorted(SIZES) == sorted(REGISTRY.names())


def compare(family: str, folder: Path, count: int) -> tuple[int, int]:
    """Ask an unquantized file in llama.cpp and its source in transformers about `count` pictures; return how many of how many
    answers are the same. First tokens' probabilities are compared here."""
    source, media = floats(family, folder / "source"), folder
    assert main(["quantize", str(source), "--scheme", "none", "--format", "gguf", "-o", str(folder / "out")]) == 0
    requests = [vars(request) for request in questions(media, SIZES[family], count)]
    reference, _ = hf.start(job(source, media))
    as_llama_cpp_computes(family, reference.model)
    engine, _ = llamacpp.start(job(folder / "out", media))
    expected = dict(hf.answers(reference, requests, job(source, media)))
    replies = dict(llamacpp.answers(engine, requests, job(folder / "out", media)))
    equal = reported = 0
    for name, answer in expected.items():
        reply = replies[name]
        assert not isinstance(reply, Exception), reply
        assert reply["prompt_tokens"] == answer["prompt_tokens"]
        if reply["first"]:  # llama.cpp reports none of a token that is a part of a character
            pairs = zip(reply["first"], answer["first"], strict=True)  # most likely first; texts of bytes are alike
            assert max(abs(mine[1] - theirs[1]) for mine, theirs in pairs) < 0.02
            reported += 1
        equal += reply["text"] == answer["text"]
    assert reported
    return equal, len(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family, tmp_path):
    equal, count = compare(family, tmp_path, 4)
    assert equal >= count - 1  # one near tie may fall otherwise


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(SIZES))
def test_fifty_answers_are_those_of_transformers(family, tmp_path):
    equal, count = compare(family, tmp_path, 50)
    assert equal >= count - 3


@pytest.mark.parametrize("scheme", ["rtn", pytest.param("nvfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3-5-moe" else pytest.mark.slow) for name in sorted(SIZES)]
)
def test_quantized_tensors_are_the_codes_times_their_scales(family, scheme, tmp_path):
    """The same codes as blocks, and multiplied out and written to GGUF as floats: rows, columns, parts and experts of blocks go
    where those of floats do."""
    source = build(family, tmp_path / "source", **VARIANTS.get(family, {}))
    if family == "qwen2-5-vl":
        edit(source / "config.json", lambda config: config["vision_config"].update(window_size=112))
    if family in SPLITS:
        _add_tokens(source / "tokenizer.json", SPLITS[family])
    options = {"rtn": ["group_size=32"], "nvfp4": ["mixed=false", "activations=16", "rounding=rtn"]}[scheme]
    flags = ["--scheme", scheme, *(part for option in options for part in ("--set", f"options.{option}"))]
    assert main(["quantize", str(source), *flags, "-o", str(tmp_path / "packed")]) == 0
    for name, fmt in (("out", "gguf"), ("dense", "bf16")):
        assert main(["export", str(tmp_path / "packed"), "--format", fmt, "-o", str(tmp_path / name)]) == 0
    command = ["quantize", str(tmp_path / "dense"), "--scheme", "none", "--format", "gguf", "-o"]
    assert main([*command, str(tmp_path / "floats")]) == 0
    packed, plain = (tensors(tmp_path / name / "model.gguf") for name in ("out", "floats"))
    scales = {name: packed.pop(name) for name in list(packed) if name.endswith(".scale")}
    assert packed.keys() == plain.keys() and bool(scales) == (scheme == "nvfp4")
    for name, value in packed.items():
        factor = scales.get(name.removesuffix("weight") + "scale", np.ones(1, np.float32))
        factor = factor.reshape(-1, *[1] * (value.ndim - 1)) if len(factor) > 1 else factor
        np.testing.assert_allclose(value * factor, plain[name], rtol=2**-8, atol=1e-7, err_msg=name)


def tensors(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file in float32."""
    return {
        tensor.name: gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


def test_the_engine_is_a_process_of_its_own(tmp_path):
    """Four-bit weights in llama.cpp against the same weights in transformers, which rounds inputs less."""
    source = floats("qwen2-vl", tmp_path / "source")
    for name, fmt in (("out", "gguf"), ("dense", "bf16")):
        flags = ["--scheme", "rtn", "--set", "options.group_size=32", "--format", fmt]
        assert main(["quantize", str(source), *flags, "-o", str(tmp_path / name)]) == 0
    requests = questions(tmp_path, SIZES["qwen2-vl"], 4)
    run = engines.get("llamacpp").answer(tmp_path / "out", requests, media=tmp_path, settings=SETTINGS)
    assert run.engine["name"] == "llamacpp" and run.answers.keys() == {request.id for request in requests}
    reference, _ = hf.start(job(tmp_path / "dense", tmp_path))
    rows = [vars(request) for request in requests]
    for name, answer in hf.answers(reference, rows, job(tmp_path / "dense", tmp_path)):
        if run.answers[name].first:
            expected = engines.first_tokens(answer["first"])
            assert max(run.answers[name].first.values()) == pytest.approx(max(expected.values()), abs=0.5)


def test_a_folder_without_gguf_is_refused(tmp_path):
    source = build("qwen2-vl", tmp_path / "source")
    with pytest.raises(ValueError, match="no checkpoint of ours"):
        llamacpp.start(job(source, tmp_path))
