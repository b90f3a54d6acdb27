"""Read calibration or evaluation samples from a folder of images, JSON lines, parquet, a saved data set, or the Hub.

Selection: of the rows, the `samples` with the smallest SHA-256 of `seed:id` are taken, in that order. With ids in the
data the choice does not depend on the order of rows, and adding rows replaces only some of the chosen. A row without
`id` goes by its number (a file in a folder by its path within it), a repeated id by id and number.

Only chosen rows have their images decoded. A row that cannot be used is an error that names it, never left out silently.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmcompress.common import hub, json_files
from vlmcompress.common.messages import reason
from vlmcompress.data.samples import SUFFIXES, Sample, to_sample
from vlmcompress.errors import UserError

log = logging.getLogger(__name__)

PROMPTS = (
    "Describe this image in detail.",
    "What is shown in this image?",
    "What text can be read in this image?",
    "List the objects in this image and say where each of them is.",
    "How many people or things are there in this image, and what are they doing?",
    "What colours and shapes stand out in this image?",
    "What would somebody ask about this image? Ask and answer.",
    "Is this a photo, a drawing, a chart or a document? Explain how you can tell.",
)
READ = ("image", "images", "video", "videos", "question", "answer", "messages", "conversations", "family", "text")
COLUMNS = "needs a column question (beside image, if there are images), or messages, or conversations"
TEXT_COLUMNS = "needs a column messages, conversations, question or text"
_LARGE = 256 << 20  # bytes of JSON that take some seconds to read
_FIRST = 8  # rows that a preview reads of a table with images in it
_LIKE_IMAGE = re.compile(r"(img|image|pic|photo|video|frame|file_?name)", re.IGNORECASE)
"""How a column's name begins that holds what is to be seen, under a name that is not read."""


@dataclass(frozen=True)
class _Table:
    """A table of samples, of which only the chosen rows are read."""

    name: str
    folder: Path
    columns: tuple[str, ...]
    ids: list[Any]  # one per row; None where the data has none
    rows: Callable[[list[int]], list[dict[str, Any]]]  # indices, ascending -> those rows
    row_name: Callable[[int], str]
    prompted: bool = False  # whether the questions are some of `PROMPTS`


def load_samples(
    source: str | Path,
    *,
    samples: int | None,
    seed: int,
    check_images: bool = True,
    text: bool = False,
) -> list[Sample]:
    """Read and choose samples.

    Args:
        source: folder of images, `.jsonl` / `.json` / `.parquet` file, folder written by `Dataset.save_to_disk`, or an id on
            the Hub (see `hub.local`).
        samples: how many to take; all where there are fewer. None: all, in the source's order.
        seed: decides which samples are chosen, as the module says.
        check_images: decode the images of the chosen rows now, so that a broken one is named before a long run.
        text: no sample may have an image; a column `text` stands for a question where there is none.
    """
    table, chosen = _chosen(hub.local(source, "dataset"), samples, seed, text)
    loaded = _samples(table, chosen, text)
    if check_images:
        for sample in loaded:
            for index in range(len(sample.images)):
                sample.images[index]
    return loaded


@dataclass(frozen=True)
class Preview:
    """The number of samples that `load_samples` would give, and the first of them.

    Attributes:
        count: number of samples.
        samples: the first of them; all where rows can be read without images.
    """

    count: int
    samples: list[Sample]

    @property
    def whole(self) -> bool:
        """Whether `samples` are all that `load_samples` would give."""
        return len(self.samples) == self.count


def preview(source: str | Path, *, samples: int, seed: int, text: bool = False) -> Preview | None:
    """Read rows as `load_samples` does, and see that the files of their images are there, but decode none.

    Of tables that hold the images themselves only the first rows are read. None: the data would have to be fetched, or are JSON
    of more than `_LARGE` bytes.

    Raises:
        UserError: as `load_samples`, as far as it was looked.
    """
    if hub.parse(source, "dataset") is not None:
        return None
    path = Path(source)
    binary = path.suffix.lower() == ".parquet" or (path / "dataset_info.json").is_file()
    if path.is_file() and not binary and path.stat().st_size > _LARGE:
        return None
    table, chosen = _chosen(path, samples, seed, text)
    return Preview(len(chosen), _samples(table, chosen[:_FIRST] if binary else chosen, text))


def _chosen(path: Path, samples: int | None, seed: int, text: bool) -> tuple[_Table, list[int]]:
    """The table in a path, and the numbers of its chosen rows, in their order."""
    if samples is not None and samples < 1:
        raise UserError(f"samples is {samples}; take at least 1")
    table = _open(path, text)
    if not table.ids:
        raise UserError(f"{path} has no samples; give data with at least one row")
    return table, _choose(_unique(table.ids), samples, seed)


