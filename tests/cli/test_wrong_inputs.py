"""Wrong arguments, broken files and files of strangers: exit code 2, one line that says what to do, soon, nothing written.

A row of `CASES` is (what spoils the folder in which the command runs, the command, a pattern of the line). The folder has tiny
models (`llava`, `qwen`, `gemma3`), the checkpoints `out` and `other` of two of them, `ct` of demo-llava in compressed-tensors,
`a.png` and `calib.jsonl` of one row with it, and `data/calib.jsonl` of 24.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
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
RECOVER = "recover llava --calib data/calib.jsonl -o new"
LEARN = "learn-reducer llava --calib data/calib.jsonl -o new.safetensors"
INSPECT = "inspect llava --image a.png -o new.png"
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


def append(file: str, text: str) -> Spoil:
    return lambda: Path(file).write_text(Path(file).read_text() + text)


def each(command: str, messages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The command with each of some flags, and the message that these get."""
    for flags, message in messages.items():
        yield f"{command} {flags}", message


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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def commands() -> Iterator[tuple[str, str]]:
    """Commands that are wrong by themselves, and what is said."""
    yield "", "vlmcompress: missing VERB"
    yield "quantise", "no 'quantise'; did you mean 'quantize'"
    yield "list scheme", "no 'scheme'; did you mean 'schemes'"
    yield from each(
        "quantize",
        {
            "llava --sheme awq": "takes no '--sheme'; did you mean '--scheme'",
            "llava --scheme": "--scheme needs a value",
            "llava --dataset d": r"takes no '--dataset'; did you mean '--calib'\?",
            "llava --scheme rtn --tp 0": "--tp 0 is not a number of devices; give 1 or more",
            "llava --frobnicate": "takes no '--frobnicate'; see vlmcompress quantize --help",
            "llava --scheme Fp8 --bits 4": "scheme 'fp8' has no options, got 'options.bits'; remove it",
            "llava --scheme rtn --bits four": "--bits: invalid int value: 'four'",
            "llava --scheme int5": "unknown scheme 'int5'; choose from awq, fp8",
            "llava extra --scheme rtn": "takes no 'extra'",
            "llava --samples many": "argument --samples: invalid int value: 'many'",
            "llava --set seed": "--set seed is not of the form key.sub=value",
            "llava --scheme gptqq": "unknown scheme 'gptqq'; did you mean 'gptq'",
            "llava --scheme rtn --set optons.bits=4": "command line: unknown key 'optons'",
            "llava": "no scheme given",
            "--scheme rtn": "no model given",
            "llava --target a100 --scheme fp8": "A100 80GB has no FP8 tensor cores",
            "/no/such/model --scheme rtn -o new": "does not exist",
            "llava --scheme rtn": "no output folder given; add -o OUT",
            "llava -o new --scheme awk": "did you mean 'awq'",
            "llava -o new --scheme rtn --target h10": "did you mean 'h100'",
            "llava -o new --scheme fp8 --target a100": "A100.*int8",
            f"{DEMO} -o new --scheme fp8 --format awq": "4-bit integer weights",
            f"{DEMO} -o new --scheme=rtn --format=gptq --set options.symmetric=false": "symmetric weights only",
            f"{DEMO} -o new --scheme rtn --format awq --kv-cache fp8": "no scales of an FP8 KV cache",
            f"{DEMO} -o new --scheme rtn --set mmproj=f16": "mmproj is the type of GGUF's tower.*; leave it out",
            "llava -o new --scheme rtn --set mmproj=q4_0": "mmproj is \"q4_0\", it should be 'q8_0' or 'f16'",
            "llava -o new --scheme rtn --recipe /dev/zero": "cannot read recipe /dev/zero: it is a device",
            "llava -o new --scheme none --reduce learned:0.5": "'learned' has no scorer; train one with",
            "llava -o new --scheme none --reduce learned:0.5,scorer=no.safetensors": "cannot read scorer no.safetensors",
        },
    )
    yield from each(
        GPTQ,
        {
            "--set options.groupsize=64": "group_size",
            "--set calibrate.samples=many": "samples",
            "--set options.group_size=96": r"96 does not divide.*model\.language_model\.layers\.0",
            "--calib nowhere.jsonl": "nowhere",
            "-o out": "exists",
            "-o calib.jsonl/out": "cannot write|not a folder",
            "--set bits.budget=nan": "bits.budget is .*should be",
            "--set bits.budget=.inf": "bits.budget is .*should be",
            "--set bits.budget=-1": "bits.budget is .*should be greater than 0",
        },
    )
    for key in ("seed", "calibrate.samples", "calibrate.max_length"):
        yield f"{RTN} --set {key}={'9' * 30}", f"{key} is 9{{30}}, it should be less than or equal to"
    yield "search m -o o --dataset d", r"takes no '--dataset'; did you mean '--calib' or '--data'\?"
    yield "check llava --scheme rtn --engine vlm", "unknown engine 'vlm'; did you mean 'vllm'"
    yield from each(
        "serve",
        {
            "o --tensor-parallel-size=2": "flags of vllm serve go after --, as in vlmcompress serve OUT -- --tens",
            "o --prot 9": r"did you mean '--port'\? Flags of vllm serve go after --",
            "/no/such/out": "no such checkpoint",
            f"{DEMO} --max-model-len 0": "--max-model-len is 0",
            f"{DEMO} --port 99999": "--port 99999 is no port",
        },
    )
    yield "eval out", "missing --baseline"
    yield "eval out --baseline llava --limit 0", "--limit is 0"
    yield "eval /no/such/out --baseline m", "no such checkpoint"
    yield from each(
        EVAL,
        {
            "--suite chartqq": "no suite is called 'chartqq', here or in lm-eval; did you mean 'chartqa'",
            "--suite chartqa": r"VLMCOMPRESS_DATA|--data",
            "--suite nothing.yaml": "suite .*nothing.yaml does not exist",
            "--engine vlm": "unknown engine 'vlm'; did you mean 'vllm'",
            "--gate strickt": "no bundled gate is called 'strickt'; did you mean 'strict'",
            "--gate demo --max-drop 0.01": "--gate and --max-drop exclude each other",
            "--max-drop 1.5": "--max-drop 1.5 is not a share",
            f"--engine openai:http://127.0.0.1:{free_port()}/v1 --data calib.jsonl": "no server answers at",
        },
    )
    yield f"{BENCH} --load open:8", "--load"
    yield f"{BENCH} --requests 0", "--requests 0: must be from 1 to"
    yield f"{BENCH} --report calib.jsonl", "calib.jsonl.*(Not a directory|File exists)"
    yield f"bench nothing --baseline {DEMO}", "no such checkpoint folder"
    yield from each(
        f"doctor {DEMO}",
        {
            "--source nothing": "--source .*nothing is not a folder",
            "--engine vllm --prompts 2": "--prompts is 2; take at least 4",
            "--engine vllm --source x": "--source is for examining files; leave out --engine vllm",
            "--engine sglang": "--engine: no 'sglang'",
            "--prompts 9": "--prompts is for the check in an engine; add --engine vllm",
        },
    )
    yield "report nothing -o page", "nothing"
    yield from each(
        "export",
        {
            "ct --format awk -o new": "unknown format 'awk'; did you mean 'awq'",
            "ct --format modelopt -o new": "ModelOpt files hold",
            "ct --format fp8 -o new": "can only be read",
            "ct --format compressed-tensors -o new": "is already compressed-tensors",
            "ct --format awq -o ct": "is inside the source model",
            f"{DEMO} -o new": "is not quantized",
            "nothing -o new": "does not exist",
            "ct --format awq --mmproj f16 -o new": "mmproj is the type of GGUF's tower",
            "ct --format awq -o new --shard-size many": "shard_size",
        },
    )
    yield "convert ct -o new", "no verb 'convert' any more; type vlmcompress export MODEL -o NEW"
    yield "report --errors out other", "out is a .* model and other a .* model"
    yield "report --errors data", f"has no {MANIFEST}"
    yield "report --errors out --top -1", "--top is -1"
    yield "calibrate llava -o o", "there is no verb 'calibrate' any more; type vlmcompress quantize MODEL --calib"
    yield "quantize llava -o o --scheme qronos", "take gptq-plus"
    yield f"{RTN} --set calibrate.stats=s", "there is no key 'calibrate.stats' any more; name the samples"
    yield (
        "quantize llava -o o --scheme awq --set options.clip_sweeps=1",
        "there is no option 'options.clip_sweeps' any more",
    )
    yield "check llava --question q", "give their --image-size"
    yield from each(
        TOKENS,
        {
            "--image-size 1024x": "--image-size 1024x is not a size; write it WIDTHxHEIGHT",
            "--image-size 0x5": "is not a size",
            "--image-size 99999x99999": "9999.8 Mpx",
            "--reduce dart:0": "keep must be a number above 0",
            "--reduce dort:0.5": "did you mean 'dart'",
            "--reduce fastv:0.5,layer=9": "layer 9 is none of the language model's 2",
            "--reduce scope:0.5": "there is no reducer 'scope' any more; take coverage",
            "--reduce dyrate": "--reduce dyrate",
            "--reduce dymu:thresholds=no.json": r"no.json is not readable \(No such file",
            "--kv-cache fp4": "--kv-cache fp4: no such type",
        },
    )
    yield INSPECT, "missing --reduce"
    yield from each(
        INSPECT,
        {
            "--reduce dart:2": "keep must be a number above 0 and at most 1, got 2",
            "--reduce relevance:0.5": "'relevance' is query-aware; add --question",
            "--reduce dart:0.5 -o x.jpg": "--out x.jpg is a picture; name it FILE.png",
            "--reduce dart:0.5 --image no.png": "no.png' cannot be read",
            "--reduce dart:0.5 --image calib.jsonl": "is not an image in one of JPEG, PNG",
            "--reduce fastv:0.5,layer=7": "layer 7 is none of the language model's 2",
        },
    )
    attention = "those of gemma3 have attention in windows, and both ways within an image; use "
    yield f"{INSPECT} --reduce fastv:0.5".replace("llava", "gemma3"), attention
    yield f"{INSPECT} --reduce visionzip:0.5".replace("llava", "qwen"), "CLS"
    yield "plan m --target a100-80gb", r"unknown target 'a100-80gb'; did you mean 'a100'\?"
    yield "plan m --target rtx4080", "unknown target 'rtx4080'; choose from a100, a100-40gb"
    yield "plan m --memory -5GB", "--memory needs a value; one that begins with '-' is written --memory=-..."
    yield from each(
        PLAN,
        {
            "--target h10": "did you mean 'h100'",
            "--text-tokens 4000": "the model takes 2,048",
            "--tp 3": "use one of 1, 2, 4",
            "--tp 0": "--tp 0",
            "--image-size 1024x": "WIDTHxHEIGHT",
            "--image-size 0x5": "WIDTHxHEIGHT",
            "--image-size 99999x99999": "more than 50",
            "--video 8x64": "FRAMESxWIDTHxHEIGHT",
            "--images-per-request -1": "--images-per-request -1",
            "--out-tokens 0": "--out-tokens 0",
            "--kv-cache fp-8": "did you mean 'fp8'",
            "--memory lots": "not a size",
            "--memory ٣": "--memory '٣' is not a size",
            "--tp ٣": "--tp: invalid int value",
            "--memory=": "--memory has an empty value",
            "--kv-cache-memory=": "--kv-cache-memory has an empty value",
            "--reduce=": "--reduce has an empty value",
            "--reduce darts:0.5": "did you mean 'dart'",
            "--reduce fastv:0.5": "--reduce fastv",
            "--speculative mpt": "did you mean 'mtp'",
            "--speculative mtp:x": "a number from 1 to 100",
            "--speculative mtp": "the model has no draft head; use ngram",
        },
    )
    yield RECOVER, "recover: nothing to recover from; say with --reduce"
    yield f"{RECOVER} --reduce fastv:0.5,layer=1", "'fastv'"
    yield f"{RECOVER} --reduce dymu:0.5 --train tower", "--train tower: dymu:0.5 merges tokens within the tower"
    yield from each(
        f"{RECOVER} --reduce divprune:0.25",
        {
            "--train projektor": r"--train: no part 'projektor'; did you mean 'projector'\?",
            "--steps 0": "--steps is 0; it should be at least 1",
            "--lr -1": "--lr is -1; it should be above 0",
            "--text data/calib.jsonl": "--text is for calibration",
            "--samples 10": "gives 10 samples with images; training needs at least 16",
            "--set scheme=fp8": "--set scheme: no such key of recover",
            "-o out": "exists; choose another folder or pass --overwrite",
        },
    )
    quantized = f"{RECOVER} --reduce divprune:0.25".replace("llava", "out")
    yield quantized, "is quantized already; recover the 16-bit original, then quantize"
    yield from each(
        LEARN,
        {
            "--keep 0": "keep must be a number above 0",
            "--keep 1": "--keep is 1; it should be above 0 and below 1",
            "--steps 0": "--steps is 0; it should be at least 1",
            "--hidden 4096": "--hidden is 4096; it should be at most 1024",
            "--lr 2": "--lr is 2; it should be above 0 and below 1",
            "--lr nan": "--lr is nan; it should be above 0 and below 1",
            "--keep 0.001": "of these images, of at most 16 tokens, is less than one, so they would be kept whole; give",
            "--keep 0.25,cover=1": "keep is '0.25,cover=1', should be a number",
            "--keep half": "--keep half: 'learned': keep is 'half', should be a number",
            "--keep auto": "--keep auto: training needs a share",
            "--keep 0.5 --to 0.5": "--to is 0.5; it should be above --keep, 0.5, and below 1",
            "--samples 10": "training needs at least 16",
            "--set kv_cache=fp8": "--set kv_cache: no such key of learn-reducer",
            "--text data/calib.jsonl": "--text is for calibration",
            "-o new.bin": "ends in .safetensors",
            f"-o {WEIGHTS} --overwrite": "is inside the source model",
            "-o llava/scorer.safetensors": "is inside the source model",
        },
    )


