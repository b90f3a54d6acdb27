"""Load data sets for lm-eval tasks from a local copy; nothing is downloaded.

A task's YAML has `load` as its `custom_dataset`, so that stock lm-eval reads the same data:

    custom_dataset: !function vlmcompress.evaluation.accuracy.local_data.load
    dataset_kwargs: {name: chartqa, source: "HuggingFaceM4/ChartQA on the Hugging Face Hub"}

The copy is `data` in the task manager's metadata (`--data`; stock: `--metadata '{"data": "..."}'`), else
`$VLMCOMPRESS_DATA/<name>`, else the test data bundled with a demo model (`pretrained`). It is a file or a folder: parquet
as on the Hub, JSON lines, or the output of `Dataset.save_to_disk`.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlmcompress.models.data.samples import LazyImages, media_source
from vlmcompress.models.data.sources import bundled_data
from vlmcompress.models.data.video import Video
from vlmcompress.utils import hub, json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import foreign_errors

VARIABLE = "VLMCOMPRESS_DATA"
IMAGES = ("image", "images", *(f"image_{number}" for number in range(1, 8)))


def load(
    name: str,
    source: str = "",
    split: str = "test",
    id: str = "",
    family: str = "",
    where: Mapping[str, Any] | None = None,
    data: str | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Load a task's data as `{"test": Dataset}`; images stay encoded until `images` decodes them.

    Args:
        name: name of the folder in `$VLMCOMPRESS_DATA`.
        source: origin of the data, for messages.
        split: name of the split; of several files only those whose name begins with it are read, if there are any.
        id, family: Jinja templates over a row's columns for the new columns `id` and `family`.
        where: keep only rows whose columns have these values.
        data: path of the copy; see the module.
        pretrained: folder of the model that is evaluated.

    Raises:
        UserError: no copy, no rows, or rows without the needed columns.
    """
    path = copy_of(name, source, split, data, pretrained)
    dataset = _read(str(path), split, path.stat().st_mtime_ns)
    if not len(dataset):
        raise UserError(f"{path} has no samples; give data with at least one row")
    for column, value in (where or {}).items():
        need({column}, dataset, path)
        dataset = dataset.select([row for row, cell in enumerate(dataset[column]) if cell == value])
    if not len(dataset):
        raise UserError(f"{path} has no samples with {dict(where or {})}; give data that has some")
    for column, template in (("id", id), ("family", family)):
        if template:
            dataset = _with_column(dataset, column, template, path)
    return {"test": dataset}


def copy_of(
    name: str, source: str = "", split: str = "test", data: str | None = None, pretrained: str | None = None, **_: Any
) -> Path:
    """The path of a task's data, see `load`. Raises `UserError` if there is none."""
    root = os.environ.get(VARIABLE)
    path: Path | None
    if data:
        path = hub.local(data, "dataset", whole=split)
    else:
        path = Path(root, name) if root else bundled_data(pretrained, split) if pretrained else None
    if path is None:
        raise UserError(
            f"no data for {name}: give --data, or set {VARIABLE} to a folder with its copy as {name}{_hint(source)}"
        )
    if not path.exists():
        raise UserError(f"{path} does not exist; put a local copy of {name} there, or give --data{_hint(source)}")
    return path


def images(doc: Mapping[str, Any]) -> LazyImages:
    """The images in a row's column `image` or `images`, decoded to RGB on each access."""
    value = doc.get("images") if doc.get("images") is not None else doc.get("image")
    if isinstance(value, LazyImages):
        return value
    values = value if isinstance(value, list) else [] if value is None else [value]
    return LazyImages([image_source(item) for item in values], f"sample '{doc.get('id', '?')}'")


def row_media(doc: Mapping[str, Any]) -> Sequence[Image.Image | Video]:
    """The images of a row, then its videos, which are not decoded."""
    return [*images(doc), *doc["videos"]] if doc["videos"] else images(doc)


