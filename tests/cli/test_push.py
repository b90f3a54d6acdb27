"""`push`: what it refuses, what it shows without a network, and an upload to a small hub on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData, constants
from huggingface_hub.repocard import metadata_load

from tests.kit import made_results, rtn
from tests.kit.hub_server import Hub, serving
from tests.kit.tiny import build
from vlmcompress import cli
from vlmcompress.cli import _process as terminal
from vlmcompress.evaluation.results import FILE
from vlmcompress.export import card, manifest
from vlmcompress.utils import hub

LICENCE = "---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\nlanguage:\n- en\n- de\ntags: [x]\n---\n# original\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A checkpoint; its original's card has a licence of its own."""
    folder = tmp_path_factory.mktemp("push")
    source = build("llava", folder / "llava")
    (source / "README.md").write_text(LICENCE)
    rtn.write(source, folder / "out", rtn.SCHEMES["w4-symmetric"], kv_cache=True)
    return folder / "out"


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path) -> None:
    """No network, no token, and this process's logging as it is."""
    monkeypatch.setattr(terminal, "quiet_libraries", lambda: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(monkeypatch) -> Iterator[Hub]:
    with serving() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", hub.token)

        yield hub


def before(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dry(made: Path, capfd, *flags: str) -> dict:
    assert cli.main(["push", str(made), "my-org/tiny-w4", "--dry-run", "--json", *flags]) == 0
    return json.loads(capfd.readouterr().out)


def test_dry_run_shows_what_would_be_uploaded(made, capfd) -> None:
    """Every file of the folder, no more; without a token or a network; the folder stays as it is."""
    was = before(made)
    report = dry(made, capfd)
    assert set(report["files"]) == set(was) and report["url"] is None
    assert {name: size for name, size in report["files"].items() if name not in (card.CARD, manifest.MANIFEST)} == {
        name: len(content) for name, content in was.items() if name not in (card.CARD, manifest.MANIFEST)
    }
    assert cli.main(["push", str(made), "my-org/tiny-w4", "--dry-run", "--private"]) == 0
    output = capfd.readouterr().out
    assert f"Would upload {len(was)} files, " in output and "to my-org/tiny-w4 (private if new):" in output
    assert "  | license: other\n" in output and all(name in output for name in was)
    assert "The card names no original, as it was a local folder; add --base-model ORG/NAME." in output
    assert before(made) == was


def test_weights_are_read_for_an_upload_or_on_demand(made, tmp_path, capfd) -> None:
    """A dry run takes the manifest's word for them."""
    out = Path(shutil.copytree(made, tmp_path / "out"))
    raw = bytearray((out / "model.safetensors").read_bytes())
    raw[-100] ^= 1
    (out / "model.safetensors").write_bytes(raw)
    assert dry(out, capfd)["files"] == dry(made, capfd)["files"]
    for flags in (["--dry-run", "--verify"], []):
        assert cli.main(["push", str(out), "my-org/tiny-w4", *flags]) == 2
        assert "is damaged, nothing is uploaded: files: changed: model.safetensors" in capfd.readouterr().err


def test_metadata_is_what_the_hub_reads(made, capfd, tmp_path) -> None:
    """Oracle: huggingface_hub's own classes read the header, lose nothing of it, and find each value where it belongs."""
    text = dry(made, capfd, "--base-model", "lab/original-7b")["card"]
    (tmp_path / "README.md").write_text(text)
    header = metadata_load(tmp_path / "README.md")
    assert header == {
        "base_model": "lab/original-7b",
        "base_model_relation": "quantized",
        "quantized_by": "my-org",
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "license": "other",
        "license_name": "tiny",
        "license_link": "LICENSE",
        "language": ["en", "de"],
        "tags": ["vlmcompress", "vllm", "compressed-tensors", "4-bit"],
    }
    data = ModelCard(text).data
    assert isinstance(data, ModelCardData) and data.to_dict() == header
    assert (data.base_model, data.license_name, data.pipeline_tag) == ("lab/original-7b", "tiny", "image-text-to-text")
    assert "hf download my-org/tiny-w4 --local-dir tiny-w4" in text and "vllm serve ./tiny-w4 " in text
    assert (
        "lab/original-7b (llava) compressed with vlmcompress" in text and "| vLLM 0.32 | `sh serve/vllm.sh` |" in text
    )


@pytest.mark.parametrize("kept", ["license: [unclosed", "just text", "license: 3\nlanguage: {a: b}", ""])
def test_an_odd_card_of_the_original_is_left_alone(kept, made, tmp_path, capfd) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    (folder / card.SOURCE_CARD).write_text(f"---\n{kept}\n---\n")
    text = card.render_card(manifest.read_manifest(folder), folder, "out")
    (tmp_path / "README.md").write_text(text)
    assert set(metadata_load(tmp_path / "README.md") or {}) == {"quantized_by", "library_name", "pipeline_tag", "tags"}


def results(made: Path, folder: Path, **changes: object) -> Path:
    measured = made_results.make_results()
    side = {"weight_bytes": manifest.read_manifest(made)["size"]["weights_after"], "layer_errors": {}} | changes
    measured = measured.model_copy(update={"candidate": measured.candidate.model_copy(update=side)})
    folder.mkdir()
    (folder / FILE).write_text(json.dumps(measured.to_dict()))
    return folder


def test_results_become_tables(made, capfd, tmp_path) -> None:
    text = dry(made, capfd, "--results", str(results(made, tmp_path / "report")))["card"]
    assert (
        "## Measured\n" in text
        and "### Accuracy: " in text
        and "| family | n | baseline | candidate | points |" in text
    )
    assert "\n## Accuracy" not in text and text.index("## Measured") < text.index("## Use\n")
    other = str(results(made, tmp_path / "other", weight_bytes=1))
    assert cli.main(["push", str(made), "my-org/x", "--dry-run", "--results", other]) == 2
    assert "is about another checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny", "the owner is missing"),
        ("a/b/c", "must be in the form"),
        ("my org/x", "must use alphanumeric"),
        ("my-org/a--b", "Cannot have -- or"),
        ("my-org/x.git", "cannot end by '.git'"),
        ("my-org/" + "x" * 99, "must use alphanumeric"),
        ("", "must use alphanumeric"),
    ],
)
def test_bad_ids(name, message, made, capfd) -> None:
    for arguments in ([name], ["my-org/x", "--base-model", name]):
        assert cli.main(["push", str(made), *arguments, "--dry-run"]) == 2
        said = capfd.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1 and message in said
        assert "write it like my-org/my-model" in said


