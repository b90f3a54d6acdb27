#!/usr/bin/env python
"""Write one model in every format and scheme, load each in vLLM, and record what ran: eval/formats.json.

    scripts/measure/format_table.py

The model is a tiny Qwen2.5-VL with random weights. A row has the format and scheme; `refused`, or what `doctor` finds and the
facts that decide which engine loads the files; and `vllm`: "runs", or the reason why vLLM on this machine refused them.
`vlmcompress.export.readers` and its test rely on these rows. The last line is one JSON object of counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "formats.json"
FAMILY = "qwen2-5-vl"
# Format -> schemes that are tried in it, by their names in `tests/kit/rtn.py`.
TRIED = {
    "compressed-tensors": (
        *("w4-symmetric", "w4-asymmetric", "w8a16", "w4a8", "int8"),
        *("fp8", "fp8-static-tensor", "nvfp4", "nvfp4a16"),
    ),
    "awq": ("w4-symmetric", "w4-asymmetric", "w8a16"),
    "gptq": ("w4-symmetric", "w8a16", "w4-asymmetric"),
    "gptq-v2": ("w4-symmetric", "w4-asymmetric", "w2"),
    "modelopt": ("fp8", "fp8-static-tensor", "nvfp4", "int8"),
    "bf16": ("w4-symmetric",),
}


def measure() -> list[dict]:
    """Try every format with its schemes; a row for each."""
    sys.path.insert(0, str(ROOT))
    from tests.kit import rtn, tiny, vllm_answers
    from tests.kit.engine import asked
    from vlmcompress.evaluation.doctor import files as doctor
    from vlmcompress.export.convert import convert
    from vlmcompress.numerics import Format, Scheme, label
    from vlmcompress.utils.errors import UserError

    schemes_of = rtn.SCHEMES | {"w2": Scheme(Format("int", 2, 32))}
    rows, written = [], {}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        source = tiny.build(FAMILY, base / "source")
        for name, schemes in TRIED.items():
            for key in schemes:
                scheme, first, out = schemes_of[key], base / f"compressed-tensors-{key}", base / f"{name}-{key}"
                row = {"format": name, "scheme": label(scheme)}
                rows.append(row)
                if not first.exists():
                    rtn.write(source, first, scheme)
                try:
                    if name != "compressed-tensors":
                        convert(first, out, name)
                except UserError as error:
                    row["refused"] = str(error)
                    continue
                row["doctor"] = [f"{check.name}: {check.detail}" for check in doctor.diagnose(out) if not check.ok]
                row["facts"] = facts(out)
                written[out] = row
                print(name, key, row["doctor"] or "ok", file=sys.stderr, flush=True)
        for row, result in zip(written.values(), asked("answers", vllm_answers.jobs(written)), strict=True):
            row["vllm"] = reason(result["error"]) if "error" in result else "runs"
    return rows


def reason(error: str) -> str:
    """The first sentence of an engine's error, without what only a log can explain."""
    text = error.splitlines()[0].removesuffix("Reasons: ").strip()
    if text.endswith("VllmConfig"):
        text = error.splitlines()[1].partition("[")[0].strip()
    return text.split(". Declaration")[0].split(" (for ")[0][:160]


def facts(folder: Path) -> dict:
    """What decides who loads a checkpoint, as far as its files say it."""
    from dataclasses import asdict

    from vlmcompress.export import launch_files

    every = asdict(launch_files.launch_facts(json.loads((folder / "config.json").read_text()), {}, "OUT"))
    return {key: every[key] for key in ("architecture", "method", "groups", "embeddings", "experts", "kept_layers")}


def main() -> None:
    """Measure, write the rows and print their counts."""
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    rows = measure()
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    tried = [row for row in rows if "refused" not in row]
    print(
        json.dumps(
            {
                "written": len(tried),
                "refused": len(rows) - len(tried),
                "run_in_vllm": sum(row["vllm"] == "runs" for row in tried),
                "doctor_complains": sum(bool(row["doctor"]) for row in tried),
            }
        )
    )


if __name__ == "__main__":
    main()