def image_source(value: Mapping[str, Any]) -> bytes | Path:
    """The encoded bytes or path of an image as `datasets` stores it."""
    if not isinstance(value, Mapping) or (value.get("bytes") is None and value.get("path") is None):
        raise UserError("an image of the data is empty; give its file")
    return value["bytes"] if value.get("bytes") is not None else Path(value["path"])


def png(image: Image.Image) -> bytes:
    """An image encoded as PNG, in RGB."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _hint(source: str) -> str:
    return f" ({source})" if source else ""


@functools.lru_cache(maxsize=2)
def _read(location: str, split: str, changed: int) -> Any:
    """Read the rows of a file or folder as a `datasets.Dataset` whose images are not decoded."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets.table import InMemoryTable

    path = Path(location)
    with foreign_errors(f"{path} can't be read", "; write it again"):
        if (path / "dataset_info.json").is_file():
            dataset = datasets.load_from_disk(location)
        elif (path / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(location)[split]
        else:
            files = _files(path, split)
            if files[0].suffix == ".parquet":
                tables = [pq.read_table(file) for file in files]
                # `load_dataset` would copy the table to its cache and look for a script on the Hub.
                dataset = datasets.Dataset(InMemoryTable(pa.concat_tables(tables, promote_options="permissive")))
            else:
                dataset = datasets.Dataset.from_list([row for file in files for row in _json_lines(file)])
        for column in set(IMAGES) & set(dataset.column_names):
            feature = _as_image(dataset.features[column], datasets)
            dataset = dataset.cast_column(column, feature)
        return dataset


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    # As the Hub names splits: `test-00000-of-00003.parquet`; other copies have one split, under any name.
    for pattern in (f"{split}*.parquet", "*.parquet", f"{split}*.jsonl", "*.jsonl"):
        if files := sorted(path.rglob(pattern)):
            return files
    raise UserError(f"{path} has no .parquet or .jsonl files; put a local copy of the data set there")


def _json_lines(file: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON lines file; `image` and `images` become lists of files as `datasets` stores them."""
    rows = []
    for number, line in enumerate(json_files.read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json_files.parse_json(line)
        except ValueError as error:
            raise UserError(f"{file} line {number} is not valid JSON ({error}); write one object per line") from error
        if not isinstance(row, dict):
            raise UserError(f"{file} line {number} is a {type(row).__name__}; write one object per line")
        for column in {"image", "images"} & set(row):
            value = row[column] if isinstance(row[column], list) else [row[column]]
            files = [media_source(item, file.parent.resolve(), f"{file.name} line {number}") for item in value if item]
            row[column] = [
                {"bytes": item, "path": None} if isinstance(item, bytes) else {"bytes": None, "path": str(item)}
                for item in files
            ]
        rows.append(row)
    return rows


def _as_image(feature: Any, datasets: Any) -> Any:
    """The stored feature with images, or lists of them, left encoded."""
    if isinstance(feature, datasets.List | datasets.LargeList):
        return datasets.List(_as_image(feature.feature, datasets))
    return datasets.Image(decode=False)


def need(columns: set[str], dataset: Any, path: Path) -> None:
    if absent := columns - set(dataset.column_names):
        have = ", ".join(sorted(dataset.column_names))
        raise UserError(f"{path} has no column {', '.join(sorted(absent))}; it has {have}")


def _with_column(dataset: Any, column: str, template: str, path: Path) -> Any:
    """Add a column rendered by a Jinja template over the others."""
    from jinja2 import Environment, UndefinedError, meta
    from lm_eval.utils import apply_template

    # The template's columns alone are read, since rows of all columns would bring the images along.
    used = meta.find_undeclared_variables(Environment().parse(template))
    need(used, dataset, path)
    try:
        values = [apply_template(template, row) for row in dataset.select_columns(sorted(used))]
    except (UndefinedError, TypeError, IndexError) as error:
        raise UserError(f"{path}: {column} can't be made from {', '.join(sorted(used))} ({error})") from error
    if column in dataset.column_names:
        dataset = dataset.remove_columns([column])
    return dataset.add_column(column, values)
