"""Read calibration or evaluation samples from a folder of images, JSON lines, CSV, TSV, parquet, a saved data set, or the Hub.

Selection: the `samples` rows with the smallest SHA-256 of `seed:id` are taken, in that order. With ids in the data the choice
does not depend on the order of rows, and adding rows replaces only some of the chosen. A row without `id` uses its number
(a file in a folder its relative path), a repeated id is combined with the number.

Only images of chosen rows are decoded. Unusable rows are never left out silently: all are listed in one error or, within the
limit of `Reading.skip_bad`, in notes; then the next rows in the order replace them.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import hashlib
import io
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.models.data import layouts
from vlmcompress.models.data.samples import LazyImages, Sample, to_sample
from vlmcompress.utils import hub, json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.images import SUFFIXES
from vlmcompress.utils.messages import error_text, note

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

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
LINE = 64 << 20
"""Most characters of a line of JSON: room for some images in base64."""
DECODED = 64 << 20
"""Most bytes of image files that a preview decodes; of further ones it reads headers only."""
_LARGE = 256 << 20  # bytes of JSON beyond which reading takes seconds
_FIRST = 8  # rows that a preview reads from a table that contains images
_LONGEST_ID = 10_000  # bytes
_NAMED = 20  # most bad rows that a message lists


@dataclass(frozen=True)
class Reading:
    """How the rows of a source are read.

    Attributes:
        columns: field (of `layouts.FIELDS`) -> the column that it is read from.
        skip_bad: how many unusable rows may be skipped: below 1 a share, else a number.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    skip_bad: float = 0

    @classmethod
    def of(cls, settings: Any) -> Reading:
        """The reading for a recipe's `calibrate` settings."""
        return cls(settings.columns, settings.skip_bad)

    def allows(self, bad: int, total: int) -> bool:
        """Whether `bad` of `total` rows may be skipped."""
        return bad <= (self.skip_bad * total if self.skip_bad < 1 else self.skip_bad)


PLAIN = Reading()
"""The default: columns by their common names, and no bad row allowed."""


class Samples(list[Sample]):
    """A list of samples with the `skipped` rows: the row's name -> reason."""

    def __init__(self, samples: Iterable[Sample] = (), skipped: Mapping[str, str] | None = None):
        super().__init__(samples)
        self.skipped = dict(skipped or {})


@dataclass(frozen=True)
class _Table:
    """A table of samples, of which only the chosen rows are read."""

    name: str
    folder: Path
    columns: tuple[str, ...]
    ids: list[Any]  # one per row; None where the data has none
    rows: Callable[[list[int]], list[dict[str, Any]]]  # indices, ascending -> those rows
    row_name: Callable[[int], str]
    prompted: bool = False  # whether questions come from `PROMPTS`
    captioned: bool = False  # whether the question is `layouts.CAPTIONED`
    broken: Mapping[int, str] = field(default_factory=dict)  # index of an entry that is not a row -> reason

    @cached_property
    def identities(self) -> list[str]:
        """A unique id of each row."""
        return _unique(self.ids)

    def prompt(self, index: int) -> str | None:
        """The default question for a row; None if the data have questions."""
        if not self.prompted:
            return None
        if self.captioned:
            return layouts.CAPTIONED
        return PROMPTS[hashlib.sha256(self.identities[index].encode()).digest()[0] % len(PROMPTS)]


def load_samples(
    source: str | Path,
    *,
    samples: int | None,
    seed: int,
    decode_images: bool = True,
    text: bool = False,
    answered: bool = False,
    reading: Reading = PLAIN,
) -> Samples:
    """Read and choose samples.

    Args:
        source: folder of images, file of rows (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`), folder written by
            `Dataset.save_to_disk`, or an id on the Hub (see `hub.local`).
        samples: how many to take; all if there are fewer. None: all, in the source's order.
        seed: determines which samples are chosen (see the module).
        decode_images: decode the images of the chosen rows now, so that broken ones are reported before a long run.
        text: samples must be text only; a column `text` can replace the question.
        answered: every sample must have an answer.

    Raises:
        UserError: the source is missing or unreadable, or more rows are bad than `reading` allows.
    """
    path = hub.local(source, "dataset")
    table = _open(path, reading.columns, text, answered)
    rows = _Rows(table, reading, text, answered, _open_images if decode_images else lambda _: 0)
    loaded = rows.chosen(_order(table, path, samples, seed), samples)
    for line in skipped_lines(loaded.skipped):
        note(line)
    return loaded


