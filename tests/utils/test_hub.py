"""Ids on the Hugging Face Hub in place of folders, against a small hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, get_session
from safetensors.torch import save_file

from tests.kit import calibration_rows, tiny
from tests.kit.command_line import loud  # noqa: F401
from tests.kit.hub_server import Hub, serving
from vlmcompress import cli
from vlmcompress.engines.vllm import serve, speculation
from vlmcompress.export import manifest
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import read_entries

NEVER = ("pytorch_model.bin", "training_args.pt", "modeling.py", "original/consolidated.safetensors", "model.fp16.bin")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint with more in its repository than is needed."""
    folder = tiny.build("llava", tmp_path_factory.mktemp("source") / "llava")
    for name in NEVER:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"never")
    return folder


@pytest.fixture
def server() -> Iterator[Hub]:
    with serving() as hub_server:
        yield hub_server


@pytest.fixture
def online(server, tmp_path, monkeypatch) -> Hub:
    """This process's huggingface_hub talks to the server and has an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(hub, "_offline_by_default", False)  # whatever a command line set before in this process
    return server


def run(server: Hub, home: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """The command line in a process of its own, with the cache in `home`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    env = kept | {"HF_ENDPOINT": server.address, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "vlmcompress", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_a_draft_model_by_its_id(online, source, monkeypatch):
    """It is fetched once for the server, which gets the folder; offline it has to be there, at its revision if there is one."""
    commit = online.add("org/draft", source)

    def drafting(model: str) -> Path:
        text = json.dumps({"model": model, "num_speculative_tokens": 2})
        arguments = serve.arguments_of(source, speculative=text)
        assert arguments == serve.arguments_of(source, extra=[speculation.FLAG, text])
        return Path(json.loads(arguments[arguments.index(speculation.FLAG) + 1])["model"])

    with pytest.raises(UserError, match="org/none"):
        drafting("org/none")
    folder = drafting("org/draft")
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert "model.safetensors" in online.files() and not set(NEVER) & set(online.files())
    online.served.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert drafting("org/draft") == drafting(f"org/draft@{commit}") == folder and not online.served
    with pytest.raises(UserError, match="org/other"):
        drafting("org/other")


@pytest.mark.slow
def test_quantize_from_ids_then_offline(server, source, tmp_path, monkeypatch, capfd):
    """Model and data by id; what is not needed is not fetched; then the same bytes without a network, from the cache."""
    (tmp_path / "data").mkdir()
    calibration_rows.write(tmp_path / "data", 4)
    commit = server.add("org/tiny", source)
    server.add("org/questions", tmp_path / "data", kind="dataset")
    what = ["quantize", "org/tiny", "--scheme", "gptq", "--calib", "org/questions", "--samples", "5", "--json"]
    what += ["--set", "options.group_size=64"]
    done = run(server, tmp_path / "home", *what, "-o", tmp_path / "first")
    assert done.returncode == 0, done.stderr
    output = done.stderr.splitlines()
    assert output[0].startswith(f"note: fetching model org/tiny at {commit[:12]}: ") and output[0].endswith(" MB")
    assert output[1].startswith("note: fetching data set org/questions at ")
    assert output[2] == "note: org/questions:calib.jsonl has 4 samples, 5 were asked for; all are used"
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "calib.jsonl"} <= set(
        server.files()
    )
    assert not set(NEVER) & set(server.files())
    result = manifest.read_manifest(tmp_path / "first")
    assert (result["model"]["source"], result["model"]["revision"]) == ("org/tiny", commit)
    assert result["recipe"]["model"] == f"org/tiny@{commit}"
    assert result["calibration"]["source"] == "org/questions:calib.jsonl"
    assert (result["calibration"]["samples"], result["calibration"]["asked"]) == (4, 5)
    assert "base_model: org/tiny\n" in (tmp_path / "first" / "README.md").read_text()
    assert json.loads(done.stdout)["next"][0].endswith(f"--baseline org/tiny@{commit} --data FILE")
    assert str(tmp_path / "home") not in (tmp_path / "first" / "vlmcompress.json").read_text()

    server.served.clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    for name, key, value in (("gone", "ENDPOINT", "http://127.0.0.1:9"), ("set", "HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(constants, key, value)
        assert cli.main([*what, "-o", str(tmp_path / name)]) == 0
        assert "fetching" not in capfd.readouterr().err
        weights = "model.safetensors"
        assert (tmp_path / "first" / weights).read_bytes() == (tmp_path / name / weights).read_bytes()
        assert manifest.read_manifest(tmp_path / name)["model"] == result["model"]
    assert not server.served


@pytest.mark.parametrize("verb", ["check", "dry", "tokens"])
def test_headers_are_enough(online, source, capfd, verb):
    """Verbs that read no weights fetch none: at most the beginning of the weight file, and say the same."""
    online.add("org/tiny", source)
    rtn = ["--scheme", "rtn", "--set", "options.group_size=64"]
    verbs = {
        "check": ["check", *rtn],
        "dry": ["quantize", "--dry-run", *rtn],
        "tokens": ["check", "--image-size", "64x64"],
    }
    same = {"check": "findings", "dry": "groups", "tokens": "images"}[verb]
    texts = []
    for model in ("org/tiny", str(source)):
        assert cli.main([*verbs[verb], model, "--json"]) == 0
        texts.append(capfd.readouterr().out)
    assert json.loads(texts[0])[same] == json.loads(texts[1])[same]
    assert "vlmcompress-headers-" not in texts[0]
    sent = sum(count for name, count in online.served if name.endswith(".safetensors"))
    assert sent <= (0 if verb == "tokens" else 2**16 + 8) < (source / "model.safetensors").stat().st_size


def test_a_header_longer_than_a_request(online, source, tmp_path):
    """The file that stands in for the weights has the whole header and the right length."""
    tensors = {f"blocks.{number}.weight": torch.zeros(2) for number in range(2000)}
    save_file(tensors, tmp_path / "model.safetensors")
    online.add("org/long", {"config.json": b"{}", "model.safetensors": (tmp_path / "model.safetensors").read_bytes()})
    header = hub.local("org/long", weights="headers") / "model.safetensors"
    ends = [(entry.name, entry.end) for entry in read_entries(tmp_path / "model.safetensors")]
    assert [(entry.name, entry.end) for entry in read_entries(header)] == ends
    assert 2**17 < header.stat().st_size == (tmp_path / "model.safetensors").stat().st_size


def test_offline_a_model_that_is_not_there(online, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    line = "model org/tiny is not a local path and not completely cached, and HF_HUB_OFFLINE is set; fetch it with: "
    with pytest.raises(UserError, match=f"^{line}hf download org/tiny --revision v2$"):
        hub.local("org/tiny@v2")


def test_an_existing_path_wins(online, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.local("org/tiny") == Path("org/tiny")


@pytest.mark.parametrize("name", ["/no/such", "./a/b", "../a", "plain", "a/b/c", "a/b c", "data/rows.jsonl", "a/b:"])
def test_paths_are_no_ids(name):
    assert hub.parse_repository(name, "dataset") is None and hub.local(name, "dataset") == Path(name)


def test_revisions(online, source):
    old = online.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"old"})
    new = online.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"new"}, revision="v2")
    for name, commit, weights in [
        ("org/tiny", old, b"old"),
        ("org/tiny@v2", new, b"new"),
        (f"org/tiny@{old}", old, b"old"),
    ]:
        folder = hub.local(name)
        assert (folder / "model.safetensors").read_bytes() == weights
        assert hub.identity(folder) == {"source": "org/tiny", "revision": commit}
        assert hub.display_path(folder) == f"org/tiny@{commit}"
    with pytest.raises(UserError, match=r"^model org/tiny has no revision 'v3' at http.*; name one of its branches"):
        hub.local("org/tiny@v3")