def formats() -> Iterator[tuple[str, str, str]]:
    """What a format of another engine has no place for: family, command, and what is said."""
    for form, family, flags, message in (
        ("openvino", "qwen", "--scheme int8", "use a weight-only scheme"),
        ("openvino", "qwen", "--scheme rtn --bits 3", "integer weights of 4 or 8 bits"),
        ("openvino", "qwen", "--scheme rtn --kv-cache fp8", "leave out kv_cache"),
        ("openvino", "qwen", "--scheme none --reduce divprune:0.5", "supports only the reducer cdpruner"),
        ("openvino", "qwen", "--scheme none --reduce cdpruner:1/3", "drops whole percents"),
        ("openvino", "llava", "--scheme none --reduce cdpruner:0.5", "drops no visual tokens of the family llava"),
        ("openvino", "internvl", "--scheme rtn", "max_patches = 12, the processor by 4"),
        ("openvino", "glm4v", "--scheme rtn", "does not support the family glm4v"),
        ("gguf", "qwen2_vl", "--scheme int8", "activations"),
        ("gguf", "qwen2_vl", "--scheme rtn --reduce divprune:0.5", "llama.cpp does not support"),
        ("gguf", "qwen", "--scheme rtn", "112 pixels"),
        ("gguf", "glm4v", "--scheme rtn", "does not support the family glm4v"),
        ("mlx", "qwen", "--scheme rtn --group-size 16", "not for group_size 16"),
        ("mlx", "qwen", "--scheme rtn --bits 7", "8 bits, not of 7"),
        ("mlx", "qwen", "--scheme int8", "use a weight-only scheme"),
        ("mlx", "qwen", "--scheme rtn --kv-cache fp8", "leave out kv_cache"),
        ("mlx", "qwen", "--scheme none --reduce dart:0.5", "MLX runs coverage, divprune, pool, uniform alone"),
        ("mlx", "llava_next", "--scheme rtn", "no class for LlavaNextForConditionalGeneration"),
        ("mlx", "internvl", "--scheme rtn", "a decoder of the type qwen3, not qwen2"),
    ):
        yield family, f"quantize {family} -o new --format {form} {flags}", message


