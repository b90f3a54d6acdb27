"""The list of pictures and the packages that they are fetched from; errors are one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from eval.photo import pictures
from eval.photo.pictures import SOURCES, Picture, Source, read_list
from vlmcompress.utils.errors import UserError


def test_the_list_keeps_splits_apart():
    """Every name has pictures for every split, and no file is listed twice."""
    listed = read_list()
    assert len({(picture.source, picture.file) for picture in listed}) == len(listed) > 1000
    for name in {picture.name for picture in listed}:
        assert {picture.split for picture in listed if picture.name == name} == {"train", "validation", "test"}


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
    monkeypatch.setattr(pictures, "read_list", lambda: [Picture(0, "train", "cat", "stamps", "cat.png")])
    packages = tmp_path / "packages"
    packages.mkdir()
    if version:
        deb(packages, "no-such-pictures", version, content)
    with pytest.raises(UserError, match=message):
        pictures.fetch(tmp_path)
    assert not list((tmp_path / "pictures").glob("*.png"))
