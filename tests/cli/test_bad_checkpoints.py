"""Bad input to verbs that look at finished checkpoints, through the command line: exit code 2, one line, nothing written."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.kit.places import DEMO_LLAVA
from vlmcompress import cli
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction.choice import parse

DEMO = str(DEMO_LLAVA)
CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {}


def case(message: str) -> Callable:
    """Register a function that prepares a folder and returns the arguments."""

    def register(prepare: Callable[[Path], list[str]]) -> Callable:
        CASES[prepare.__name__] = (prepare, message)
        return prepare

    return register


def rows(folder: Path, *records: dict) -> str:
    """A data file; `a.png` lies beside it."""
    Image.new("RGB", (30, 30), "red").save(folder / "a.png")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return str(folder / "data.jsonl")


ROW = {"image": "a.png", "question": "what is it", "answer": "red"}
EVAL = ["eval", DEMO, "--baseline", DEMO]


@case("has GGUF files, which are written and not read")
def convert_of_a_broken_gguf(folder: Path) -> list[str]:
    """Nothing of the file is read, so that what it claims does not matter: here 2^60 tensors in 24 bytes."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_bytes((DEMO_LLAVA / "config.json").read_bytes())
    (folder / "model" / "model.gguf").write_bytes(
        b"GGUF" + (3).to_bytes(4, "little") + (2**60).to_bytes(8, "little") * 2
    )
    return ["convert", str(folder / "model"), "-o", str(folder / "out")]


@case("no suite is called 'chartqq'; did you mean 'chartqa'")
def unknown_suite(folder: Path) -> list[str]:
    return [*EVAL, "--suite", "chartqq"]


@case(r"VLMCOMPRESS_DATA|--data")
def suite_without_its_data(folder: Path) -> list[str]:
    return [*EVAL, "--suite", "chartqa"]


@case("suite .*nothing.yaml does not exist")
def missing_task_file(folder: Path) -> list[str]:
    return [*EVAL, "--suite", str(folder / "nothing.yaml")]


@case("data.jsonl.*(empty|no samples)")
def no_samples(folder: Path) -> list[str]:
    return [*EVAL, "--data", rows(folder)]


@case("'twice'|ids repeat|same id")
def repeated_ids(folder: Path) -> list[str]:
    return [*EVAL, "--data", rows(folder, ROW | {"id": "twice"}, ROW | {"id": "twice", "question": "and this"})]


@case("has no answer")
def data_without_answers(folder: Path) -> list[str]:
    return [*EVAL, "--data", rows(folder, ROW, ROW | {"answer": ""})]


@case("gone.png")
def missing_image(folder: Path) -> list[str]:
    return [*EVAL, "--data", rows(folder, ROW, ROW | {"image": "gone.png"})]


@case("unknown engine 'vlm'; did you mean 'vllm'")
def unknown_engine(folder: Path) -> list[str]:
    return [*EVAL, "--engine", "vlm"]


@case("unknown key 'suites.world.margn'; did you mean 'margin'")
def gate_with_an_unknown_key(folder: Path) -> list[str]:
    (folder / "gate.yaml").write_text("suites: {world: {margn: 0.01}}\n")
    return [*EVAL, "--gate", str(folder / "gate.yaml")]


@case("no bundled gate is called 'strickt'; did you mean 'strict'")
def unknown_gate(folder: Path) -> list[str]:
    return [*EVAL, "--gate", "strickt"]


@case("--gate and --max-drop exclude each other")
def two_gates(folder: Path) -> list[str]:
    return [*EVAL, "--gate", "demo", "--max-drop", "0.01"]


@case("--max-drop 1.5 is no share")
def percent_for_a_share(folder: Path) -> list[str]:
    return [*EVAL, "--max-drop", "1.5"]


@case("schema 1, this version reads 2")
def report_of_another_version(folder: Path) -> list[str]:
    (folder / "results.json").write_text('{"schema": 1}')
    return ["eval", DEMO, "--baseline", str(folder)]


@case("no server answers at")
def no_server(folder: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [*EVAL, "--engine", f"openai:http://127.0.0.1:{port}/v1", "--data", rows(folder, ROW)]


@case("--load")
def wrong_load(folder: Path) -> list[str]:
    return ["bench", DEMO, "--baseline", DEMO, "--load", "open:8"]


@case("--requests 0: must be at least 1")
def no_requests(folder: Path) -> list[str]:
    return ["bench", DEMO, "--baseline", DEMO, "--requests", "0"]


@case("report.*(Not a directory|File exists)")
def report_folder_that_is_a_file(folder: Path) -> list[str]:
    (folder / "report").write_text("precious")
    return ["bench", DEMO, "--baseline", DEMO, "--report", str(folder / "report")]


@case("no such checkpoint folder")
def bench_of_nothing(folder: Path) -> list[str]:
    return ["bench", str(folder / "nothing"), "--baseline", DEMO]


def tampered(folder: Path) -> str:
    """A checkpoint whose reducer is of a version to come."""
    config = reducer_block.write(json.loads(Path(DEMO, "config.json").read_text()), parse("dart:0.5"))
    (folder / "tampered").mkdir()
    (folder / "tampered" / "config.json").write_text(json.dumps(config | {"vlmcompress": {"schema": 99}}))
    return str(folder / "tampered")


@case("tampered: config.json: vlmcompress.schema is 99.*upgrade it")
def eval_of_a_tampered_reducer(folder: Path) -> list[str]:
    return ["eval", tampered(folder), "--baseline", DEMO]


@case("tampered: config.json: vlmcompress.schema is 99.*upgrade it")
def bench_of_a_tampered_reducer(folder: Path) -> list[str]:
    return ["bench", tampered(folder), "--baseline", DEMO]


@case("tampered: config.json: vlmcompress.schema is 99.*upgrade it")
def serve_of_a_tampered_reducer(folder: Path) -> list[str]:
    return ["serve", tampered(folder)]


@case("config.json: content should be an object")
def serve_of_a_list(folder: Path) -> list[str]:
    (folder / "config.json").write_text("[1]")
    return ["serve", str(folder)]


@case("model type .bert. is not a vision-language model")
def doctor_of_a_model_of_another_kind(folder: Path) -> list[str]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file({"weight": torch.zeros(1)}, folder / "model" / "model.safetensors")
    return ["doctor", str(folder / "model"), "--engine", "vllm"]


@case("--source .*nothing is not a folder")
def doctor_without_the_original(folder: Path) -> list[str]:
    return ["doctor", DEMO, "--source", str(folder / "nothing")]


@case("--max-model-len is 0")
def serve_of_no_length(folder: Path) -> list[str]:
    return ["serve", DEMO, "--max-model-len", "0"]


@case("--port 99999 is no port")
def serve_at_no_port(folder: Path) -> list[str]:
    return ["serve", DEMO, "--port", "99999"]


@case("nothing")
def report_of_nothing(folder: Path) -> list[str]:
    return ["report", str(folder / "nothing"), "-o", str(folder / "page")]


@case("is not readable JSON")
def report_of_garbage(folder: Path) -> list[str]:
    (folder / "results.json").write_text("{]")
    return ["report", str(folder), "-o", str(folder / "page")]


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("VLMCOMPRESS_DATA", raising=False)
    prepare, message = CASES[name]
    arguments = prepare(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert cli.main(arguments) == 2
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    assert re.search(message, shown.err), shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
