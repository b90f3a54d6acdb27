"""Tokenizers in OpenVINO's and llama.cpp's form against the models': others are refused before anything is written."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, AutoTokenizer

from tests.kit import rtn
from tests.kit.tiny import build
from vlmcompress import cli, models
from vlmcompress.export import tokenizers
from vlmcompress.export.formats import gguf
from vlmcompress.export.gguf import tokens
from vlmcompress.export.gguf.tokenizer import PATTERNS, USER_DEFINED, metadata
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.registry import FORMATS

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
OWN = [name for name in FORMATS.names() if hasattr(FORMATS.get(name), "token_ids")]


def changed(folder: Path, change) -> Path:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def words(content: dict) -> None:
    """Words between spaces, as they are: `USER:` is one, which OpenVINO's converted tokenizer cuts in two."""
    vocabulary = [
        "<unk>",
        "USER:",
        "ASSISTANT:",
        "How",
        "many",
        "people",
        "are",
        "on",
        "the",
        "platform",
        "at",
        "10:45?",
    ]
    content["model"] = {
        "type": "WordLevel",
        "vocab": {word: i for i, word in enumerate(vocabulary)},
        "unk_token": "<unk>",
    }
    content["pre_tokenizer"], content["decoder"] = {"type": "WhitespaceSplit"}, None


def joined_signs(content: dict) -> None:
    """Mistral's way of splitting text, with a token across a combining sign, at which llama.cpp's pattern splits."""
    (pattern,) = (pattern for pattern, name in PATTERNS.items() if name == "tekken")
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, BYTES | {"use_regex": False}],
    }
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}  # or they are numbered anew

    def join(parts: list[str]) -> str:
        for number in range(1, len(parts)):
            pair = "".join(parts[:number]), parts[number]
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = 340 + len(merges)
                merges.append(list(pair))
        return "".join(parts)

    join([join([_byte_token(byte) for byte in sign.encode()]) for sign in "त्र"])


def _byte_token(byte: int) -> str:
    """The character that stands for a byte: those that print stand for themselves, the others follow 255 in turn."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printing else chr(256 + [b for b in range(256) if b not in printing].index(byte))


def pieces(folder: Path, visible: str) -> None:
    """A tokenizer of Gemma 4's kind: pieces of text with spaces as `▁`, bytes of what no piece holds, and merges that a score
    for each token does not give: `bc` is merged first, and `abc` is made of `ab` and `c` alone."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    free = iter(sorted(set(range(384)) - {*vocabulary.values(), *added.values()}))
    words = ["▁", "a", "b", "c", "x", "\n", "bc", "ab", "abc", "▁x", "\n\n", "xa"]
    vocabulary |= {word: next(free) for word in words}
    content["model"] |= {"vocab": vocabulary | added, "byte_fallback": True, "fuse_unk": True}
    content["model"]["merges"] = [["x", "a"], ["b", "c"], ["a", "b"], ["▁", "x"], ["ab", "c"], ["\n", "\n"]]
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["pre_tokenizer"] = None
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": next(free), "content": visible})
    first = content["added_tokens"][0]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            first["content"]: {"id": first["content"], "ids": [first["id"]], "tokens": [first["content"]]}
        },
    }
    path.write_text(json.dumps(content))


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main([*map(str, arguments)])
    return code, *capsys.readouterr()


def test_texts_are_of_all_kinds(tmp_path):
    processor = AutoProcessor.from_pretrained(build("qwen2-vl", tmp_path))
    prompts, others = tokenizers.samples(processor)
    assert sum(tokenizers.QUESTION in text for text in prompts) == 2 and "<|im_end|>" in prompts
    assert len(others) > 100 and set(tokenizers.TEXTS) < set(others) and not any("\0" in text for text in others)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("family", ["llava", "qwen2-vl"])
def test_bytes_and_their_pairs_are_read_alike(name, family, tmp_path):
    folder = build(family, tmp_path / "model")
    config = models.build_meta_model(folder).config.to_dict()
    compared = tokenizers.compare_tokenizers(FORMATS.get(name), folder, config)
    assert compared.texts > 100 and (compared.problem, compared.warning) == (None, None)
    assert tokenizers.compare_tokenizers(FORMATS.get("awq"), folder, config).texts == 0


def test_bytes_that_name_a_fallback_are_read_alike(tmp_path):
    """As in a tokenizer that transformers made of a GGUF file: byte_fallback is set, and tokens stand for bytes."""
    folder = changed(build("qwen2-vl", tmp_path), lambda content: content["model"].update(byte_fallback=True))
    assert metadata(folder, 400, {})["tokenizer.ggml.model"] == "gpt2"
    config = models.build_meta_model(folder).config.to_dict()
    compared = tokenizers.compare_tokenizers(FORMATS.get("gguf"), folder, config)
    assert compared.texts > 100 and (compared.problem, compared.warning) == (None, None)