@dataclass(frozen=True)
class Preview:
    """The number of samples that `load_samples` would give, and the first of them.

    Attributes:
        count: number of samples.
        samples: the first of them; all if rows can be read without their images.
        decoded: number of samples whose images were decoded; of other images only the headers were read.
    """

    count: int
    samples: list[Sample]
    decoded: int

    @property
    def whole(self) -> bool:
        """Whether `samples` are all that `load_samples` would give."""
        return len(self.samples) == self.count

    @property
    def text(self) -> str:
        """A phrase for how much of the data was read."""
        if not self.whole:
            return f"the first {len(self.samples)} rows were read"
        pictured = sum(bool(sample.images) for sample in self.samples)
        images = " and images" if self.decoded == pictured else f" and the images of {self.decoded}"
        return f"all rows{images if pictured else ''} were read"


def preview(
    source: str | Path, *, samples: int, seed: int, text: bool = False, reading: Reading = PLAIN
) -> Preview | None:
    """Read rows as `load_samples` does and open their images; at most `DECODED` bytes of them are decoded.

    From tables that contain the images only the first rows are read. Returns None if the data would have to be downloaded, or
    are JSON of more than `_LARGE` bytes.

    Raises:
        UserError: as for `load_samples`, for the rows that were read.
    """
    if hub.parse_repository(source, "dataset") is not None:
        return None
    path = Path(source)
    # These hold images between the rows; to read all rows is to read all images.
    binary = path.suffix.lower() == ".parquet" or (path / "dataset_info.json").is_file()
    if path.is_file() and not binary and path.stat().st_size > _LARGE:
        return None
    table = _open(path, reading.columns, text)
    room, decoded = [DECODED], [0]

    def look(sample: Sample) -> None:
        # The first images are decoded, of the others headers are read, so that a preview of any data takes seconds.
        fits = room[0] > 0
        room[0] -= _open_images(sample, decode=fits)
        decoded[0] += fits and bool(sample.images)

    order = _order(table, path, samples, seed)
    rows = _Rows(table, reading, text, False, look).chosen(order, min(samples, _FIRST) if binary else samples)
    count = min(samples, len(order)) if binary else len(rows)
    return Preview(count, rows, decoded[0])


def require_answers(source: str | Path, columns: Mapping[str, str]) -> None:
    """Raise `UserError` for data that are missing or have no answers, as `load_samples` would, if that takes no time."""
    path = Path(source)
    here = hub.parse_repository(source, "dataset") is None and not (path / "dataset_info.json").is_file()
    if here and not (path.is_file() and path.stat().st_size > _LARGE):
        _open(path, columns, answered=True)


def _order(table: _Table, path: Path, samples: int | None, seed: int) -> list[int]:
    """The numbers of all rows in order of their hashes, or in the table's order if `samples` is None."""
    if samples is not None and samples < 1:
        raise UserError(f"samples is {samples}; take at least 1")
    if not table.ids:
        raise UserError(f"{path} has no samples; give data with at least one row")
    return _choose(table.identities, None if samples is None else len(table.ids), seed)


def _open_images(sample: Sample, decode: bool = True) -> int:
    """Open or decode a sample's images; returns the bytes of their files."""
    return sample.images.open_all(decode) if isinstance(sample.images, LazyImages) else 0