def _samples(table: _Table, chosen: list[int], text: bool) -> list[Sample]:
    """Some rows of a table as samples; arguments as in `load_samples`."""
    identities = _unique(table.ids)
    ascending = sorted(chosen)
    rows = dict(zip(ascending, table.rows(ascending), strict=True))
    if text:
        rows = {index: {"question": row.get("text"), **row} for index, row in rows.items()}
    loaded = [
        to_sample(
            rows[index],
            identities[index],
            origin=f"{table.name} {table.row_name(index)}".strip(),
            folder=table.folder,
        )
        for index in chosen
    ]
    if table.prompted:
        loaded = [replace(sample, prompted=True) for sample in loaded]
    if shown := [sample for sample in loaded if text and sample.visual]:
        raise UserError(f"{shown[0].name} shows an image; give a file of text alone, images belong into the data")
    return loaded


def ids(source: str | Path) -> list[str | None]:
    """The ids that the rows of a source give, in its order; None for a row without."""
    return [None if value is None or value == "" else str(value) for value in _open(hub.local(source, "dataset")).ids]


def bundled(model_path: str | Path, split: str) -> Path | None:
    """The data that ships beside a demo model: `<model>/../data/<what follows demo- in its name>/<split>.parquet`."""
    model = Path(model_path).resolve()
    if not model.name.startswith("demo-"):
        return None
    path = model.parent / "data" / model.name.removeprefix("demo-") / f"{split}.parquet"
    return path if path.is_file() else None


def _choose(identities: list[str], samples: int | None, seed: int) -> list[int]:
    """Choose rows by the smallest hashes of `seed:id`; returns row numbers in that order. `samples` None: all in order."""
    if samples is None:
        return list(range(len(identities)))
    order = sorted((hashlib.sha256(f"{seed}:{name}".encode()).digest(), i) for i, name in enumerate(identities))
    return [index for _, index in order[:samples]]


def _unique(ids: list[Any]) -> list[str]:
    """Make unique ids as text: the 1-based row number where an id is missing, id and row number where it repeats."""
    names = [str(number if value is None else value) for number, value in enumerate(ids, 1)]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}#{number}" for number, name in enumerate(names, 1)]


def _open(path: Path, text: bool = False) -> _Table:
    """Open the data in `path` as a table with the columns that samples are made of."""
    table = _read(path)
    have = set(table.columns)
    if text and not have & {"messages", "conversations", "question", "text"} and table.ids:
        raise UserError(f"{path} {TEXT_COLUMNS}; found: {', '.join(sorted(have)) or 'none'}")
    if not text and not have & {"messages", "conversations", "question"} and table.ids:
        raise UserError(f"{path} {COLUMNS}; found: {', '.join(sorted(have)) or 'none'}")
    unread = sorted(name for name in have if _LIKE_IMAGE.match(name))
    if unread and not text and not have & {"image", "images", "video", "videos", "messages", "conversations"}:
        raise UserError(f"{path} has no column image, and '{unread[0]}' is not read; rename it to image, or drop it")
    return table


