"""Named pictures out of packages of Debian and npm: which ones, how they are fetched, and their splits.

`pictures.tsv` has a line for each: split, name, source, and the file within the package (for a font: the character; in Qt's
resource files: that file and the one in it). They are emoji, clip art and stamps. No picture is in two splits, nor are two of
a name that look the same to the tower (cosine of their class tokens above 0.95). `photographs.tsv` lists photographs alone,
for tests: the stamps of validation and test that are some, with the thing cut out, and GCompris's, with what is around it.
Nothing is installed, and no picture is part of the repository.
"""

import csv
import io
import subprocess
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from vlmcompress.utils.errors import UserError

from . import resources

LIST = Path(__file__).with_name("pictures.tsv")
PHOTOGRAPHS = Path(__file__).with_name("photographs.tsv")
BACKGROUND = "background"  # the name of photographs that scenes stand on
LONGEST, BACKGROUND_LONGEST = 256, 640  # pixels of a kept picture


@dataclass(frozen=True)
class Source:
    """A package of pictures, of Debian's or npm's, and the folder in it (a font: its file)."""

    package: str
    version: str
    root: str
    npm: bool = False

    def get(self) -> list[str]:
        """The command that fetches the package's file into the current folder."""
        if self.npm:
            return ["npm", "pack", "--silent", f"{self.package}@{self.version}"]
        return ["apt-get", "download", "-qq", f"{self.package}={self.version}"]

    def file(self) -> str:
        """The name of that file, as a pattern."""
        if self.npm:
            return f"{self.package.lstrip('@').replace('/', '-')}-{self.version}.tgz"
        return f"{self.package}_*.deb"


SOURCES = {
    "stamps": Source("tuxpaint-stamps-default", "2022.06.04-1", "usr/share/tuxpaint/stamps"),
    "clipart": Source("openclipart-png", "1:0.18+dfsg-19", "usr/share/openclipart/png"),
    "noto": Source("fonts-noto-color-emoji", "2.042-0+deb12u1", "usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"),
    "gemojione": Source(
        "ruby-gemojione", "3.3.0-1", "usr/share/rubygems-integration/all/gems/gemojione-3.3.0/assets/png"
    ),
    "twitter": Source("emoji-datasource-twitter", "16.0.0", "package/img/twitter/64", npm=True),
    "fluent": Source("@lobehub/fluent-emoji-3d", "1.1.0", "package/assets", npm=True),
    "mate": Source("mate-backgrounds", "1.26.0-1", "usr/share/backgrounds/mate/nature"),
    "lomiri16": Source("lomiri-wallpapers-16.04", "20.04.0-2", "usr/share/backgrounds"),
    "lomiri20": Source("lomiri-wallpapers-20.04", "20.04.0-2", "usr/share/backgrounds"),
    "gcompris": Source("gcompris-qt-data", "3.1-2", "usr/share/gcompris-qt/rcc"),
}


@dataclass(frozen=True)
class Picture:
    """A line of the list. `number` counts lines and names the kept file."""

    number: int
    split: str
    name: str
    source: str
    file: str


def read_list(path: Path = LIST) -> list[Picture]:
    """The pictures of a list.

    Raises:
        UserError: a line has no name, or a source that is not in `SOURCES`.
    """
    pictures = []
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.reader(lines, delimiter="\t")):
            if len(row) != 4 or not all(part.strip() for part in row):
                raise UserError(f"{path}, line {number + 1}: a picture needs a split, a name, a source and a file")
            if row[2] not in SOURCES:
                raise UserError(
                    f"{path}, line {number + 1}: no source is called '{row[2]}'; there are {', '.join(SOURCES)}"
                )
            pictures.append(Picture(number, *row))
    return pictures