@dataclass(frozen=True)
class _Rows:
    """The rows of a table as samples; see `load_samples`. `look` checks a sample's images and raises `UserError`."""

    table: _Table
    reading: Reading
    text: bool
    answered: bool
    look: Callable[[Sample], Any]

    def chosen(self, order: list[int], samples: int | None) -> Samples:
        """The first `samples` usable rows in the given order, or all.

        Raises:
            UserError: more rows are bad than allowed; the message lists them in the table's order.
        """
        bad = dict(self.table.broken)
        good: dict[int, Sample] = {}
        rest = [index for index in order if index not in bad]
        room = len(rest) if samples is None else samples
        while batch := rest[: room - len(good)]:
            # Where bad rows are skipped, the next in the order take their places, until enough are good or none is left.
            rest = rest[len(batch) :] if self.reading.skip_bad else []
            # Tables read forwards; the order is that of the hashes.
            rows = dict(zip(sorted(batch), self.table.rows(sorted(batch)), strict=True))
            for index in batch:
                try:
                    good[index] = self._sample(index, rows[index])
                except UserError as error:
                    bad[index] = " ".join(str(error).split())  # the message may quote the row
        total = len(good) + len(bad)
        if bad and not self.reading.allows(len(bad), total):
            # The run ends in any case: one message then lists the images that a preview did not decode, too.
            late = undecodable(good.values())
            bad |= {index: late[sample.name] for index, sample in good.items() if sample.name in late}
        if bad:
            names = {self._name(index): bad[index] for index in sorted(bad)}
            if not self.reading.allows(len(bad), total) or not good:
                raise UserError(bad_samples_message(self.table.name, names, total, self.reading.skip_bad))
            return Samples(good.values(), names)
        return Samples(good.values())

    def _name(self, index: int) -> str:
        return f"{self.table.name} {self.table.row_name(index)}".strip()

    def _sample(self, index: int, row: dict[str, Any]) -> Sample:
        table, name = self.table, self._name(index)
        identity, raw = table.identities[index], table.ids[index]
        # NaN is what pandas writes for a missing value.
        row = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}
        prompt = table.prompt(index)
        fields = layouts.standard_row(row, self.reading.columns, prompt)
        if self.text and fields.get("question") is None:
            fields["question"] = row.get("text")
        sample = to_sample(fields, identity, origin=name, folder=table.folder)
        sample = replace(sample, prompted=prompt is not None, row_id=None if raw is None or raw == "" else str(raw))
        if self.text and sample.visual:
            raise UserError(f"{name} shows an image; give a file of text alone, images belong into the data")
        if self.answered and not (sample.answer or "").strip():
            raise UserError(f"{name} has no answer, so nothing can be scored; give every row an `answer`")
        self.look(sample)
        return sample


def undecodable(samples: Iterable[Sample]) -> dict[str, str]:
    """Samples with an image that cannot be decoded: name -> reason."""
    bad = {}
    for sample in samples:
        try:
            _open_images(sample)
        except UserError as error:
            bad[sample.name] = str(error)
    return bad


def bad_samples_message(source: str, bad: Mapping[str, str], total: int, skip_bad: float = 0) -> str:
    """Format the message that samples of a source cannot be used.

    Args:
        bad: name of each bad sample -> its message, which begins with the name.
        total: number of samples, including bad ones.
        skip_bad: see `Reading`.
    """
    lines = list(bad.values())
    if len(lines) == 1 and not skip_bad:
        return lines[0]
    allowed = f", more than skip_bad {skip_bad:g} allows" if skip_bad else ""
    reasons: dict[str, list[str]] = {}
    for name, line in bad.items():
        what = line.removeprefix(name).lstrip(": ").partition("; ")[0]
        reasons.setdefault(what, []).append(name.removeprefix(source).strip() or name)
    parts = []
    for what, names in list(reasons.items())[:_NAMED]:
        rest = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        parts.append(f"{', '.join(names[:_NAMED])}{rest}: {what}")
    parts += [f"and {len(reasons) - _NAMED} others"] if len(reasons) > _NAMED else []
    remedy = f"mend or drop them, or skip them with --skip-bad {len(bad)}" if len(bad) < total else "mend them"
    return f"{source}: {len(bad)} of {total} samples cannot be used{allowed}: {'; '.join(parts)}; {remedy}"