def test_a_broken_connection_is_resumed(online):
    """The second request asks for the rest only, and the file is whole."""
    weights = os.urandom(24_000_000)  # huggingface_hub writes 10 MB at a time
    online.add("org/tiny", {"config.json": b"{}", "model.safetensors": weights})
    online.cut["model.safetensors"] = 13_000_000
    assert (hub.local("org/tiny") / "model.safetensors").read_bytes() == weights
    sent = [count for name, count in online.served if name == "model.safetensors"]
    assert len(sent) == 2 and sent[0] == 13_000_000 and sent[1] < len(weights)


def test_downloaded_parts_are_not_fetched_again(online, monkeypatch):
    """A run that failed in the second file fetches only that one next time."""
    index = json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    )
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index.encode(),
        "model-00001-of-00002.safetensors": b"1",
    }
    online.add("org/tiny", files | {"model-00002-of-00002.safetensors": b"2", "other.safetensors": b"no"})
    online.gated.add("org/tiny")
    with pytest.raises(UserError, match="is gated"):
        hub.local("org/tiny")
    online.gated.clear()
    (hub.local("org/tiny") / "model-00002-of-00002.safetensors").unlink()
    online.served.clear()
    blob = hub.local("org/tiny")
    assert online.files() in ([], ["model-00002-of-00002.safetensors"])
    assert sorted(path.name for path in blob.glob("*.safetensors")) == sorted(
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    )


