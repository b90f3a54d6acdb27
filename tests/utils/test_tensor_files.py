"""The byte level against the official safetensors library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlmcompress.utils import folders, tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.tensor_headers import FLOATS, Entry, Spec, read_entries


@pytest.fixture
def tensors():
    """One tensor of every type, of odd sizes, one empty, one scalar."""
    result = {f"t.{code}": torch.arange(7).to(dtype) for code, dtype in tensor_files.DTYPES.items()}
    return result | {"a.empty": torch.zeros(0, 3), "a.scalar": torch.tensor(2.5), "b.bf16": torch.ones(3, 5).bfloat16()}


def write(path, tensors):
    header, positions = tensor_files.layout({name: Spec.of(tensor) for name, tensor in tensors.items()})
    with path.open("wb") as file:
        tensor_files.write_at(file.fileno(), header, 0)
        for name, tensor in tensors.items():
            tensor_files.write_at(file.fileno(), tensor_files.to_bytes(tensor), positions[name])


def test_bytes_are_those_of_the_library(tmp_path, tensors):
    """Oracle: `safetensors.torch.save_file` writes the same bytes."""
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_entries_and_values(tmp_path, tensors):
    """Oracle: `safetensors.torch.load_file`."""
    save_file(tensors, tmp_path / "file")
    entries = read_entries(tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert {entry.name for entry in entries} == loaded.keys()
    for entry in entries:
        got = tensor_files.read_tensor(entry)
        assert got.dtype == loaded[entry.name].dtype and got.shape == loaded[entry.name].shape
        assert torch.equal(got.float(), loaded[entry.name].float()), entry.name


def test_copy_moves_the_bytes(tmp_path, tensors):
    save_file(tensors, tmp_path / "file")
    entry = next(e for e in read_entries(tmp_path / "file") if e.name == "b.bf16")
    with (tmp_path / "copy").open("wb") as file:
        tensor_files.copy_at(entry, file.fileno(), 3)
    assert (tmp_path / "copy").read_bytes()[3:] == bytes(tensor_files.to_bytes(tensors["b.bf16"]))


@pytest.mark.parametrize(
    ("file", "reason"), [("/proc/self/mem", "Input/output error"), ("/no/such/file", "No such file or directory")]
)
def test_a_failed_read_is_one_of_the_source(tmp_path, file, reason):
    """Not of the output that is being written meanwhile. Address 0 of a process cannot be read, as a bad sector cannot."""
    entry = Entry(Path(file), "x", Spec("BF16", (8,)), 0, 16)
    with (tmp_path / "copy").open("wb") as copy, folders.user_errors(tmp_path):
        for read in (tensor_files.read_tensor, lambda entry: tensor_files.copy_at(entry, copy.fileno(), 0)):
            with pytest.raises(UserError, match=f"cannot read {file}: {reason}; restore it and run again"):
                read(entry)


@pytest.mark.parametrize("code", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_is_not_copied(tmp_path, code, bad):
    """The largest finite numbers are."""
    tensor = torch.full((1 << 20, 2), torch.finfo(tensor_files.DTYPES[code]).min, dtype=tensor_files.DTYPES[code])
    for name in ("finite", "other"):
        save_file({"x": tensor}, tmp_path / name)
        tensor[-1, 0] = bad
    with (tmp_path / "copy").open("wb") as file:
        tensor_files.copy_at(*read_entries(tmp_path / "finite"), file.fileno(), 0)
        with pytest.raises(UserError, match="tensor 'x' holds NaN or infinity"):
            tensor_files.copy_at(*read_entries(tmp_path / "other"), file.fileno(), 0)


def damage_header(raw: bytes, change) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:5],
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: b"\xff" * 8 + raw[8:],
        lambda raw: raw[:8] + b"}" + raw[9:],
        lambda raw: damage_header(raw, lambda h: h["b.bf16"].update(shape=[3, 4])),
        lambda raw: damage_header(raw, lambda h: h["b.bf16"].update(dtype="X9")),
        lambda raw: damage_header(raw, lambda h: h["b.bf16"].pop("data_offsets")),
        lambda raw: damage_header(raw, lambda h: h["b.bf16"].update(data_offsets=[0, 30])),
    ],
)
def test_a_damaged_file_is_named(tmp_path, tensors, damage):
    path = tmp_path / "file.safetensors"
    save_file(tensors, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match="file.safetensors"):
        read_entries(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_entries(tmp_path / "none")


def test_special_files_are_no_weights(tmp_path):
    """A pipe would be waited for for ever."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="model.safetensors is not a file"):
        read_entries(tmp_path / "model.safetensors")


def test_a_header_is_read_once(tmp_path, tensors):
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    before = read_entries(path)
    assert all(a is b for a, b in zip(before, read_entries(path), strict=True))
    save_file({"a": tensors["b.bf16"]}, path)
    assert [entry.name for entry in read_entries(path)] == ["a"]


def test_split_fills_in_order():
    specs = [(str(i), Spec("U8", (size,))) for i, size in enumerate([4, 4, 4, 20, 1])]
    assert [list(shard) for shard in tensor_files.split_shards(specs, 10)] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert tensor_files.shard_names(1) == ["model.safetensors"]
    assert tensor_files.shard_names(2)[1] == "model-00002-of-00002.safetensors"