def skipped_lines(bad: Mapping[str, str]) -> list[str]:
    """Notes about skipped samples; `bad` as in `bad_samples_message`."""
    lines = [f"skipped: {line.removesuffix('; drop it')}" for line in bad.values()]
    return lines if len(lines) <= _NAMED else [*lines[:_NAMED], f"skipped: {len(lines) - _NAMED} others"]


def bundled_data(model_path: str | Path, split: str) -> Path | None:
    """The data bundled with a demo model: `<model>/../data/<what follows demo- in its name>/<split>.parquet`."""
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
    names = [_printable(str(number if value is None else value)) for number, value in enumerate(ids, 1)]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}#{number}" for number, name in enumerate(names, 1)]


def _open(path: Path, columns: Mapping[str, str], text: bool = False, answered: bool = False) -> _Table:
    """Open the data in `path` as a table, and check that it has the columns for samples."""
    table = _read(path, columns, answered)
    if table.prompted and answered:
        raise UserError(
            f"{path} is a folder of images, without answers to score; give a file with questions and answers"
        )
    if not table.ids or table.prompted:
        return table
    if problem := layouts.columns_problem(table.columns, columns, text):
        raise UserError(f"{path} {problem}")
    prompted = None if text else layouts.prompted(table.columns, columns)
    if prompted == "prompts" and answered:
        listed = ", ".join(sorted(table.columns))
        raise UserError(
            f"{path} needs columns question and answer; found: {listed}; name them by --columns question=A,answer=B"
        )
    return replace(table, prompted=prompted is not None, captioned=prompted == "captions")


def _read(path: Path, columns: Mapping[str, str], answered: bool) -> _Table:
    try:
        if path.is_dir():
            saved = any((path / file).is_file() for file in hub.SAVED)
            return _saved_dataset(path, columns) if saved else _folder(path)
        hub.require_data(path, answered=answered)
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty; give data with at least one row")
        readers = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list, ".parquet": _parquet}
        readers |= {".csv": _separated, ".tsv": _separated}
        if path.suffix.lower() not in readers:
            raise UserError(f"{path} is not {', '.join(readers)}; give one of these or a folder of images")
        return readers[path.suffix.lower()](path, columns)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); check the path and permissions") from error


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
        tables = sorted({".jsonl", ".json", ".csv", ".tsv", ".parquet"} & set(others))
        hint = f"name its {' or '.join(tables)} file to use that" if tables else "give a folder with .jpg or .png files"
        raise UserError(f"{path} has no images{f', only {kinds}' if kinds else ''}; {hint}")
    if others:
        log.warning("%s: %d files that are not images are ignored (%s)", path.name, others.total(), kinds)
    names = [_printable(image.as_posix()) for image in images]

    def rows(indices: list[int]) -> list[dict[str, Any]]:
        return [{"image": images[index].as_posix()} for index in indices]

    return _Table(path.name, path, ("image",), list(names), rows, lambda index: names[index], True)