def test_bad_ids_and_revisions_are_refused(online):
    """One line each, which says what to do."""
    online.add("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    online.add("org/other", {"README.md": b"hello"})
    online.add("org/gated", {"config.json": b"{}", "model.safetensors": b""})
    online.gated.add("org/gated")
    online.add("org/tables", {"a.jsonl": b"{}", "b.jsonl": b"{}"}, kind="dataset")
    online.add("org/nothing", {"README.md": b""}, kind="dataset")
    online.add("org/bare", {"config.json": b"{}"})
    index = b'{"weight_map": {"a": "a.safetensors"}}'
    both = {"model.safetensors": b"", "model.safetensors.index.json": index, "a.safetensors": b""}
    online.add("org/both", {"config.json": b"{}", **both})
    for name, kind, line in [
        (
            "org/missing",
            "model",
            "is not a local path, and http.* check the name, or .*fetch it with: hf download org/missing$",
        ),
        ("org/missing", "dataset", "fetch it with: hf download org/missing --repo-type dataset$"),
        ("org/pickled", "model", "has only pickled weights"),
        ("org/other", "model", "has no config.json"),
        ("org/bare", "model", r"has no \*.safetensors file"),
        ("org/both", "model", "model org/both holds two sets of weights"),
        ("org/gated", "model", r"is gated; accept its terms at http.*/org/gated and log in with: hf auth login$"),
        ("org/tables", "dataset", r"has several tables \(a.jsonl, b.jsonl\); name one, like org/tables:a.jsonl$"),
        ("org/tables:c", "dataset", "has no 'c'; it has a.jsonl, b.jsonl$"),
        ("org/nothing", "dataset", "has no .parquet or .jsonl file and no images"),
    ]:
        with pytest.raises(UserError, match=line) as caught:
            hub.local(name, kind)
        assert "\n" not in str(caught.value)
    assert "pytorch_model.bin" not in online.files()


def test_half_a_download_is_not_used(online, monkeypatch):
    """Offline, what the cache lacks is missed: weights after a configuration, pictures of a folder."""
    online.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"weights"})
    online.add("org/data", {"a.png": b"1", "b.png": b"2"}, kind="dataset")
    hub.local("org/tiny", weights="none")
    (hub.local("org/data", "dataset") / "b.png").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (hub.local("org/tiny", weights="none") / "config.json").is_file()
    for arguments in (("org/tiny",), ("org/data", "dataset")):
        with pytest.raises(UserError, match="not completely cached"):
            hub.local(*arguments)
    with pytest.raises(UserError, match="not completely cached"):
        hub.local("org/tiny", weights="headers")