def _read(path: Path) -> _Table:
    try:
        if path.is_dir():
            saved = (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
            return _saved_dataset(path) if saved else _folder(path)
        refuse_missing(path)
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give data with at least one row")
        readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list, ".parquet": _parquet}
        if path.suffix.lower() not in readers:
            raise UserError(f"{path} is not .jsonl, .json or .parquet; give one of these or a folder of images")
        return readers[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check the path and permissions") from error


def refuse_missing(path: Path) -> None:
    """Raise `UserError` if nothing exists at `path`."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give a folder of images, a .jsonl or .parquet file, or a data set")


def _folder(path: Path) -> _Table:
    """Open the images of a folder and its subfolders, hidden ones left out, each with one of `PROMPTS` as its question."""
    images: list[Path] = []
    others: Counter[str] = Counter()
    for folder, subfolders, files in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for file in sorted(name for name in files if not name.startswith(".")):
            if Path(file).suffix.lower() in SUFFIXES:
                images.append(Path(folder, file).relative_to(path))
            else:
                others[Path(file).suffix.lower() or "no suffix"] += 1
    kinds = ", ".join(sorted(others))
    if not images:
        tables = sorted({".jsonl", ".json", ".parquet"} & set(others))
        hint = f"name its {' or '.join(tables)} file to use that" if tables else "give a folder with .jpg or .png files"
        raise UserError(f"{path} has no images{f', only {kinds}' if kinds else ''}; {hint}")
    if others:
        log.warning("%s: %d files that are not images are ignored (%s)", path.name, others.total(), kinds)
    names = [image.as_posix() for image in images]

    def rows(indices: list[int]) -> list[dict[str, Any]]:
        prompts = (PROMPTS[hashlib.sha256(names[index].encode()).digest()[0] % len(PROMPTS)] for index in indices)
        return [{"image": names[index], "question": prompt} for index, prompt in zip(indices, prompts, strict=True)]

    return _Table(path.name, path, ("image", "question"), list(names), rows, lambda index: names[index], True)


def _json_lines(path: Path) -> _Table:
    rows, numbers = [], []
    for number, line in enumerate(_decode(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json_files.parse(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is not valid JSON ({error}); write one object per line") from error
        rows.append(row)
        numbers.append(number)
    return _json_table(path, rows, lambda index: f"line {numbers[index]}")


def _json_list(path: Path) -> _Table:
    try:
        rows = json_files.parse(_decode(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); one object per line belongs in a .jsonl file") from error
    if not isinstance(rows, list):
        raise UserError(f"{path} holds a {type(rows).__name__}, not a list of rows")
    return _json_table(path, rows, lambda index: f"row {index + 1}")


def _decode(path: Path) -> str:
    try:
        return json_files.read_text(path, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except json_files.Unreadable as error:
        raise UserError(f"{path} cannot be read: {error}; give a file of rows") from error


def _json_table(path: Path, rows: list[Any], row_name: Callable[[int], str]) -> _Table:
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{path} {row_name(index)} is a {type(row).__name__}, not an object with named columns")
    columns = dict.fromkeys(key for row in rows for key in row)
    ids = [row.get("id") for row in rows]
    return _Table(path.name, path.parent, tuple(columns), ids, lambda chosen: [rows[i] for i in chosen], row_name)


def _parquet(path: Path) -> _Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f"reading {path} needs pyarrow; pip install '.[compress]' in the checkout of vlmcompress"
        ) from error
    try:
        file = pq.ParquetFile(path)
        columns = tuple(file.schema_arrow.names)
        count = file.metadata.num_rows
        ids = file.read(columns=["id"])["id"].to_pylist() if "id" in columns else [None] * count
    except pa.ArrowException as error:
        raise UserError(f"{path} is not readable parquet ({reason(error)}); write it again") from error

    def rows(indices: list[int]) -> list[dict[str, Any]]:
        """Read row group by row group, so that no more than one is in memory."""
        readable = [name for name in columns if name in READ]
        taken: list[dict[str, Any]] = []
        start = 0
        for group in range(file.metadata.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if local := [index - start for index in indices if start <= index < end]:
                try:
                    taken += file.read_row_group(group, columns=readable).take(local).to_pylist()
                except (pa.ArrowException, OSError) as error:
                    raise UserError(f"{path} row group {group} is damaged ({reason(error)})") from error
            start = end
        return taken

    return _Table(path.name, path.parent, columns, ids, rows, lambda index: f"row {index + 1}")


def _saved_dataset(path: Path) -> _Table:
    """Open a folder written by `Dataset.save_to_disk`, or one split of a saved `DatasetDict`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"reading {path} needs datasets; pip install '.[compress]' in the checkout of vlmcompress"
        ) from error
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever arrow, json or the library raise on a damaged folder
        raise UserError(f"{path} is not a readable saved data set ({reason(error)})") from error
    if isinstance(data, datasets.DatasetDict):
        raise UserError(f"{path} has the splits {', '.join(sorted(data))}; name one, e.g. {path / sorted(data)[0]}")
    for name, feature in data.features.items():
        if name in ("image", "images", "video", "videos"):
            data = data.cast_column(name, _undecoded(feature, datasets))
    ids = list(data["id"]) if "id" in data.column_names else [None] * len(data)

    def rows(indices: list[int]) -> list[dict[str, Any]]:
        return [data[index] for index in indices]

    return _Table(path.name, path, tuple(data.column_names), ids, rows, lambda index: f"row {index + 1}")


def _undecoded(feature: Any, datasets: Any) -> Any:
    """A `datasets` feature that gives the file of an image or video instead of its pixels, which are decoded later."""
    if isinstance(feature, datasets.Image | datasets.Video):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature, datasets))
    return feature


def load_mixed(
    source: str | Path, text: str | Path | None, *, samples: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Load `samples` samples of `source`; or, if `text` names a file of samples without images, half from each.

    LUQ (arXiv 2509.23729) mixes as many text tokens as multimodal ones. Here the numbers of samples are equal, so that
    images stay whole.
    """
    if text is None:
        return load_samples(source, samples=samples, seed=seed), []
    if samples < 2:
        raise UserError(f"calibrate.samples is {samples}; with calibrate.text take at least 2")
    pictured = load_samples(source, samples=samples // 2, seed=seed)
    texts = load_samples(text, samples=samples // 2, seed=seed, text=True)
    count = min(len(pictured), len(texts))
    return pictured[:count], texts[:count]