def _printable(name: str) -> str:
    """A file name with bytes that are not UTF-8 escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def _json_lines(path: Path, columns: Mapping[str, str]) -> _Table:
    rows, numbers, broken = list[Any](), list[int](), dict[int, str]()
    for number, line in enumerate(_decode(path).split("\n"), 1):
        if not line.strip():
            continue
        row: Any = {}
        try:
            if len(line) > LINE:
                raise ValueError(f"it has {len(line):,} characters, more than {LINE:,}")
            row = json_files.parse_json(line)
        except ValueError as error:
            broken[len(rows)] = f"{path.name} line {number} is not valid JSON ({error}); write one object per line"
        rows.append(row)
        numbers.append(number)
    return _json_table(path, rows, lambda index: f"line {numbers[index]}", columns, broken)


def _json_list(path: Path, columns: Mapping[str, str]) -> _Table:
    try:
        rows = json_files.parse_json(_decode(path))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); one object per line belongs in a .jsonl file") from error
    if not isinstance(rows, list):
        raise UserError(f"{path} holds a {type(rows).__name__}, not a list of rows")
    return _json_table(path, rows, lambda index: f"row {index + 1}", columns, {})


def _separated(path: Path, columns: Mapping[str, str]) -> _Table:
    """Open a CSV or TSV file with a head; empty cells are missing values, and all others text.

    VLMEvalKit's TSV files (`layouts` reads their options) have an `index`, and instead of an image in base64 may give the
    index of the row that has it.
    """
    csv.field_size_limit(LINE)
    lines = io.StringIO(_decode(path), newline="")
    reader = csv.DictReader(lines, dialect="excel-tab" if path.suffix.lower() == ".tsv" else "excel", strict=True)
    rows, numbers, broken = list[Any](), list[int](), dict[int, str]()
    names = reader.fieldnames or []
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{path} has two columns '{twice[0]}'; rename one")
    try:
        for row in reader:
            if None in row or None in row.values():
                broken[len(rows)] = (
                    f"{path.name} line {reader.line_num} has {'more' if None in row else 'fewer'} cells than the first line "
                    f"({len(names)}); put quotation marks around a text with separators or line breaks"
                )
            rows.append({name: value for name, value in row.items() if name and value != ""})
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num} is no row ({error}); write the file again") from error
    if "index" in names and "id" not in names:
        images = {row["index"]: row["image"] for row in rows if "index" in row and "image" in row}
        for row in rows:
            row["id"] = row.get("index")
            if "image" in row:
                row["image"] = images.get(row["image"], row["image"])
    for row in rows:  # several images in a cell, as JSON or as Python writes a list
        for name in {"image", "image_path"} & row.keys():
            if row[name].startswith("["):
                with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                    row[name] = ast.literal_eval(row[name])
    return _json_table(path, rows, lambda index: f"line {numbers[index]}", columns, broken, names)


def _decode(path: Path) -> str:
    try:
        return json_files.read_text(path, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from error
    except json_files.Unreadable as error:
        raise UserError(f"{path} cannot be read: {error}; give a file of rows") from error


def _json_table(
    path: Path,
    rows: list[Any],
    row_name: Callable[[int], str],
    columns: Mapping[str, str],
    broken: dict[int, str],
    head: Sequence[str] = (),
) -> _Table:
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            what = f"{path.name} {row_name(index)} is a {type(row).__name__}"
            broken[index], rows[index] = f"{what}, not an object with named columns; write one, or drop it", {}
    names = dict.fromkeys([*head, *(key for row in rows for key in row)])
    if len(broken) == len(rows) and rows:
        raise UserError(
            bad_samples_message(path.name, {f"{path.name} {row_name(i)}": why for i, why in broken.items()}, len(rows))
        )
    ids = [row.get(columns.get("id", "id")) for row in rows]
    return _Table(
        path.name,
        path.parent,
        tuple(names),
        ids,
        lambda chosen: [rows[index] for index in chosen],
        row_name,
        broken=broken,
    )


def _parquet(path: Path, columns: Mapping[str, str]) -> _Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            f"reading {path} needs pyarrow; pip install '.[compress]' in the checkout of vlmcompress"
        ) from error
    try:
        file = pq.ParquetFile(path)
        names = tuple(file.schema_arrow.names)
        count, key = file.metadata.num_rows, columns.get("id", "id")
        ids = _parquet_ids(path, file, key) if key in names else [None] * count
    except pa.ArrowException as error:
        raise UserError(f"{path} is not readable parquet ({error_text(error)}); write it again") from error

    def rows(indices: list[int]) -> list[dict[str, Any]]:
        """Read row group by row group, so that no more than one is in memory."""
        readable = layouts.read_of(names, columns)
        taken: list[dict[str, Any]] = []
        start = 0
        for group in range(file.metadata.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if local := [index - start for index in indices if start <= index < end]:
                try:
                    taken += file.read_row_group(group, columns=readable).take(local).to_pylist()
                except (pa.ArrowException, OSError) as error:
                    raise UserError(f"{path} row group {group} is damaged ({error_text(error)})") from error
            start = end
        return taken

    return _Table(path.name, path.parent, names, ids, rows, lambda index: f"row {index + 1}")


def _parquet_ids(path: Path, file: ParquetFile, key: str) -> list[Any]:
    """The values of the column `key`. Raises `UserError` for texts that are too long to be ids."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    kind = file.schema_arrow.field(key).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return file.read(columns=[key])[key].to_pylist()
    # as a dictionary, in which a text is once that is stored once for many rows
    column = pq.ParquetFile(path, read_dictionary=[key]).read(columns=[key])[key]
    longest = max((pc.max(pc.binary_length(part.dictionary)).as_py() or 0 for part in column.chunks), default=0)
    if longest > _LONGEST_ID:
        raise UserError(
            f"{path} has an id of {longest:,} bytes, more than {_LONGEST_ID:,}; name another column by --columns id=A"
        )
    return column.to_pylist()


