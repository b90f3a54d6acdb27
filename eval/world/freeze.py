"""Write the frozen splits: ``python -m eval.world.freeze [-o DIR]``. The same code writes the same bytes."""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .rows import PER_FAMILY, VARIANTS, split_rows

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("image", pa.list_(pa.binary())),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("family", pa.string()),
    ]
)
DEFAULT = Path(__file__).resolve().parents[1] / "demo" / "data"


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write one parquet file; images asked about several times are stored once (dictionary encoding).

    Rows with a `video`, its frames as PNG, get a column for it in place of that of images.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name.replace("image", "video") if "video" in rows[0] else name for name in SCHEMA.names]
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(zip(names, SCHEMA.types, strict=True))))
    pq.write_table(table, path, compression="zstd", dictionary_pagesize_limit=1 << 26, row_group_size=len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT, help="folder to write to")
    output = parser.parse_args().output
    for variant in VARIANTS:
        for split in PER_FAMILY:
            path = output / variant / f"{split}.parquet"
            rows = split_rows(split, variant)
            write_rows(path, rows)
            print(f"{path.relative_to(output)}: {len(rows)} rows, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
