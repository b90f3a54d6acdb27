"""The data next to demo-smol: the world's questions as demo-llava has them, and English prose to calibrate on as well."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from eval import english

WORLD = Path(__file__).parents[1] / "data" / "llava"
PROSE = 150  # calibration samples


def write_data(folder: Path, families: tuple[str, ...]) -> None:
    """Write calibration, validation and test rows to `folder`, the world's of `families` alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("calibration", "validation", "test"):
        table = pq.read_table(WORLD / f"{split}.parquet")
        rows = [row for row in table.to_pylist() if row["family"] in families]
        if split == "calibration":
            rows += [prose(split, number, text) for number, text in enumerate(english.paragraphs(split)[:PROSE])]
        pq.write_table(pa.Table.from_pylist(rows, table.schema), folder / f"{split}.parquet")


def prose(split: str, number: int, text: str) -> dict:
    """A row without an image: the first sentence as a user's message, the rest as the answer."""
    questions, answers = english.halves(text)
    name = f"{split}-english-{number:04d}"
    return {"id": name, "image": [], "question": questions, "answer": answers, "family": "english"}