def _saved_dataset(path: Path, columns: Mapping[str, str]) -> _Table:
    """Open a folder written by `Dataset.save_to_disk`, or one split of a saved `DatasetDict`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"reading {path} needs datasets; pip install '.[compress]' in the checkout of vlmcompress"
        ) from error
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # arrow, json and the library raise many types on a damaged folder
        raise UserError(f"{path} is not a readable saved data set ({error_text(error)})") from error
    if isinstance(data, datasets.DatasetDict):
        raise UserError(f"{path} has the splits {', '.join(sorted(data))}; name one, e.g. {path / sorted(data)[0]}")
    for name, feature in data.features.items():
        if (encoded := _undecoded(feature, datasets)) != feature:
            data = data.cast_column(name, encoded)
    key = columns.get("id", "id")
    ids = list(data[key]) if key in data.column_names else [None] * len(data)

    def rows(indices: list[int]) -> list[dict[str, Any]]:
        return [data[index] for index in indices]

    return _Table(path.name, path, tuple(data.column_names), ids, rows, lambda index: f"row {index + 1}")


def _undecoded(feature: Any, datasets: Any) -> Any:
    """A `datasets` feature that returns an image's or video's file instead of its pixels, which are decoded later."""
    if isinstance(feature, datasets.Image | datasets.Video):
        return type(feature)(decode=False)
    if isinstance(feature, datasets.List):
        return datasets.List(_undecoded(feature.feature, datasets))
    return feature


def load_mixed(
    source: str | Path, text: str | Path | None, *, samples: int, seed: int, reading: Reading = PLAIN
) -> tuple[Samples, Samples]:
    """Load `samples` samples of `source`; or, if `text` names a file of samples without images, half from each.

    LUQ (arXiv 2509.23729) mixes equal numbers of text tokens and multimodal tokens. Here the numbers of samples are equal, so
    that no image is cut. `reading.columns` apply to `source`.
    """
    if text is None:
        return load_samples(source, samples=samples, seed=seed, reading=reading), Samples()
    half, plain = _half(samples), Reading(skip_bad=reading.skip_bad)
    pictured = load_samples(source, samples=half, seed=seed, reading=reading)
    texts = load_samples(text, samples=half, seed=seed, text=True, reading=plain)
    count = min(len(pictured), len(texts))
    return Samples(pictured[:count], pictured.skipped), Samples(texts[:count], texts.skipped)


def preview_mixed(
    source: str | Path, text: str | Path | None, *, samples: int, seed: int, reading: Reading = PLAIN
) -> Preview | None:
    """A look at the samples that `load_mixed` would give; see `preview`."""
    if text is None:
        return preview(source, samples=samples, seed=seed, reading=reading)
    half, plain = _half(samples), Reading(skip_bad=reading.skip_bad)
    pictured = preview(source, samples=half, seed=seed, reading=reading)
    texts = preview(text, samples=half, seed=seed, text=True, reading=plain)
    if pictured is None or texts is None:
        return None
    count = min(pictured.count, texts.count)
    return Preview(2 * count, [*pictured.samples[:count], *texts.samples[:count]], pictured.decoded)


def _half(samples: int) -> int:
    """Samples of each kind, with and without images."""
    if samples < 2:
        raise UserError(f"calibrate.samples is {samples}; with calibrate.text take at least 2")
    return samples // 2
