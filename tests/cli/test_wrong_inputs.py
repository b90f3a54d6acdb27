"""Wrong arguments, broken files and files of strangers: exit code 2, one line with the remedy, soon, nothing written.

A row of `CASES` is (what spoils the folder in which the command runs, the command, words that the line has: the flag or file
that is wrong and what to take, in any wording). The folder has tiny models (`llava`, `qwen`, `gemma3`), the checkpoints `out`
and `other` of two of them, `ct` of demo-llava in compressed-tensors, `a.png` and `calib.jsonl` of one row with it, and
`data/calib.jsonl` of 24.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.kit import calibration_rows, made_manifest, rtn, tiny
from tests.kit.command_line import loud  # noqa: F401
from tests.kit.places import DEMO_LLAVA as DEMO
from vlmcompress import cli
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse_reducer

Spoil = Callable[[], object]
pytestmark = pytest.mark.timeout(300)

HUGE = 10**12
NESTED = "[" * 100_000 + "]" * 100_000
RTN, GPTQ = "quantize llava -o new --scheme rtn", "quantize llava -o new --scheme gptq --calib calib.jsonl"
TOKENS, PLAN = "check llava --image-size 56x56", "plan llava"
EVAL, BENCH = f"eval {DEMO} --baseline {DEMO}", f"bench {DEMO} --baseline {DEMO}"
LEARN = "learn-reducer llava --calib data/calib.jsonl -o new.safetensors"
INSPECT = "inspect llava a.png -o new.png"
CONFIG, PROCESSOR, WEIGHTS = "llava/config.json", "llava/processor_config.json", "llava/model.safetensors"
ROW = {"image": "a.png", "question": "what is it", "answer": "red"}
LAYER = "model.language_model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    for family, name in (("llava", "llava"), ("qwen2_5_vl", "qwen"), ("gemma3", "gemma3")):
        tiny.build(family, folder / name)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)).save(folder / "a.png")
    (folder / "calib.jsonl").write_text(json.dumps({"id": "0"} | ROW) + "\n")
    (folder / "data").mkdir()
    calibration_rows.write(folder / "data", 24, side=112, kinds=3)
    data = ["--calib", str(folder / "calib.jsonl")]
    for model, out in (("llava", "out"), ("qwen", "other")):
        assert cli.main(["quantize", str(folder / model), "-o", str(folder / out), "--scheme", "gptq", *data]) == 0
    rtn.write(DEMO, folder / "ct", rtn.SCHEMES["w4-symmetric"])
    return folder


def write(file: str, content: str | bytes) -> Spoil:
    """Write a file, in a folder that is made if need be."""

    def spoil() -> None:
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def rows(*records: dict, file: str = "calib.jsonl") -> Spoil:
    return write(file, "".join(json.dumps(row) + "\n" for row in records))


def edit(file: str, **values: object) -> Spoil:
    """Set dotted keys (`__` for the dot) of a JSON file."""

    def spoil() -> None:
        content = json.loads(Path(file).read_text())
        for key, value in values.items():
            *parents, last = key.split("__")
            inner = content
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
        Path(file).write_text(json.dumps(content))

    return spoil


def begin(file: str, text: str) -> Spoil:
    """Put text after the first brace of a JSON file."""
    return lambda: Path(file).write_text(Path(file).read_text().replace("{", "{" + text, 1))


def cut(file: str, end: int) -> Spoil:
    return lambda: Path(file).write_bytes(Path(file).read_bytes()[:end])


def header(text: str) -> Spoil:
    """Weights that begin with this header, and end with it."""
    return write(WEIGHTS, len(text).to_bytes(8, "little") + text.encode())


def manifest(errors: object) -> Spoil:
    """A folder `new2` with a manifest of these errors."""
    calibration = {"source": "c", "sha256": "0", "samples": 3, "prefix": "quantized", "tokens": {"text": 9}}
    content = made_manifest.manifest(calibration=calibration, errors=errors)
    return write(f"new2/{MANIFEST}", json.dumps(content))


def newer_reducer() -> None:
    """A checkpoint whose reducer is of a version to come."""
    config = reducer_block.config_with_reducer(
        json.loads((DEMO / "config.json").read_text()), parse_reducer("dart:0.5")
    )
    write("tampered/config.json", json.dumps(config | {"vlmcompress": {"schema": 99}}))()


def nan_in_weights() -> None:
    tensors = load_file(WEIGHTS)
    tensors["language_model.lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, WEIGHTS, {"format": "pt"})


def answers_of_nan() -> None:
    """The weights are finite, and what they make is not."""
    tensors = load_file(WEIGHTS)
    tensors["language_model.lm_head.weight"].fill_(3e38)
    save_file(tensors, WEIGHTS, {"format": "pt"})


def of_another_kind() -> None:
    write("model/config.json", '{"model_type": "bert", "architectures": ["BertModel"]}')()
    save_file({"weight": torch.zeros(1)}, "model/model.safetensors")


def broken_gguf() -> None:
    """Nothing of the file is read, so that what it claims does not matter: here 2^60 tensors in 24 bytes."""
    write("model/config.json", (DEMO / "config.json").read_bytes())()
    count = (2**60).to_bytes(8, "little")
    write("model/model.gguf", b"GGUF" + (3).to_bytes(4, "little") + count * 2)()


def link(file: str, target: str) -> Spoil:
    return lambda: Path(file).symlink_to(target)


def film() -> None:
    write("film.mp4", b"never opened")()
    rows({"video": "film.mp4", "question": "what happens", "answer": "nothing"})()


# Commands that are wrong by themselves: after the colon, words that the line has, in any wording: what is wrong, what to take.
COMMANDS = f"""
: VERB
quantise: 'quantise' 'quantize'
convert ct -o new: convert export
quantize llava --sheme awq: --sheme --scheme
quantize llava --scheme: --scheme value
quantize llava extra --scheme rtn: extra --out
quantize llava --scheme Fp8 --bits 4: fp8 options.bits
quantize llava --scheme int5: int5 awq
quantize llava --set seed: --set seed key.sub=value
quantize llava --scheme rtn --set optons.bits=4: optons
quantize llava: scheme
quantize --scheme rtn: model
quantize llava --scheme rtn: -o
quantize /no/such/model --scheme rtn -o new: /no/such/model
quantize llava -o new --scheme awk: awk awq
quantize llava -o new --scheme fp8 --target a100: A100 int8
quantize {DEMO} -o new --scheme fp8 --format awq: 4-bit compressed-tensors
quantize {DEMO} -o new --scheme rtn --set mmproj=f16: mmproj GGUF
quantize llava -o new --scheme rtn --set mmproj=q4_0: mmproj q4_0 q8_0 f16
quantize llava -o new --scheme rtn --recipe /dev/zero: /dev/zero device
quantize llava -o new --scheme none --reduce learned:0.5: learned scorer
quantize llava -o new --scheme none --reduce learned:0.5,scorer=no.safetensors: no.safetensors
{GPTQ} --set options.groupsize=64: groupsize group_size
{GPTQ} --set calibrate.samples=many: samples many
{GPTQ} --set options.group_size=96: 96 model.language_model.layers.0
{GPTQ} --calib nowhere.jsonl: nowhere.jsonl
{GPTQ} -o out: out exists --overwrite
{GPTQ} -o calib.jsonl/out: calib.jsonl
{GPTQ} --set bits.budget=nan: bits.budget
{RTN} --set seed={"9" * 30}: seed
search m -o o --dataset d: --dataset --calib --data
check llava --scheme rtn --engine vlm: vlm vllm
serve o --tensor-parallel-size=2: --
serve o --prot 9: --prot --port --
serve /no/such/out: /no/such/out
serve {DEMO} --max-model-len 0: --max-model-len 0
eval out: --baseline
eval /no/such/out --baseline m: /no/such/out
{EVAL} --suite chartqa: --data
{EVAL} --suite nothing.yaml: nothing.yaml
{EVAL} --gate strickt: strickt strict
{EVAL} --gate demo --max-drop 0.01: --gate --max-drop
{EVAL} --max-drop 1.5: --max-drop 1.5
{EVAL} --engine openai:http://127.0.0.1:9/v1 --data calib.jsonl: 127.0.0.1:9
{BENCH} --load open:8: --load
{BENCH} --report calib.jsonl: calib.jsonl
doctor {DEMO} --source nothing: --source nothing
doctor {DEMO} --engine vllm --prompts 2: --prompts 2 4
doctor {DEMO} --engine vllm --source x: --source --engine
doctor {DEMO} --engine sglang: --engine sglang
report nothing -o page: nothing
report --errors out other: out other
report --errors data: data {MANIFEST}
calibrate llava -o o: calibrate quantize --calib
quantize llava -o o --scheme qronos: gptq-plus
quantize llava -o o --scheme rtn --stats s: --stats --calib
quantize llava -o o --scheme rtn --vision-attention fp8: --vision-attention leave
quantize llava -o o --scheme rtn --set calibrate.stats=s: calibrate.stats --calib
quantize llava -o o --scheme awq --set options.clip_sweeps=1: options.clip_sweeps gptq-plus
report --errors out --top 3: --json
export ct --format modelopt -o new: ModelOpt
export ct --format compressed-tensors -o new: compressed-tensors
export ct --format awq -o ct: ct
export {DEMO} -o new: quantized
export ct --format awq -o new --shard-size 1GB: --shard-size shard_size
check llava --question q: --image-size
{TOKENS} --image-size 1024x: 1024x WIDTHxHEIGHT
{TOKENS} --image-size 99999x99999: Mpx
{TOKENS} --reduce dort:0.5: dort dart
{TOKENS} --reduce fastv:0.5,layer=9: 9 2
{TOKENS} --reduce scope:0.5: scope coverage
{TOKENS} --reduce dymu:thresholds=no.json: no.json
{INSPECT}: --reduce
{INSPECT} --reduce dart-llm:0.5,layer=1: dart-llm --question
{INSPECT} --reduce dart:0.5 -o x.jpg: x.jpg .png
{INSPECT.replace("a.png", "no.png")} --reduce dart:0.5: no.png
{INSPECT.replace("a.png", "calib.jsonl")} --reduce dart:0.5: calib.jsonl PNG
{INSPECT.replace("llava", "gemma3")} --reduce fastv:0.5: gemma3 windows use
{INSPECT.replace("llava", "qwen")} --reduce visionzip:0.5: CLS
plan m --memory -5GB: --memory=
plan llava --target h10: h10 h100
plan llava --text-tokens 4000: 2,048
plan llava --tp 3: 1, 2, 4
plan llava --tp 0: --tp 0
plan llava --video 8x64: FRAMESxWIDTHxHEIGHT
plan llava --kv-cache fp-8: fp8
plan llava --tp ٣: --tp
plan llava --memory=: --memory empty
plan llava --speculative mpt: mpt mtp
plan llava --speculative mtp:x: mtp 1 100
plan llava --speculative mtp: head ngram
recover llava --reduce divprune:0.25 -o new: recover learn-reducer vlmcompress.reduction.hooks.attach
{LEARN} --text data/calib.jsonl: --text calibration
{LEARN} --samples 10: 10 16
{LEARN} --set scheme=fp8: scheme learn-reducer
{LEARN} --hidden 32: --hidden 64
{LEARN} --lr nan: --lr nan
{LEARN} --keep 0.001: keep 16
{LEARN} --keep 0.5 --to 0.5: --to --keep
{LEARN} -o new.bin: .safetensors
{LEARN} -o llava/scorer.safetensors: llava
"""

# What a format of another engine has no place for.
FORMATS = """
quantize qwen -o new --format openvino --scheme int8: weight-only
quantize qwen -o new --format openvino --scheme rtn --bits 3: 4 8
quantize qwen -o new --format openvino --scheme none --reduce divprune:0.5: divprune resize:SHARE
quantize internvl -o new --format openvino --scheme rtn: max_patches 12
quantize qwen2_vl -o new --format gguf --scheme int8: activations
quantize qwen2_vl -o new --format gguf --scheme rtn --reduce divprune:0.5: llama.cpp
quantize qwen -o new --format gguf --scheme rtn: 112
quantize granite4_vision -o new --format gguf --scheme rtn: granite4-vision
quantize qwen -o new --format mlx --scheme rtn --group-size 16: group_size 16
quantize qwen -o new --format mlx --scheme none --reduce dart:0.5: coverage divprune
quantize llava_next -o new --format mlx --scheme rtn: LlavaNextForConditionalGeneration
quantize internvl -o new --format mlx --scheme rtn: qwen3 qwen2
"""


def listed(table: str) -> Iterator[tuple[str, str]]:
    """(command, words) of each line."""
    for line in table.strip("\n").splitlines():
        command, _, words = line.rpartition(": ")
        yield command.removesuffix(":"), words


# Paths that no system takes, wherever a path stands.
PATHS = {
    f"{kind}-{place}": (link("loop", "loop") if kind == "loop" else None, [*before, path, *after], "")
    for kind, path in {"long": "x" * 5000, "nul": "a\0b", "loop": "loop"}.items()
    for place, (before, after) in {
        "model": (["quantize"], ["-o", "new", "--scheme", "rtn"]),
        "out": (["quantize", "llava", "--scheme", "rtn", "-o"], []),
        "recipe": (["quantize", "llava", "-o", "new", "--recipe"], []),
        "calib": (["quantize", "llava", "-o", "new", "--scheme", "gptq", "--calib"], []),
        "doctor": (["doctor"], []),
    }.items()
}


def about_one_image() -> None:
    """Questions that all show the same image, of which none can be held out."""
    rows = [json.dumps({"id": str(number)} | ROW | {"image": "../a.png"}) for number in range(24)]
    Path("data/calib.jsonl").write_text("\n".join(rows))


TEXT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SCHEMA = "config.json vlmcompress.schema 99 upgrade"
MLX = {"bits": 4, "group_size": 64}
SPLIT = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
RECIPE = "quantize llava -o new --recipe r.yaml"

FILES: dict[str, tuple[Spoil, str | list[str], str]] = {
    # a model
    "missing model": (lambda: shutil.rmtree("llava"), GPTQ, "llava"),
    "empty model": (lambda: [shutil.rmtree("llava"), os.mkdir("llava")], GPTQ, "llava empty"),
    "not a vlm": (write(CONFIG, '{"model_type": "llama", "hidden_size": 8}'), GPTQ, "llama vision-language"),
    "truncated weights": (cut(WEIGHTS, -100), GPTQ, WEIGHTS),
    "pickled weights": (lambda: os.rename(WEIGHTS, "llava/pytorch_model.bin"), GPTQ, "safetensors"),
    "nan in weights": (nan_in_weights, GPTQ, "lm_head NaN"),
    "one image": (about_one_image, "draft qwen --calib data/calib.jsonl -o new --engine hf", "24 too few images"),
    "nan in answers": (answers_of_nan, f"{LEARN} --steps 12 --every 4", "logits NaN"),
    "layers for tokens": (edit(CONFIG, text_config__num_hidden_layers=HUGE), TOKENS, "num_hidden_layers 1,024"),
    "more layers than tensors": (edit(CONFIG, text_config__num_hidden_layers=900), RTN, "num_hidden_layers 900 80"),
    "more weights than files": (edit(CONFIG, text_config__vocab_size=1 << 24), RTN, "config.json 16777216"),
    "size in words": (edit(CONFIG, text_config__hidden_size="big"), RTN, "'hidden_size' 'big'"),
    "key twice": (begin(CONFIG, '"model_type": "llava",'), RTN, "'model_type' twice"),
    "key twice to serve": (begin("out/config.json", '"model_type": "llava",'), "serve out", "'model_type' twice"),
    "huge images": (edit(PROCESSOR, image_processor__size={"shortest_edge": HUGE}), TOKENS, "shortest_edge"),
    "endless license": (link("llava/LICENSE", "/dev/zero"), RTN, "LICENSE device"),
    # headers of weights
    "nested header": (header(NESTED), RTN, WEIGHTS),
    "metadata that are no object": (header('{"__metadata__":{"format":1}}'), RTN, WEIGHTS),
    "shape of letters": (header('{"a":{"dtype":"F32","shape":"ab","data_offsets":[0,8]}}'), RTN, WEIGHTS),
    # files nested so deep that a parser would end the process
    "nested config": (begin(CONFIG, f'"x": {NESTED}, '), RTN, "config.json"),
    "nested manifest": (begin(f"out/{MANIFEST}", f'"x": {NESTED}, '), "report --errors out", MANIFEST),
    "nested report": (write("r.json", f'{{"x": {NESTED}}}'), "report r.json", "r.json"),
    "nested rows": (begin("calib.jsonl", f'"x": {NESTED}, '), GPTQ, "calib.jsonl"),
    "nested messages": (rows({"image": "a.png", "messages": NESTED}), GPTQ, "calib.jsonl messages nested"),
    "nested reducer": (lambda: None, [*RTN.split(), "--reduce", f"dart:keep={NESTED}"], "keep= recursion"),
    # tokenizer, processor, chat template
    "tokenizer": (edit("llava/tokenizer.json", pre_tokenizer=SPLIT), TOKENS, "llava processor tokenizer"),
    "vocabulary": (edit("llava/tokenizer.json", model__vocab={"a": HUGE}), TOKENS, "llava processor tokenizer"),
    "patch of nothing": (edit(PROCESSOR, patch_size=0), TOKENS, "processor"),
    "crop in words": (edit(PROCESSOR, image_processor__crop_size={"height": "x", "width": [1]}), TOKENS, "processor"),
    # calibration data and recipes
    "empty rows": (write("calib.jsonl", ""), GPTQ, "calib.jsonl"),
    "no columns": (rows({"pixels": "a.png"}), GPTQ, "calib.jsonl question"),
    "truncated image": (cut("a.png", 200), GPTQ, "a.png"),
    "decompression bomb": (lambda: Image.new("1", (14_000, 14_000)).save("a.png"), GPTQ, "a.png large shrink"),
    "endless image": (rows({"image": "/dev/zero", "question": "q"}), GPTQ, "/dev/zero device"),
    "longer than the context": (rows(ROW | {"question": "word " * 5000}), GPTQ, "tokens"),
    "video for a family without": (film, GPTQ, "calib.jsonl video images"),
    "video for a reducer": (film, f"{GPTQ} --reduce uniform:0.5", "calib.jsonl video drop"),
    "texts to learn from": (rows(*[TEXT] * 30, file="data/calib.jsonl"), LEARN, "calib.jsonl images"),
    "file to learn into": (write("new.safetensors", "mine"), LEARN, "new.safetensors --ov"),
    "folder to learn into": (lambda: os.mkdir("new.safetensors"), f"{LEARN} --overwrite", "new.safetensors folder"),
    "file of others to learn into": (
        lambda: save_file({"a": torch.ones(2)}, "new.safetensors"),
        f"{LEARN} --overwrite",
        "new.safetensors scorer",
    ),
    "recipe in itself": (write("r.yaml", "scheme: rtn\noptions: &a\n  bits: *a\n"), RECIPE, "itself"),
    "recipe from nobody": (lambda: os.mkfifo("r.yaml"), RECIPE, "r.yaml pipe"),
    # checkpoints and manifests
    "manifest of other weights": (
        edit(f"out/{MANIFEST}", **{"files__model.safetensors__sha256": "0" * 64}),
        "report --errors out",
        "model.safetensors changed",
    ),
    "manifest without files": (edit(f"out/{MANIFEST}", files=None), "report --errors out", f"{MANIFEST} files"),
    "errors of nothing": (manifest({}), "report --errors new2", "new2 layer"),
    "errors in words": (manifest({LAYER: {"text": "much"}}), "report --errors new2", "text number"),
    "newer reducer to eval": (newer_reducer, f"eval tampered --baseline {DEMO}", SCHEMA),
    "newer reducer to serve": (newer_reducer, "serve tampered", SCHEMA),
    "doctor of another kind": (of_another_kind, "doctor model --engine vllm", "bert vision-language"),
    "MLX by its config alone": (edit(CONFIG, quantization=MLX), "export llava -o new", "quantized config"),
    "MLX to bench": (edit(CONFIG, quantization=MLX), "bench llava --baseline llava", "MLX vlmcompress serve llava"),
    "broken gguf": (broken_gguf, "export model -o new", "GGUF"),
    # evaluation
    "no samples": (write("data.jsonl", ""), f"{EVAL} --data data.jsonl", "data.jsonl"),
    "repeated ids": (
        rows(ROW | {"id": "twice"}, ROW | {"id": "twice", "question": "and this"}),
        f"{EVAL} --data calib.jsonl",
        "calib.jsonl twice",
    ),
    "no answers": (rows(ROW, ROW | {"answer": ""}), f"{EVAL} --data calib.jsonl", "calib.jsonl answer"),
    "gate with an unknown key": (
        write("gate.yaml", "suites: {world: {margn: 0.01}}\n"),
        f"{EVAL} --gate gate.yaml",
        "suites.world.margn margin",
    ),
    "report of another version": (write("results.json", '{"schema": 1}'), f"eval {DEMO} --baseline .", "schema 1 2"),
    "report of garbage": (write("results.json", "{]"), "report . -o page", "results.json"),
}
CASES: dict[str, tuple[Spoil | None, str | list[str], str]] = {
    **FILES,
    **{command.replace(str(DEMO), "DEMO"): (None, command, words) for command, words in listed(COMMANDS)},
    **{
        command: (partial(tiny.build, family, family) if family not in ("qwen", "llava") else None, command, words)
        for command, words in listed(FORMATS)
        for family in [command.split()[1]]
    },
    **PATHS,
}


def state(folder: Path) -> dict[Path, tuple]:
    """What is in a folder: kind, size and time of last change of each file; but for work that the next run continues."""
    stats = {path: path.lstat() for path in folder.rglob("*") if "/.new" not in str(path)}
    return {p: (s.st_mode, *((s.st_size, s.st_mtime_ns) if p.is_file() else ())) for p, s in stats.items()}


@pytest.fixture(scope="module")
def unspoilt(original, tmp_path_factory) -> Path:
    """A copy for the commands that are wrong by themselves: each leaves it as it is."""
    return shutil.copytree(original, tmp_path_factory.mktemp("unspoilt") / "it").parent


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_ends_in_one_line(name, original, unspoilt, tmp_path, capfd, monkeypatch):
    spoil, command, words = CASES[name]
    place = tmp_path if spoil else unspoilt
    folder = shutil.copytree(original, place / "it") if spoil else place / "it"
    monkeypatch.chdir(folder)
    monkeypatch.delenv("VLMCOMPRESS_DATA", raising=False)
    if spoil:
        spoil()
    before = state(place)
    arguments = command.split() if isinstance(command, str) else command
    assert cli.main(arguments) == 2
    output = capfd.readouterr()
    lines = [line for line in output.err.splitlines() if line.strip()]
    if "doctor" in arguments and not output.err:
        assert "PROBLEM" in output.out
    else:
        assert output.out == "" and len(lines) == 1 and lines[0].startswith("error: "), output.err
        assert not [word for word in words.split() if word not in lines[0]] and len(lines[0]) < 2100, lines[0]
    assert state(place) == before


def test_doctor_exits_with_2_where_a_folder_is_broken(original, tmp_path, capfd):
    shutil.copytree(original / "out", tmp_path / "out")
    assert cli.main(["doctor", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "model.safetensors").write_bytes(b"x")
    assert cli.main(["doctor", str(tmp_path / "out")]) == 2
    assert not all(check.ok for check in doctor.diagnose(tmp_path / "out"))


def test_names_stay_names_in_the_card(original, tmp_path):
    """A folder's name is no id in the header and one line of the text, whatever it is."""
    for number, name in enumerate(("x\nlicense: mit\ntags: [official]", "null", "a: b # c", "<b>`x`", "plain-7b.v1")):
        shutil.copytree(original / "llava", tmp_path / name)
        out = tmp_path / f"o{number}"
        assert cli.main(["quantize", str(tmp_path / name), "-o", str(out), "--scheme", "rtn"]) == 0
        card = (out / "README.md").read_text()
        header = yaml.safe_load(card.split("---\n")[1])
        assert header["tags"] == ["vlmcompress", "vllm", "compressed-tensors", "4-bit"]
        assert set(header) == {"quantized_by", "library_name", "pipeline_tag", "tags"}
        assert "<b>" not in card.replace("\\<b\\>", "").split("---\n", 2)[2]
    assert "\n\nplain-7b.v1 (" in card


@pytest.mark.parametrize("mode", ["CMYK", "P", "L", "RGBA", "I;16"])
def test_every_kind_of_image_calibrates(mode, original, tmp_path):
    """CMYK, palette, grey, transparent and 16-bit images, one pixel and EXIF-rotated: all usable."""
    folder = tmp_path / "it"
    shutil.copytree(original, folder)
    image = Image.new(mode, (1, 1) if mode == "L" else (40, 30))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "image.tiff", **({"exif": exif} if mode == "RGBA" else {}))
    (folder / "calib.jsonl").write_text(json.dumps({"image": "image.tiff", "question": "q", "answer": "red"}) + "\n")
    arguments = ["quantize", str(folder / "llava"), "-o", str(folder / "new"), "--scheme", "gptq"]
    assert cli.main([*arguments, "--calib", str(folder / "calib.jsonl")]) == 0
    assert (folder / "new" / "vlmcompress.json").is_file()
