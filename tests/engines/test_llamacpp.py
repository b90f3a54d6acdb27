"""llama.cpp itself, on GGUF files of tiny float32 models, against transformers: prompts, first tokens, greedy answers."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.kit import mtp_oracle
from tests.kit.float_models import SETTINGS, answers, floats, job, questions
from tests.kit.processes import session_ends
from tests.kit.published import VARIANTS, as_llama_cpp_computes, for_llamacpp
from tests.kit.tiny import build
from vlmcompress import engines
from vlmcompress.cli import main
from vlmcompress.engines import hf, llamacpp, llamacpp_server
from vlmcompress.engines.vllm.serve import free_port, wait
from vlmcompress.export.gguf import REGISTRY
from vlmcompress.utils.errors import UserError

SIZES = {  # of images that no processor has to make smaller: llama.cpp pads where transformers stretches
    "gemma3": [(56, 56)],
    "gemma4": [(120, 84), (60, 168)],
    "gemma4-moe": [(120, 84), (60, 168)],
    "glm-ocr": [(112, 84), (56, 56)],
    "glm4v": [(112, 84), (56, 56)],
    "idefics3": [(112, 112), (112, 56), (100, 80), (40, 40)],
    "internvl": [(56, 56)],
    "lfm2-vl": [(64, 64), (128, 64)],
    "llava": [(56, 56)],
    "mistral3": [(112, 112), (56, 112)],
    "paddleocr-vl": [(112, 84), (56, 56)],
    "qwen2-vl": [(112, 84), (56, 56)],
    "qwen2-5-vl": [(112, 84), (168, 140)],
    "qwen3-5": [(256, 256), (128, 96)],
    "qwen3-5-moe": [(256, 256), (128, 96)],
    "qwen3-vl": [(256, 256), (128, 96)],
    "qwen3-vl-moe": [(256, 256), (128, 96)],
}
ALLOWED = {"gemma4": 0.002, "gemma4-moe": 0.002}  # of log-probabilities, where clipped numbers hide much; others: 0.02
OWN_KIND = (
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "glm-ocr",
    "idefics3",
    "lfm2-vl",
    "llava",
    "mistral3",
    "paddleocr-vl",
    "qwen3-5-moe",
)  # the others differ from these in data alone
FAMILIES = [pytest.param(name, marks=() if name in OWN_KIND else pytest.mark.slow) for name in sorted(SIZES)]


def test_each_family_has_its_sizes():
    assert sorted(SIZES) == sorted(REGISTRY.names())


def compare(family: str, folder: Path, count: int) -> tuple[int, int]:
    """Ask an unquantized file in llama.cpp and its source in transformers about `count` pictures; return how many of how many
    answers are the same. First tokens' probabilities are compared here."""
    source, media = for_llamacpp(family, floats(family, folder / "source", **VARIANTS.get(family, {}))), folder
    assert main(["quantize", str(source), "--scheme", "none", "--format", "gguf", "-o", str(folder / "out")]) == 0
    requests = questions(media, SIZES[family], count)
    reference, _ = hf.start(job(source, media))
    as_llama_cpp_computes(family, reference.model)
    expected = dict(hf.answers(reference, [vars(request) for request in requests], job(source, media)))
    replies = answers(llamacpp, folder / "out", media, requests)
    equal = reported = 0
    for name, answer in expected.items():
        reply = replies[name]
        assert not isinstance(reply, Exception), reply
        assert reply["prompt_tokens"] == answer["prompt_tokens"]
        if reply["first"]:  # llama.cpp reports none of a token that is a part of a character
            pairs = zip(reply["first"], answer["first"], strict=True)  # most likely first; texts of bytes are alike
            assert max(abs(mine[1] - theirs[1]) for mine, theirs in pairs) < ALLOWED.get(family, 0.02)
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


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "internvl" else pytest.mark.slow) for name in sorted(SIZES)]
)
def test_a_tower_of_8_bits_runs(family, tmp_path):
    """It and one of 16 bits load, and a random model answers mostly the same with both."""
    source = for_llamacpp(family, floats(family, tmp_path / "source", **VARIANTS.get(family, {})))
    requests, texts = questions(tmp_path, SIZES[family], 4), []
    for kind in ("q8_0", "f16"):
        flags = ["--scheme", "none", "--format", "gguf", "--set", f"mmproj={kind}", "-o", str(tmp_path / kind)]
        assert main(["quantize", str(source), *flags]) == 0
        replies = answers(llamacpp, tmp_path / kind, tmp_path, requests)
        texts.append([replies[request.id]["text"] for request in requests])
    tower = gguf.GGUFReader(tmp_path / "q8_0" / "mmproj.gguf").tensors
    assert sum(tensor.tensor_type.name == "Q8_0" for tensor in tower) >= 10
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= len(requests) / 2


