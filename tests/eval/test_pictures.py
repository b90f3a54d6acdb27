"""The list of pictures and the packages that they are fetched from; errors are one line."""

from __future__ import annotations

import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from eval.photo import pictures, resources
from eval.photo.pictures import BACKGROUND, PHOTOGRAPHS, SOURCES, Picture, Source, read_list
from vlmcompress.utils.errors import UserError


def test_the_list_keeps_splits_apart():
    """Every name has pictures for every split, and no file is listed twice."""
    listed = read_list()
    assert len({(picture.source, picture.file) for picture in listed}) == len(listed) > 1000
    for name in {picture.name for picture in listed}:
        assert {picture.split for picture in listed if picture.name == name} == {"train", "validation", "test"}


def test_photographs_are_none_of_training():
    """All are for tests; stamps among them are of the splits that no training saw, under the same name."""
    listed, trained = read_list(PHOTOGRAPHS), {(picture.source, picture.file): picture for picture in read_list()}
    assert len({(picture.source, picture.file) for picture in listed}) == len(listed) >= 80
    assert {picture.source for picture in listed if picture.name != BACKGROUND} == {"stamps", "gcompris"}
    for picture in listed:
        other = trained.get((picture.source, picture.file))
        assert picture.split == "test" and (picture.source == "gcompris") == (other is None)
        assert other is None or (other.split != "train" and other.name == picture.name)


def resource_file(version: int) -> bytes:
    """A resource file with `/animals/cat.png`, stored, and `/cat.webp`, compressed."""
    names = b"".join(
        struct.pack(">HI", len(name), 0) + name.encode("utf-16-be") for name in ("animals", "cat.png", "cat.webp")
    )
    stored, packed = b"a cat", zlib.compress(b"another cat")
    contents = struct.pack(">I", len(stored)) + stored
    second = len(contents)
    contents += struct.pack(">II", len(packed) + 4, 11) + packed
    rest = b"" if version == 1 else bytes(8)  # when it was changed
    nodes = [
        struct.pack(">IHII", 0, resources.FOLDER, 2, 1),
        struct.pack(">IHII", 0, resources.FOLDER, 1, 3),
        struct.pack(">IHII", 20 + 20, resources.COMPRESSED, 0, second),
        struct.pack(">IHII", 20, 0, 0, 0),
    ]
    tree = b"".join(node + rest for node in nodes)
    at = [20, 20 + len(tree), 20 + len(tree) + len(contents)]
    return struct.pack(">4s4I", b"qres", version, *at) + tree + contents + names


@pytest.mark.parametrize("version", [1, 2])
def test_a_resource_file_is_read(tmp_path, version):
    path = tmp_path / "x.rcc"
    path.write_bytes(resource_file(version))
    assert resources.content(path, "animals/cat.png") == b"a cat"
    assert resources.content(path, "cat.webp") == b"another cat"
    with pytest.raises(ValueError, match=r"no resource file with one dog\.png"):
        resources.content(path, "dog.png")
    path.write_bytes(resource_file(version)[:40])
    with pytest.raises(ValueError, match="no resource file"):
        resources.content(path, "cat.webp")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train\t\tstamps\ta.png", "a picture needs a split, a name"),
        ("train\tcat\tphotos\ta.png", "no source is called 'photos'"),
    ],
)
def test_a_wrong_list_is_one_line(tmp_path, line, message):
    path = tmp_path / "list.tsv"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        read_list(path)


def deb(folder: Path, name: str, version: str, content: bytes) -> None:
    """A real Debian package with one picture."""
    root = folder / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: x\n"
    )
    (root / "usr").mkdir()
    (root / "usr/cat.png").write_bytes(content)
    subprocess.run(
        ["dpkg-deb", "-b", str(root), str(folder / f"{name}_{version}_all.deb")], check=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("version", "content", "message"),
    [
        (None, b"", "no-such-pictures cannot be had|there is no apt-get here"),
        (
            "2.0",
            b"",
            "version 2.0, but the pictures are those of 1.0; run: cd .* && apt-get download -qq no-such-pictures=1.0",
        ),
        ("1.0", b"\x89PNG but no more", r"cat.png: this picture can't be read"),
    ],
)
def test_pictures_that_cannot_be_had_are_one_line(tmp_path, monkeypatch, version, content, message):
    monkeypatch.setitem(SOURCES, "stamps", Source("no-such-pictures", "1.0", "usr"))
    monkeypatch.setattr(pictures, "read_list", lambda _: [Picture(0, "train", "cat", "stamps", "cat.png")])
    packages = tmp_path / "packages"
    packages.mkdir()
    if version:
        deb(packages, "no-such-pictures", version, content)
    with pytest.raises(UserError, match=message):
        pictures.fetch(tmp_path)
    assert not list((tmp_path / "pictures").glob("*.png"))