def test_an_adapter_with_its_tokenizer(online):
    """Also where a config.json lies next to it; merged weights make a model of it, of which the adapter is no part."""
    files = dict.fromkeys(("adapter_model.safetensors", "tokenizer.json", "chat_template.jinja", "config.json"), b"{}")
    files["adapter_config.json"] = b'{"base_model_name_or_path": "org/base"}'
    online.add("org/adapter", files | {"optimizer.pt": b""})
    assert {path.name for path in hub.local("org/adapter").iterdir()} == files.keys()
    online.add("org/merged", files | {"model.safetensors": b""})
    assert {path.name for path in hub.local("org/merged").iterdir()} >= {"model.safetensors", "config.json"}
    assert "adapter_model.safetensors" not in {path.name for path in hub.local("org/merged").iterdir()}


def test_python_code_is_downloaded_only_on_request(online):
    online.add("org/tiny", {"config.json": b"{}", "model.safetensors": b"", "modeling.py": b"code"})
    assert not (hub.local("org/tiny") / "modeling.py").exists()
    assert (hub.local("org/tiny", code=True) / "modeling.py").exists()


DATA = [
    (
        {"data/train-00000-of-00001.parquet": b"", "data/test-00000-of-00001.parquet": b""},
        "data/train-00000-of-00001.parquet",
    ),
    ({"train-00000-of-00002.parquet": b"", "train-00001-of-00002.parquet": b""}, "train-00000-of-00002.parquet"),
    ({"rows.jsonl": b"", "img/a.png": b"", "dataset_infos.json": b""}, "rows.jsonl"),
    ({"a.png": b"", "b/c.jpg": b"", "load.py": b"", "x.zip": b""}, "."),
]


@pytest.mark.parametrize(("files", "opened"), DATA, ids=["splits", "shards", "jsonl", "images"])
def test_data_sets(online, files, opened, capsys):
    """Of a data set one table, with the images next to it unless it is parquet, or the images."""
    commit = online.add("org/data", files, kind="dataset")
    path = hub.local("org/data", "dataset")
    folder = path if opened == "." else Path(str(path).removesuffix(opened))
    assert folder.name == commit and path == folder / opened
    expected = (
        {opened} if opened.endswith(".parquet") else {n for n in files if n.endswith((".png", ".jpg", "rows.jsonl"))}
    )
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == expected
    assert ("this first one is used" in capsys.readouterr().err) == ("00002" in opened)


def test_data_by_split_and_part(online):
    """Evaluation takes the test split, all of it; a part is named after a colon."""
    files = {
        f"data/{name}": b"" for name in ("train.parquet", "test-00000-of-00002.parquet", "test-00001-of-00002.parquet")
    }
    online.add("org/data", files | {"other/rows.jsonl": b""}, kind="dataset")
    folder = hub.local("org/data", "dataset", whole="test")
    assert sorted(path.name for path in folder.rglob("*.parquet")) == [
        name.removeprefix("data/") for name in sorted(files)[:2]
    ]
    assert hub.local("org/data:other", "dataset").name == "rows.jsonl"
    assert hub.local("org/data@main:data/train.parquet", "dataset").name == "train.parquet"
    with pytest.raises(
        UserError, match="has one table in 2 files .*; name one, like org/data:data/test-00000-of-00002"
    ):
        hub.local("org/data", "dataset", splits=hub.TEST)


def test_libraries_stay_offline(online, monkeypatch):
    """`only_ids` closes the network for all but ids; what the user set stands."""
    online.add("org/tiny", {"config.json": b"{}", "model.safetensors": b""})
    monkeypatch.setattr(hub, "_offline_by_default", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.offline_except_ids()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        hub.local("org/tiny")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    hub.offline_except_ids()
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert (hub.local("org/tiny") / "config.json").is_file()
    assert constants.HF_HUB_OFFLINE is True


def test_errors_are_of_the_library_that_sends_requests():
    """httpx of huggingface_hub 1, httpx2 of 2."""
    assert isinstance(get_session(), hub.http_library().Client)