class Album:
    """Pictures in `folder`, small and cut to what is drawn, by split and name."""

    def __init__(self, folder: Path, pictures: list[Picture] | None = None):
        self.folder = folder
        self.pictures = read_list() if pictures is None else pictures
        self.by_name: dict[tuple[str, str], list[int]] = {}
        for picture in self.pictures:
            self.by_name.setdefault((picture.split, picture.name), []).append(picture.number)
        self.names = sorted({picture.name for picture in self.pictures} - {BACKGROUND})
        self.image = lru_cache(maxsize=2000)(self._image)

    def _image(self, number: int) -> Image.Image:
        with Image.open(self.folder / f"{number:04d}.png") as image:
            return image.convert("RGBA")

    def numbers(self, split: str, name: str) -> list[int]:
        """The pictures of a name that a split may use; calibration uses those of training."""
        return self.by_name.get(("train" if split == "calibration" else split, name), [])


def fetch(cache: Path, packages: Path | None = None, listed: Path = LIST) -> Album:
    """Fetch a list's pictures into a folder of `cache` named like it, unless they are there, by way of the packages' files in
    `packages`.

    Raises:
        UserError: a package cannot be had or is of another version, or one of its pictures can't be read.
    """
    cache = cache.resolve()
    pictures, folder = read_list(listed), cache / listed.stem
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        path = folder / f"{picture.number:04d}.png"
        if path.exists():
            continue
        image = _opened(picture, _unpacked(SOURCES[picture.source], packages or cache / "packages"))
        part = path.with_suffix(".part")
        image.save(part, format="PNG")
        part.rename(path)
    return Album(folder, pictures)


@cache
def _unpacked(source: Source, files: Path) -> Path:
    """The folder that holds the package's files."""
    out = files / source.package
    if (out / "done").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    advice = f"run: cd {files} && {' '.join(source.get())}"
    if not list(files.glob(source.file())):
        _run(source.get(), files, source.package, advice)
    file = next(iter(sorted(files.glob(source.file()))))
    if source.npm:
        _run(["tar", "-xzf", str(file), "-C", str(out), source.root], files, source.package, advice)
    else:
        version = _run(["dpkg-deb", "-f", str(file), "Version"], files, source.package, advice).strip()
        if version != source.version:
            raise UserError(f"{file}: version {version}, but the pictures are those of {source.version}; {advice}")
        _run(["dpkg-deb", "-x", str(file), str(out)], files, source.package, advice)
    (out / "done").touch()
    return out


def _run(command: list[str], folder: Path, package: str, advice: str) -> str:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UserError(
            f"{package}: there is no {command[0]} here; {advice}, where there is, and copy the file"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{package} cannot be had ({reason}); {advice}") from error


def _opened(picture: Picture, unpacked: Path) -> Image.Image:
    """The picture in RGBA, cut to what is drawn and at most `LONGEST` pixels long."""
    source = SOURCES[picture.source]
    path = unpacked / source.root
    path = path if path.suffix == ".ttf" else path / picture.file
    try:
        image = _glyph(path, picture.file) if path.suffix == ".ttf" else _decoded(path)
        box = image.getchannel("A").point(lambda alpha: 255 * (alpha > 16)).getbbox()
    except (OSError, ValueError, UnidentifiedImageError) as error:
        raise UserError(
            f"{path}: this picture can't be read ({error}); {source.package} should be {source.version}"
        ) from error
    if box is None:
        raise UserError(f"{path}: nothing is drawn for '{picture.file}'; {source.package} should be {source.version}")
    image = image.crop(box)
    image.thumbnail((LONGEST, LONGEST) if picture.name != BACKGROUND else (BACKGROUND_LONGEST,) * 2)
    return image


def _decoded(path: Path) -> Image.Image:
    archive, inside, file = str(path).partition(".rcc/")
    with Image.open(io.BytesIO(resources.content(Path(f"{archive}.rcc"), file)) if inside else path) as image:
        image.draft("RGB", (BACKGROUND_LONGEST, BACKGROUND_LONGEST))  # JPEG alone: decodes a smaller one
        return image.convert("RGBA")


def _glyph(path: Path, code: str) -> Image.Image:
    """A character of a colour font, at the one size that it has."""
    image = Image.new("RGBA", (136, 128))
    ImageDraw.Draw(image).text((0, 0), chr(int(code, 16)), font=ImageFont.truetype(path, 109), embedded_color=True)
    return image