def paths() -> Iterator[tuple[str, Spoil | None, list[str]]]:
    """Paths that no system takes, wherever a path stands."""
    for kind, path in {"long": "x" * 5000, "nul": "a\0b", "loop": "loop"}.items():
        for place, command in {
            "model": ["quantize", path, "-o", "new", "--scheme", "rtn"],
            "out": ["quantize", "llava", "-o", path, "--scheme", "rtn"],
            "recipe": ["quantize", "llava", "-o", "new", "--recipe", path],
            "calib": ["quantize", "llava", "-o", "new", "--scheme", "gptq", "--calib", path],
            "tokens": ["check", path, "--image-size", "56x56"],
            "doctor": ["doctor", path],
        }.items():
            yield f"{kind}-{place}", link("loop", "loop") if kind == "loop" else None, command


TEXT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
VIDEO = "calib.jsonl line 1 shows a video, "
SCHEMA = "tampered: config.json: vlmcompress.schema is 99.*upgrade it"
SPLIT = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
RECIPE = "quantize llava -o new --recipe r.yaml"

FILES: dict[str, tuple[Spoil, str | list[str], str]] = {
    # a model
    "missing model": (lambda: shutil.rmtree("llava"), GPTQ, "does not exist|no such folder|not a folder"),
    "empty model": (lambda: [shutil.rmtree("llava"), os.mkdir("llava")], GPTQ, "empty|config.json"),
    "not a vlm": (write(CONFIG, '{"model_type": "llama", "hidden_size": 8}'), GPTQ, "not a vision-language model"),
    "truncated weights": (cut(WEIGHTS, -100), GPTQ, "truncated|shorter|bytes"),
    "pickled weights": (lambda: os.rename(WEIGHTS, "llava/pytorch_model.bin"), GPTQ, "safetensors"),
    "nan in weights": (nan_in_weights, GPTQ, "lm_head|NaN"),
    "nan in answers": (answers_of_nan, f"{LEARN} --steps 12 --every 4", "the model's logits hold NaN"),
    "layers for tokens": (
        edit(CONFIG, text_config__num_hidden_layers=HUGE),
        TOKENS,
        "num_hidden_layers is 1,000,000,000,000, more than the 1,024",
    ),
    "more layers than tensors": (
        edit(CONFIG, text_config__num_hidden_layers=900),
        RTN,
        "num_hidden_layers is 900, and the weight files hold 80 tensors",
    ),
    "more weights than files": (
        edit(CONFIG, text_config__vocab_size=1 << 24),
        RTN,
        r"config.json asks for \[16777216, 128\]; one of the two is of another model",
    ),
    "other shapes": (
        edit(CONFIG, text_config__intermediate_size=384),
        f"{RTN} --dry-run",
        "has shape .*one of the two is of another model",
    ),
    "size in words": (
        edit(CONFIG, text_config__hidden_size="big"),
        RTN,
        r"field 'hidden_size': TypeError: .* expected int, got str \(value: 'big'\)\); restore",
    ),
    "key twice": (begin(CONFIG, '"model_type": "llava",'), RTN, "key 'model_type' is given twice"),
    "key twice to serve": (begin("out/config.json", '"model_type": "llava",'), "serve out", "'model_type' is given tw"),
    "huge images": (
        edit(PROCESSOR, image_processor__size={"shortest_edge": HUGE}),
        TOKENS,
        "image_processor.size.shortest_edge is 1,000,000,000,000",
    ),
    "endless license": (link("llava/LICENSE", "/dev/zero"), RTN, "LICENSE is a device, a pipe or a link"),
    "license nowhere": (link("llava/LICENSE", "nowhere"), RTN, "LICENSE is a device, a pipe or a link"),
    # headers of weights
    "nested header": (header(NESTED), RTN, "not a complete safetensors file"),
    "metadata that are no object": (header('{"__metadata__":{"format":1}}'), RTN, "not a complete safetensors file"),
    "shape of letters": (
        header('{"a":{"dtype":"F32","shape":"ab","data_offsets":[0,8]}}'),
        RTN,
        "not a complete safetensors file",
    ),
    # files nested so deep that a parser would end the process
    "nested config": (begin(CONFIG, f'"x": {NESTED}, '), RTN, "not (a )?(readable|valid)"),
    "nested manifest": (
        begin(f"out/{MANIFEST}", f'"x": {NESTED}, '),
        "report --errors out",
        "not (a )?(readable|valid)",
    ),
    "nested report": (write("r.json", f'{{"x": {NESTED}}}'), "report r.json", "not (a )?(readable|valid)"),
    "nested rows": (begin("calib.jsonl", f'"x": {NESTED}, '), GPTQ, "not (a )?(readable|valid)"),
    "nested messages": (rows({"image": "a.png", "messages": NESTED}), GPTQ, "messages is not valid JSON .*nested"),
    "nested reducer": (
        lambda: None,
        [*RTN.split(), "--reduce", f"dart:keep={NESTED}"],
        r"keep=\[\[.*\.\.\. \(200,[0-9]+ characters\) \.\.\. .*maximum recursion",
    ),
    # tokenizer, processor, chat template
    **{
        f"tokenizer {key}": (
            edit("llava/tokenizer.json", **{key: value}),
            TOKENS,
            "llava has no usable processor .*; copy the tokenizer",
        )
        for key, value in {
            "pre_tokenizer": SPLIT,
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            "model__vocab": {"a": HUGE},
        }.items()
    },
    **{
        f"processor {key}": (edit(PROCESSOR, **{key: value}), TOKENS, "the model's processor refuses it")
        for key, value in {
            "patch_size": 0,
            "image_processor__rescale_factor": 0,
            "image_processor__resample": 99,
            "image_processor__crop_size": {"height": "x", "width": [1]},
        }.items()
    },
    # calibration data and recipes
    "empty rows": (write("calib.jsonl", ""), GPTQ, "empty|no rows|no samples"),
    "no columns": (rows({"pixels": "a.png"}), GPTQ, "column|question"),
    "truncated image": (cut("a.png", 200), GPTQ, "a.png"),
    "decompression bomb": (lambda: Image.new("1", (14_000, 14_000)).save("a.png"), GPTQ, "is too large .*shrink it"),
    "endless image": (
        rows({"image": "/dev/zero", "question": "q"}),
        GPTQ,
        "'?image '/dev/zero' cannot be read: it is a device",
    ),
    "longer than the context": (rows(ROW | {"question": "word " * 5000}), GPTQ, "tokens"),
    "video for a family without": (film, GPTQ, f"{VIDEO}which LlavaProcessor does not take; give images in its place"),
    "video for a reducer": (
        film,
        f"{GPTQ} --reduce uniform:0.5",
        f"{VIDEO}and reducers learn and are calibrated from images; drop the row",
    ),
    "texts to recover": (
        rows(*[TEXT] * 30, file="data/calib.jsonl"),
        f"{RECOVER} --reduce divprune:0.25",
        "has no images; training needs questions about images",
    ),
    "texts to learn from": (rows(*[TEXT] * 30, file="data/calib.jsonl"), LEARN, "has no images"),
    "file to learn into": (
        write("new.safetensors", "mine"),
        LEARN,
        "exists already; choose another name, or add --ov",
    ),
    "folder to learn into": (lambda: os.mkdir("new.safetensors"), f"{LEARN} --overwrite", "is a folder"),
    "file of others to learn into": (
        lambda: save_file({"a": torch.ones(2)}, "new.safetensors"),
        f"{LEARN} --overwrite",
        "is not a scorer, so it is not overwritten",
    ),
    "recipe in itself": (write("r.yaml", "scheme: rtn\noptions: &a\n  bits: *a\n"), RECIPE, "holds itself"),
    "recipe from nobody": (lambda: os.mkfifo("r.yaml"), RECIPE, "cannot read recipe .*pipe"),
    # checkpoints and manifests
    "manifest of other weights": (
        edit(f"out/{MANIFEST}", **{"files__model.safetensors__sha256": "0" * 64}),
        "report --errors out",
        "model.safetensors has changed since it was written",
    ),
    "another config": (
        edit("out/config.json", image_seq_length=17),
        "report --errors out",
        "config.json has changed",
    ),
    "manifest without files": (edit(f"out/{MANIFEST}", files=None), "report --errors out", "files should be an object"),
    "errors of nothing": (manifest({}), "report --errors new2", "no decoder layer of"),
    "errors in words": (manifest({LAYER: {"text": "much"}}), "report --errors new2", "text should be a valid number"),
    "errors in a list": (manifest([1]), "report --errors new2", "errors should be an object"),
    "config of a list": (write("config.json", "[1]"), "serve .", "config.json: content should be an object"),
    "newer reducer to eval": (newer_reducer, f"eval tampered --baseline {DEMO}", SCHEMA),
    "newer reducer to bench": (newer_reducer, f"bench tampered --baseline {DEMO}", SCHEMA),
    "newer reducer to serve": (newer_reducer, "serve tampered", SCHEMA),
    "doctor of another kind": (
        of_another_kind,
        "doctor model --engine vllm",
        "type .bert. is not a vision-language model",
    ),
    "MLX by its config alone": (
        edit("llava/config.json", quantization={"bits": 4, "group_size": 64}),
        "export llava -o new",
        "no linear layer is quantized as the config says",
    ),
    "MLX to bench": (
        edit("llava/config.json", quantization={"bits": 4, "group_size": 64}),
        "bench llava --baseline llava",
        "is for MLX, whose server counts .* vlmcompress serve llava writes",
    ),
    "broken gguf": (broken_gguf, "export model -o new", "has GGUF files, which are written and not read"),
    # evaluation
    "no samples": (write("data.jsonl", ""), f"{EVAL} --data data.jsonl", "data.jsonl.*(empty|no samples)"),
    "repeated ids": (
        rows(ROW | {"id": "twice"}, ROW | {"id": "twice", "question": "and this"}),
        f"{EVAL} --data calib.jsonl",
        "'twice'|ids repeat|same id",
    ),
    "no answers": (rows(ROW, ROW | {"answer": ""}), f"{EVAL} --data calib.jsonl", "has no answer"),
    "missing image": (rows(ROW, ROW | {"image": "gone.png"}), f"{EVAL} --data calib.jsonl", "gone.png"),
    "gate with an unknown key": (
        write("gate.yaml", "suites: {world: {margn: 0.01}}\n"),
        f"{EVAL} --gate gate.yaml",
        "unknown key 'suites.world.margn'; did you mean 'margin'",
    ),
    "report of another version": (
        write("results.json", '{"schema": 1}'),
        f"eval {DEMO} --baseline .",
        "schema 1, this version reads 2",
    ),
    "report of garbage": (write("results.json", "{]"), "report . -o page", "is not readable JSON"),
}
CASES: dict[str, tuple[Spoil | None, str | list[str], str]] = {
    **FILES,
    **{command[:80] or "no verb": (None, command, message) for command, message in commands()},
    **{
        command: (None if family in ("qwen", "llava") else partial(tiny.build, family, family), command, message)
        for family, command, message in formats()
    },
    **{name: (spoil, command, "") for name, spoil, command in paths()},
}


def state(folder: Path) -> dict[Path, tuple]:
    """What is in a folder: kind, size and time of last change of each file; but for work that the next run goes on with."""
    stats = {path: path.lstat() for path in folder.rglob("*") if "/.new" not in str(path)}
    return {p: (s.st_mode, *((s.st_size, s.st_mtime_ns) if p.is_file() else ())) for p, s in stats.items()}


@pytest.fixture(scope="module")
def unspoilt(original, tmp_path_factory) -> Path:
    """A copy for the commands that are wrong by themselves: each leaves it as it is."""
    return shutil.copytree(original, tmp_path_factory.mktemp("unspoilt") / "it").parent


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_ends_in_one_line(name, original, unspoilt, tmp_path, capfd, monkeypatch):
    spoil, command, message = CASES[name]
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
        assert re.search(message, lines[0]) and len(lines[0]) < 2100, lines[0]
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