def test_merges_are_those_of_gemma_4(tmp_path):
    """By scores, as SentencePiece merges, llama.cpp would make other tokens; the tokens of a tool call are shown."""
    pieces(folder := build("gemma4", tmp_path / "model"), "<|tool_call>")
    config = models.build_meta_model(folder).config.to_dict()
    compared = tokenizers.compare_tokenizers(FORMATS.get("gguf"), folder, config)
    assert compared.texts > 100 and (compared.problem, compared.warning) == (None, None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["abc", " xabc", "a\n\n\nbc", "xab c", "zä"]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    assert FORMATS.get("gguf").token_ids(folder, config, texts) == expected
    keys = metadata(folder, 384, config)
    assert tokens.gguf_token_ids(keys, texts, gguf._add) != expected
    keys = gguf._tokenizer(folder, "gemma4", config)
    place = keys["tokenizer.ggml.tokens"].index("<|tool_call>")
    assert keys["tokenizer.ggml.token_type"][place] == USER_DEFINED


def test_all_ends_of_an_answer_are_written(tmp_path):
    folder = build("qwen2-vl", tmp_path)
    config = models.build_meta_model(folder).config.to_dict()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 257, 256, 259]}))
    keys = metadata(folder, 384, config)
    assert [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")] == [258, 257, 256]


@pytest.mark.parametrize("verb", ["quantize", "check", "export"])
def test_words_that_openvino_cuts_are_refused(verb, tmp_path, capsys):
    source, out = changed(build("llava", tmp_path / "source"), words), tmp_path / "out"
    rtn.write(source, tmp_path / "packed", rtn.SCHEMES["w4-symmetric"])
    before = sorted(tmp_path.iterdir())
    recipe = ("--scheme", "rtn", "--set", "format=openvino")
    command = {
        "quantize": ("quantize", source, "-o", out, *recipe),
        "check": ("check", source, *recipe),
        "export": ("export", tmp_path / "packed", "-o", out, "--format", "openvino"),
    }[verb]
    code, output, error = run(capsys, *command)
    assert (
        code != 0 and " texts into other tokens: of " in output + error and "write compressed-tensors" in output + error
    )
    assert sorted(tmp_path.iterdir()) == before


def test_a_script_that_llama_cpp_cuts_is_a_warning(tmp_path, capsys):
    """Of published tokenizers there are such; the checkpoint notes it, and `doctor`, which looks at what was written."""
    source, out = changed(build("qwen2-vl", tmp_path / "source"), joined_signs), tmp_path / "out"
    tokenizer = AutoProcessor.from_pretrained(source).tokenizer
    assert len(tokenizer("त्र")["input_ids"]) == 1
    code, _, error = run(capsys, "quantize", source, "-o", out, "--scheme", "rtn", "--format", "gguf")
    assert code == 0 and "warning: " in error and "llama.cpp splits 3 of " in error
    assert "llama.cpp splits 3 of " in json.loads((out / "vlmcompress.json").read_text())["warnings"][-1]
    code, output, _ = run(capsys, "doctor", out)
    assert code == 0 and "llama.cpp splits 3 of " in output
    changed(out, words)
    code, output, _ = run(capsys, "doctor", out)
    assert code == 2 and "PROBLEM  tokenizer" in output and "PROBLEM  files" in output


def test_a_tokenizer_that_llama_cpp_does_not_take_is_refused(tmp_path):
    """Its process ends, and the caller's does not. A full TMPDIR is named, not OUT."""
    source = build("qwen2-vl", tmp_path / "source")
    config = models.build_meta_model(source).config.to_dict()
    keys = metadata(source, config["text_config"]["vocab_size"], config)
    assert tokens.gguf_token_ids(keys, ["ab"], gguf._add) == [AutoTokenizer.from_pretrained(source)("ab")["input_ids"]]
    with pytest.raises(UserError, match="^llama.cpp refuses the tokenizer .*; write another format$"):
        tokens.gguf_token_ids(keys | {"tokenizer.ggml.pre": "of our own"}, ["ab"], gguf._add)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as where TMPDIR is full
    try:
        with pytest.raises(UserError, match="^cannot write to .*; free some space there, or set TMPDIR$"):
            tokens.gguf_token_ids(keys, ["ab"], gguf._add)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A model with one weight that no 4-bit code times a 16-bit float reaches."""
    folder = build("llava", tmp_path_factory.mktemp("large") / "source")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.0.mlp.down_proj.weight"))
    weights[name][0, 0] = 3e6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("verb", "format"),
    [("export", "openvino"), ("quantize", "gguf"), pytest.param("quantize", "openvino", marks=pytest.mark.slow)],
)
def test_scales_beyond_16_bit_floats_are_refused_in_one_line(verb, format, large, tmp_path, capsys):
    packed, out = tmp_path / "packed", tmp_path / "out"
    if verb == "export":
        rtn.write(large, packed, rtn.SCHEMES["w4-symmetric"])
        command = ("export", packed, "-o", out)
    else:
        command = ("quantize", large, "-o", out, "--scheme", "rtn")
    code, _, error = run(capsys, *command, "--format", format)
    assert code == 2 and error.splitlines()[-1].startswith("error: ") and "Error" not in error
    assert "down" in error and "16-bit float" in error and "write compressed-tensors" in error and not out.exists()
