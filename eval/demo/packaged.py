"""A model's weights that ship as one file in a package of the index.

The package, and another with which the file is read, are fetched by name into a folder; nothing is installed, and no code of
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
    """A file in a package.

    Attributes:
        package: its name and version, as pip takes them; `wheel`: what the names of its wheels match.
        member: the file's path in the wheel; `bytes`: its size.
        reader: packages that read it; `module`: what the first of them is imported as.
    """

    package: str
    wheel: str
    member: str
    bytes: int
    reader: tuple[str, ...]
    module: str

    def fetch(self, folder: Path) -> Path:
        """Fetch the package and the reader into ``folder``, unless they are there; returns the file.

        Raises:
            UserError: the index does not have them, or the file is not the one of this version.
        """
        path = self.file(folder)
        if not path.exists():
            wheels = folder / "wheels"
            pip("download", "-d", str(wheels), self.package)
            with zipfile.ZipFile(next(wheels.glob(self.wheel))) as wheel:
                if self.member not in wheel.namelist():
                    raise UserError(f"{self.package}: the package has no {self.member}; remove {wheels} and try again")
                (folder / "part").write_bytes(wheel.read(self.member))
            (folder / "part").rename(path)
        if path.stat().st_size != self.bytes:
            raise UserError(
                f"{path}: {path.stat().st_size} bytes, but {self.package} has {self.bytes}; remove the file and try again"
            )
        if not (folder / "reader" / self.module).exists():
            pip("install", "--target", str(folder / "reader"), *self.reader)
        return path

    def file(self, folder: Path) -> Path:
        """Where the file lies in ``folder`` once it is fetched."""
        return folder / Path(self.member).name


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
