"""Files and paths of strangers through the command line: exit code 2, one line, soon, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.kit import tiny
from tests.kit.command_line import loud  # noqa: F401
from vlmcompress import cli
from vlmcompress.evaluation.doctor import files as doctor
from vlmcompress.export import manifest
from vlmcompress.models import _checks, _template

HUGE = 10**12
NESTED = "[" * 100_000 + "]" * 100_000
CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {}
pytestmark = pytest.mark.timeout(300)


def case(message: str, **arguments: object) -> Callable:
    """Register a function that spoils a folder and returns the command line; once for all of `arguments`."""

    def register(spoil: Callable) -> Callable:
        name = "-".join([spoil.__name__, *(str(value)[:30] for value in arguments.values())])
        CASES[name] = (lambda folder: spoil(folder, **arguments), message)
        return spoil

    return register


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A model, its data, a checkpoint and statistics of it, and a checkpoint of another family."""
    folder = tmp_path_factory.mktemp("original")
    for family in ("llava", "qwen2_5_vl"):
        tiny.build(family, folder / family)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)).save(folder / "0.png")
    row = {"id": "0", "image": "0.png", "question": "what is it", "answer": "red"}
    (folder / "calib.jsonl").write_text(json.dumps(row) + "\n")
    data = ["--calib", str(folder / "calib.jsonl")]
    for family, out in (("llava", "out"), ("qwen2_5_vl", "qwen")):
        assert cli.main(["quantize", str(folder / family), "-o", str(folder / out), "--scheme", "gptq", *data]) == 0
    assert cli.main(["calibrate", str(folder / "llava"), "-o", str(folder / "stats"), *data]) == 0
    return folder


def quantize(folder: Path, *flags: str, scheme: str = "rtn") -> list[str]:
    return ["quantize", str(folder / "llava"), "-o", str(folder / "new"), "--scheme", scheme, *flags]


def calibrated(folder: Path) -> list[str]:
    return quantize(folder, "--calib", str(folder / "calib.jsonl"), scheme="gptq")


def tokens(folder: Path) -> list[str]:
    return ["tokens", str(folder / "llava"), "--image-size", "56x56"]


def recipe(folder: Path, text: str) -> list[str]:
    (folder / "r.yaml").write_text(text)
    return ["quantize", str(folder / "llava"), "-o", str(folder / "new"), "--recipe", str(folder / "r.yaml")]