@pytest.mark.parametrize("kind", ["changed", "missing", "extra", "no manifest", "no folder"])
def test_a_damaged_folder_is_refused(kind, made, server, tmp_path, capfd) -> None:
    folder = tmp_path / "out"
    if kind != "no folder":
        shutil.copytree(made, folder)
    if kind == "changed":
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x7f")
    elif kind == "missing":
        (folder / "tokenizer.json").unlink()
    elif kind == "extra":
        (folder / "notes.txt").write_text("private")
    elif kind == "no manifest":
        (folder / manifest.MANIFEST).unlink()
    assert cli.main(["push", str(folder), "my-org/tiny"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert ("is damaged, nothing is uploaded" in said) is (kind != "no folder")
    assert not server.repositories


def test_without_a_token_or_a_network(made, monkeypatch, capfd) -> None:
    def said() -> str:
        assert cli.main(["push", str(made), "my-org/tiny"]) == 2
        text = capfd.readouterr().err
        assert text.startswith("error: ") and text.count("\n") == 1
        return text

    monkeypatch.setattr(hub, "_offline_by_default", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that the command line leaves it alone
    assert "no token for the Hub; log in with `hf auth login` or set HF_TOKEN" in said()
    monkeypatch.setenv("HF_TOKEN", "hf_nothing")
    assert "http://127.0.0.1:9 cannot be reached (ConnectError); run it again" in said()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or use --dry-run" in said()


def test_upload(made, server, monkeypatch, capfd, tmp_path) -> None:
    """What arrives is a whole checkpoint, by `doctor`, with the card that was shown; a second upload replaces what an engine
    would read and leaves the rest."""
    output = dry(made, capfd, "--base-model", "lab/original")
    push = ["push", str(made), "my-org/tiny-w4", "--private", "--base-model", "lab/original"]
    assert cli.main(push) == 0
    assert f"Uploaded {len(output['files'])} files to {server.address}/my-org/tiny-w4" in capfd.readouterr().out
    assert server.private == {"my-org/tiny-w4"}

    def arrived() -> dict[str, bytes]:
        return server.repositories["model my-org/tiny-w4"]["main"][1]

    assert {name: len(content) for name, content in arrived().items()} == output["files"]
    assert arrived()[card.CARD].decode() == output["card"]
    for name, content in arrived().items():
        (tmp_path / "there" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "there" / name).write_bytes(content)
    assert cli.main(["doctor", str(tmp_path / "there")]) == 0
    server.add(
        "my-org/tiny-w4", arrived() | {"model-00002-of-00002.safetensors": b"old", "serve/old.sh": b"", "pic.png": b"p"}
    )
    assert cli.main(push) == 0
    assert set(arrived()) == set(output["files"]) | {"pic.png"}
    capfd.readouterr()
    server.refuses = '"license" must be one of [apache-2.0, ...]'
    assert cli.main(push) == 2
    assert "error: the Hub refuses the card (Invalid metadata in README.md." in capfd.readouterr().err
    server.refuses = ""
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    capfd.readouterr()
    assert cli.main(push) == 2
    assert "the Hub refuses to write my-org/tiny-w4 (HTTP 401); use a token with write access" in capfd.readouterr().err