@pytest.mark.parametrize("scheme", ["rtn", pytest.param("nvfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "qwen3-5-moe" else pytest.mark.slow) for name in sorted(SIZES)]
)
def test_quantized_tensors_are_the_codes_times_their_scales(family, scheme, tmp_path):
    """The same codes as blocks, and multiplied out and written to GGUF as floats: rows, columns, parts and experts of blocks go
    where those of floats do."""
    source = for_llamacpp(family, build(family, tmp_path / "source", **VARIANTS.get(family, {})))
    options = {"rtn": ["group_size=32"], "nvfp4": ["mixed=false", "activations=16", "rounding=rtn"]}[scheme]
    flags = ["--scheme", scheme, *(part for option in options for part in ("--set", f"options.{option}"))]
    assert main(["quantize", str(source), *flags, "-o", str(tmp_path / "packed")]) == 0
    for name, fmt in (("out", "gguf"), ("dense", "bf16")):
        assert main(["export", str(tmp_path / "packed"), "--format", fmt, "-o", str(tmp_path / name)]) == 0
    command = ["quantize", str(tmp_path / "dense"), "--scheme", "none", "--format", "gguf", "-o"]
    assert main([*command, str(tmp_path / "floats")]) == 0
    packed, plain = (tensors(tmp_path / name / "model.gguf") for name in ("out", "floats"))
    scales = {name: packed.pop(name) for name in list(packed) if name.endswith(".scale")}
    rest = {name: plain.pop(name) for name in list(plain) if name.endswith(".scale")}  # of the model
    scales = {
        name: value / rest.get(name, 1) for name, value in scales.items() if not np.array_equal(value, rest.get(name))
    }
    assert packed.keys() == plain.keys() and bool(scales) == (scheme == "nvfp4")
    for name, value in packed.items():
        factor = scales.get(name.removesuffix("weight") + "scale", np.ones(1, np.float32))
        factor = factor.reshape(-1, *[1] * (value.ndim - 1)) if len(factor) > 1 else factor
        np.testing.assert_allclose(value * factor, plain[name], rtol=2**-8, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("family", ["qwen3-5", pytest.param("qwen3-5-moe", marks=pytest.mark.slow)])
def test_drafts_of_an_mtp_head_are_those_of_its_weights(family, tmp_path):
    """llama.cpp drafts with the head that stands in the file: answers stay, and as many drafts are accepted as the head
    computed with transformers has right. llama.cpp's counts change with the request before, so that not all prompts agree;
    with a tensor of another place two do."""
    source = for_llamacpp(family, mtp_oracle.few_answers(family, tmp_path / "source", **VARIANTS[family]))
    assert main(["quantize", str(source), "--scheme", "none", "--format", "gguf", "-o", str(tmp_path / "out")]) == 0
    plain, drafting = (completed(tmp_path / "out", mtp_oracle.PROMPTS, 40, draft) for draft in (0, 1))
    oracle, accepted, equal = mtp_oracle.Oracle(source), 0, 0
    for prompt, expected, reply in zip(mtp_oracle.PROMPTS, plain, drafting, strict=True):
        assert reply["tokens"] == expected["tokens"] and "draft_n" not in expected["timings"]
        counts = tuple(reply["timings"][name] for name in ("draft_n", "draft_n_accepted"))
        equal += counts == oracle.counts(prompt, expected["tokens"], prefilled=True)
        accepted += counts[1]
    assert equal >= 4 and accepted >= 20


def completed(folder: Path, prompts: Sequence[str], count: int, drafted: int) -> list[dict[str, Any]]:
    """llama.cpp's answers of `count` tokens each, with as many drafted at once by the file's own head."""
    import xllamacpp

    os.environ["LLAMA_MEDIA_MARKER"] = llamacpp.MARKER  # read once in a process
    params = llamacpp_server.parameters(folder, context=512, slots=1, limits=None)
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    caches = [params]
    if drafted:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = drafted
        caches.append(params.speculative.draft)
    for cache in caches:
        cache.cache_type_k = cache.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server, replies = xllamacpp.Server(params), []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for prompt in prompts:
        body = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        call = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body | {"cache_prompt": False}).encode(),
            {"Content-Type": "application/json"},
        )
        with opener.open(call) as response:
            replies.append(json.load(response))
    return replies


def test_a_lost_mtp_head_is_not_announced(tmp_path):
    """config.json has one and the tensors lack it, as tools that load and save with transformers leave it: llama.cpp would not
    load a file that announces the head."""
    source = for_llamacpp("qwen3-5", floats("qwen3-5", tmp_path / "source", **VARIANTS["qwen3-5"]))
    mtp_oracle.without_head(source)
    assert main(["quantize", str(source), "--scheme", "none", "--format", "gguf", "-o", str(tmp_path / "out")]) == 0
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["qwen35.block_count"].contents() == 2 and "qwen35.nextn_predict_layers" not in fields
    requests = questions(tmp_path, SIZES["qwen3-5"], 2)
    expected = answers(hf, source, tmp_path, requests)
    for name, reply in answers(llamacpp, tmp_path / "out", tmp_path, requests).items():
        assert reply["text"] == expected[name]["text"]


def tensors(file: Path) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file in float32."""
    return {
        tensor.name: gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.slow
def test_the_engine_is_a_process_of_its_own(tmp_path):
    """Four-bit weights in llama.cpp against the same weights in transformers, which rounds inputs less."""
    source = for_llamacpp("qwen2-vl", floats("qwen2-vl", tmp_path / "source"))
    for name, fmt in (("out", "gguf"), ("dense", "bf16")):
        flags = ["--scheme", "rtn", "--set", "options.group_size=32", "--format", fmt]
        assert main(["quantize", str(source), *flags, "-o", str(tmp_path / name)]) == 0
    requests = questions(tmp_path, SIZES["qwen2-vl"], 4)
    run = engines.get_engine("llamacpp").answer(tmp_path / "out", requests, media=tmp_path, settings=SETTINGS)
    assert run.engine["name"] == "llamacpp" and run.answers.keys() == {request.id for request in requests}
    for name, answer in answers(hf, tmp_path / "dense", tmp_path, requests).items():
        if run.answers[name].first:
            expected = engines.first_tokens(answer["first"])
            assert max(run.answers[name].first.values()) == pytest.approx(max(expected.values()), abs=0.5)


def written(family: str, folder: Path, *flags: str) -> Path:
    """A GGUF folder made of `folder / "source"`, which is made, too."""
    source = for_llamacpp(family, floats(family, folder / "source"))
    command = ["quantize", str(source), *(flags or ("--scheme", "none")), "--format", "gguf"]
    assert main([*command, "-o", str(folder / "tiny-gguf")]) == 0
    return folder / "tiny-gguf"


@pytest.fixture(scope="module")
def unquantized(tmp_path_factory) -> Path:
    """A GGUF folder; its source stands next to it."""
    return written("qwen2-vl", tmp_path_factory.mktemp("unquantized"))


MUTATIONS: dict[
    str, Any
] = {  # what becomes of the bytes of a file; its head is magic, version, numbers of tensors and of keys
    "empty": lambda raw: b"",
    "no GGUF": lambda raw: b"GGUG" + raw[4:],
    "of another version": lambda raw: raw[:4] + (99).to_bytes(4, "little") + raw[8:],
    "too many tensors": lambda raw: raw[:8] + (2**60).to_bytes(8, "little") + raw[16:],
    "too many keys": lambda raw: raw[:16] + (2**60).to_bytes(8, "little") + raw[24:],
    "zeros for keys": lambda raw: raw[:24] + bytes(4000) + raw[4024:],
    "cut in its keys": lambda raw: raw[:200],
    "cut in its tensors": lambda raw: raw[: len(raw) // 2],
}


@pytest.mark.parametrize("file", ["model.gguf", "mmproj.gguf"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind.startswith("cut in its t") else pytest.mark.slow) for kind in MUTATIONS],
)
def test_a_damaged_file_is_one_line(kind, file, unquantized, tmp_path, quick_engines):
    """The engine's process may end in any way; the message names the folder and has the engine's own words."""
    folder = tmp_path / "damaged"
    shutil.copytree(unquantized, folder)
    (folder / file).write_bytes(MUTATIONS[kind]((folder / file).read_bytes()))
    with pytest.raises(UserError, match=r"^llama\.cpp could not (load|start) .*damaged.*: .") as raised:
        engines.get_engine("llamacpp").answer(
            folder, questions(tmp_path, [(56, 56)], 0), media=tmp_path, settings=SETTINGS
        )
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1200


@pytest.mark.slow
def test_doctor_compares_with_the_same_weights(unquantized, tmp_path, quick_engines, capsys):
    """All is fine with the source of a file, and first tokens are not with another model's weights."""
    source = unquantized.parent / "source"
    command = ["doctor", str(unquantized), "--engine", "llamacpp", "--prompts", "8", "--source"]
    assert main([*command, str(source)]) == 0
    assert "8 of 8 questions answered" in capsys.readouterr().out
    other = for_llamacpp("qwen2-vl", floats("qwen2-vl", tmp_path / "other"))
    build("qwen2-vl", tmp_path / "seeded", seed=1)
    shutil.copy(tmp_path / "seeded" / "model.safetensors", other)
    assert main([*command, str(other)]) == 1
    assert "first tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_serve_becomes_a_server_that_ends_cleanly(unquantized, tmp_path):
    """Its answers to a question with an image are the engine's, by OpenAI's protocol."""
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "vlmcompress", "serve", str(unquantized), "--port", str(port)]
    with open(log, "wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    try:
        wait(process, unquantized, url := f"http://127.0.0.1:{port}", 120, log, "llama.cpp's server")
        request = questions(tmp_path, [(112, 84)], 1)[0]
        picture = base64.b64encode((tmp_path / "0.png").read_bytes()).decode()
        image, text = request.messages[0]["content"]
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
        body = {"model": "tiny-gguf", "max_tokens": 8, "temperature": 0}
        body["messages"] = [{"role": "user", "content": [image, text]}]
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers), timeout=60
        ) as response:
            reply = json.load(response)
        expected = engines.get_engine("llamacpp").answer(unquantized, [request], media=tmp_path, settings=SETTINGS)
        assert reply["usage"]["prompt_tokens"] == expected.answers["0"].prompt_tokens
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) in (0, -signal.SIGTERM) and session_ends(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["serve", "{}", "--videos", "2"], "llama.cpp's server has no --videos-per-request; leave it out"),
        (["serve", "{}", "--max-model-len", "10000000"], "--max-model-len is 10000000; give 1 to "),
        (["doctor", "{}", "--engine", "llamacpp"], "give the same weights by --source CHECKPOINT"),
        (["doctor", "{}", "--engine", "llamacpp", "--source", "{}"], "is GGUF, too; give the checkpoint that "),
        (["doctor", "{}", "--source", "{}"], "is for llama.cpp, and not compared with --source; leave that out"),
    ],
)
def test_unsupported_uses_of_gguf_are_refused_in_one_line(command, reason, unquantized, capsys):
    assert main([part.format(unquantized) for part in command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and reason in error


def test_a_folder_without_gguf_is_refused(tmp_path):
    source = build("qwen2-vl", tmp_path / "source")
    with pytest.raises(ValueError, match="has no model.gguf; write it by"):
        llamacpp.start(job(source, tmp_path))