def edit(file: Path, **values: object) -> None:
    """Set dotted keys (`__` for the dot) of a JSON file."""
    content = json.loads(file.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        inner = content
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    file.write_text(json.dumps(content))


def begin(file: Path, text: str) -> None:
    """Put something behind the first brace of a JSON file."""
    file.write_text(file.read_text().replace("{", "{" + text, 1))


def sizes(folder: Path, key: str) -> list[str]:
    edit(folder / "llava" / "config.json", **{key: HUGE})
    return quantize(folder)


for text_key in (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "head_dim",
):
    case(rf"text_config.{text_key} is 1,000,000,000,000, more than", key=f"text_config__{text_key}")(sizes)
for vision_key in ("num_hidden_layers", "image_size", "patch_size", "num_channels"):
    case(rf"vision_config.{vision_key} is 1,000,000,000,000, more than", key=f"vision_config__{vision_key}")(sizes)
case("image_seq_length is 1,0", key="image_seq_length")(sizes)


@case("num_hidden_layers is 1,000,000,000,000, more than the 1,024")
def layers_for_tokens(folder: Path) -> list[str]:
    edit(folder / "llava" / "config.json", text_config__num_hidden_layers=HUGE)
    return tokens(folder)


@case("num_hidden_layers is 900, and the weight files hold 80 tensors")
def more_layers_than_tensors(folder: Path) -> list[str]:
    edit(folder / "llava" / "config.json", text_config__num_hidden_layers=900)
    return quantize(folder)


@case("asks for [0-9,]{10,} weights, and the weight files hold")
def more_weights_than_files(folder: Path) -> list[str]:
    edit(folder / "llava" / "config.json", text_config__vocab_size=1 << 24)
    return quantize(folder)


@case("shape .* do not belong together")
def other_shapes_in_a_dry_run(folder: Path) -> list[str]:
    edit(folder / "llava" / "config.json", text_config__intermediate_size=384)
    return quantize(folder, "--dry-run")


@case("image_processor.size.shortest_edge is 1,000,000,000,000")
def huge_images(folder: Path) -> list[str]:
    edit(folder / "llava" / "processor_config.json", image_processor__size={"shortest_edge": HUGE})
    return tokens(folder)


@case(r"field 'hidden_size': TypeError: .* expected int, got str \(value: 'big'\)\); restore")
def size_in_words(folder: Path) -> list[str]:
    edit(folder / "llava" / "config.json", text_config__hidden_size="big")
    return quantize(folder)


def nested(folder: Path, file: str) -> list[str]:
    (folder / "r.json").write_text("{}")
    begin(folder / file, f'"x": {NESTED}' + (", " if "r.json" not in file else ""))
    commands = {
        "out": ["report-error", str(folder / "out")],
        "stats": quantize(folder, "--stats", str(folder / "stats")),
        "r.json": ["report", str(folder / "r.json")],
        "calib.jsonl": calibrated(folder),
    }
    return commands.get(Path(file).parts[0], quantize(folder))


for nested_file in ("llava/config.json", "out/vlmcompress.json", "stats/statistics.json", "r.json", "calib.jsonl"):
    case("not (a )?(readable|valid)", file=nested_file)(nested)


@case("not a whole safetensors file")
def nested_header(folder: Path) -> list[str]:
    (folder / "llava" / "model.safetensors").write_bytes(len(NESTED).to_bytes(8, "little") + NESTED.encode())
    return quantize(folder)


@case("messages is not valid JSON .*nested")
def nested_messages(folder: Path) -> list[str]:
    (folder / "calib.jsonl").write_text(json.dumps({"image": "0.png", "messages": NESTED}) + "\n")
    return calibrated(folder)


@case("not a whole safetensors file")
def shape_of_letters(folder: Path) -> list[str]:
    header = b'{"a":{"dtype":"F32","shape":"ab","data_offsets":[0,8]}}'
    (folder / "llava" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return quantize(folder)


def other_file(folder: Path, target: str) -> list[str]:
    (folder / "llava" / "LICENSE").symlink_to(target)
    return quantize(folder)


case("LICENSE is a device, a pipe or a link", target="/dev/zero")(other_file)
case("LICENSE is a device, a pipe or a link", target="nowhere")(other_file)


@case("holds itself")
def recipe_in_itself(folder: Path) -> list[str]:
    return recipe(folder, "scheme: rtn\noptions: &a\n  bits: *a\n")


@case(r"keep=\[\[.*\.\.\. \(200,[0-9]+ characters\) \.\.\. .*maximum recursion")
def nested_reducer(folder: Path) -> list[str]:
    return quantize(folder, "--reduce", f"dart:keep={NESTED}")


def duplicate(folder: Path, command: str, where: str) -> list[str]:
    begin(folder / where / "config.json", '"model_type": "llava",')
    return quantize(folder) if command == "quantize" else [command, str(folder / where)]


case("key 'model_type' is given twice", command="quantize", where="llava")(duplicate)
case("key 'model_type' is given twice", command="serve", where="out")(duplicate)


def tokenizer(folder: Path, key: str, value: object) -> list[str]:
    edit(folder / "llava" / "tokenizer.json", **{key: value})
    return tokens(folder)


PATTERN = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
for tokenizer_key, tokenizer_value in {
    "pre_tokenizer": PATTERN,
    "normalizer": CHARSMAP,
    "model__vocab": {"a": HUGE},
}.items():
    case("llava has no usable processor .*; copy the tokenizer", key=tokenizer_key, value=tokenizer_value)(tokenizer)


def processor(folder: Path, key: str, value: object) -> list[str]:
    edit(folder / "llava" / "processor_config.json", **{key: value})
    return tokens(folder)


for processor_key, processor_value in {
    "patch_size": 0,
    "image_processor__rescale_factor": 0,
    "image_processor__resample": 99,
    "image_processor__crop_size": {"height": "x", "width": [1]},
}.items():
    case("the model's processor refuses it", key=processor_key, value=processor_value)(processor)


@case("not a whole safetensors file")
def metadata_that_are_no_object(folder: Path) -> list[str]:
    header = b'{"__metadata__":{"format":1}}'
    (folder / "llava" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return quantize(folder)


@case("'?image '/dev/zero' cannot be read: it is a device")
def endless_image(folder: Path) -> list[str]:
    (folder / "calib.jsonl").write_text('{"image": "/dev/zero", "question": "q"}\n')
    return calibrated(folder)


@case("cannot read recipe /dev/zero: it is a device")
def endless_recipe(folder: Path) -> list[str]:
    return ["quantize", str(folder / "llava"), "-o", str(folder / "new"), "--recipe", "/dev/zero"]


@case("cannot read recipe .*pipe")
def recipe_from_nobody(folder: Path) -> list[str]:
    command = recipe(folder, "")
    (folder / "r.yaml").unlink()
    os.mkfifo(folder / "r.yaml")
    return command


def path(folder: Path, kind: str, verb: str) -> list[str]:
    (folder / "loop").symlink_to("loop")
    name = {"long": "x" * 5000, "nul": "a\0b", "loop": str(folder / "loop")}[kind]
    return {
        "model": ["quantize", name, "-o", str(folder / "new"), "--scheme", "rtn"],
        "out": ["quantize", str(folder / "llava"), "-o", name, "--scheme", "rtn"],
        "recipe": ["quantize", str(folder / "llava"), "-o", str(folder / "new"), "--recipe", name],
        "calib": quantize(folder, "--calib", name, scheme="gptq"),
        "tokens": ["tokens", name, "--image-size", "56x56"],
        "doctor": ["doctor", name],
    }[verb]


for path_kind in ("long", "nul", "loop"):
    for path_verb in ("model", "out", "recipe", "calib", "tokens", "doctor"):
        case("", kind=path_kind, verb=path_verb)(path)


def template(folder: Path, kind: str, scheme: str) -> list[str]:
    file = folder / "llava" / "chat_template.jinja"
    loop = "{% for j in range(99999) %}{% endfor %}"
    texts = {
        "range": "{% for i in range(1000000000) %}x{% endfor %}",
        "loops": f"{{% for i in range(99999) %}}{loop}{{% endfor %}}",
        "text": "{{ 'x' * 100000000000 }}",
        "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "syntax": "{% for %}",
        "indent": "{{ messages | tojson(indent=999999999) }}",
    }[kind]
    file.write_text(file.read_text() + texts)
    return tokens(folder) if scheme == "tokens" else quantize(folder)


case("chat template .* is not usable: Range too big", kind="range", scheme="tokens")(template)
case("chat template .* is not usable: Range too big", kind="range", scheme="rtn")(template)
case("is not usable: a short conversation takes more than", kind="loops", scheme="rtn")(template)
case("is not usable: a short conversation takes more than", kind="text", scheme="rtn")(template)
case("is not usable: maximum recursion depth", kind="itself", scheme="rtn")(template)
case("is not usable: line ", kind="syntax", scheme="rtn")(template)
case("is not usable: a short conversation takes more than 1 GiB", kind="indent", scheme="rtn")(template)


def budget(folder: Path, bits: str) -> list[str]:
    return quantize(folder, "--set", f"bits.budget={bits}")


for budget_bits, fault in {"nan": "should be", "-1": "should be greater than 0", ".inf": "should be"}.items():
    case(f"bits.budget is .*{fault}", bits=budget_bits)(budget)


def digits(folder: Path, key: str) -> list[str]:
    return quantize(folder, "--set", f"{key}={'9' * 30}")


for digits_key in ("seed", "calibrate.samples", "calibrate.max_length"):
    case(f"{digits_key} is 9{{30}}, it should be less than or equal to", key=digits_key)(digits)


@case("model.safetensors is not what was written, its hash")
def manifest_of_other_weights(folder: Path) -> list[str]:
    content = json.loads((folder / "out" / manifest.MANIFEST).read_text())
    content["files"]["model.safetensors"]["sha256"] = "0" * 64
    (folder / "out" / manifest.MANIFEST).write_text(json.dumps(content))
    return ["report-error", str(folder / "out")]


@case("config.json is not what was written")
def manifest_of_another_config(folder: Path) -> list[str]:
    edit(folder / "out" / "config.json", image_seq_length=17)
    return ["report-error", str(folder / "out")]


def spoilt_manifest(folder: Path, key: str, value: object) -> list[str]:
    edit(folder / "out" / manifest.MANIFEST, **{key: value})
    return ["report-error", str(folder / "out")]


case("files should be an object", key="files", value=None)(spoilt_manifest)


@case(
    "out is a llava model and qwen a qwen2_5_vl model; compare two of one model|out is a .* model and qwen a .* model"
)
def two_families(folder: Path) -> list[str]:
    return ["report-error", str(folder / "out"), str(folder / "qwen")]


@pytest.mark.parametrize("name", CASES)
def test_one_line(name, original, tmp_path, capfd, monkeypatch):
    spoil, message = CASES[name]
    folder = tmp_path / "it"
    shutil.copytree(original, folder)
    command = spoil(folder)
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert cli.main(command) == 2
    shown = capfd.readouterr()
    lines = [line for line in shown.err.splitlines() if line.strip()]
    if command[0] == "doctor" and not shown.err:
        assert "PROBLEM" in shown.out
    else:
        assert shown.out == "" and len(lines) == 1 and lines[0].startswith("error: "), shown.err
        assert re.search(message, lines[0]) and len(lines[0]) < 2100, lines[0]
    assert sorted(folder.rglob("*")) == before


def test_check_says_it_too(original, tmp_path, capfd):
    """What `quantize` would refuse is a finding of `check`."""
    shutil.copytree(original / "llava", tmp_path / "llava")
    template(tmp_path, "range", "rtn")
    assert cli.main(["check", str(tmp_path / "llava"), "--scheme", "rtn"]) == 2
    assert "Range too big" in capfd.readouterr().out


def test_doctor_leaves_with_2_where_a_folder_is_broken(original, tmp_path, capfd):
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


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_real_templates_are_usable(family, original):
    assert _template.endless((original / family / "chat_template.jinja").read_text()) is None


def test_bounds_leave_room_for_the_largest_models(tmp_path):
    """Sizes of models of 400 to 1000 billion weights, and of the largest encoders."""
    text = {
        "num_hidden_layers": 126,
        "hidden_size": 18432,
        "intermediate_size": 73728,
        "vocab_size": 262208,
        "rope_theta": 1e12,
    }
    vision = {
        "depth": 48,
        "hidden_size": 3200,
        "image_size": [1792, 1792],
        "patch_size": 14,
        "num_position_embeddings": 65536,
    }
    config = {"text_config": text | {"max_position_embeddings": 10485760, "num_experts": 512}, "vision_config": vision}
    _checks.check_sizes(config, tmp_path)
    _checks.check_sizes({"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "max_pixels": 16777216}, tmp_path)
