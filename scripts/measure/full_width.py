#!/usr/bin/env python
"""Time and memory of calibrated schemes on two decoder blocks of the width of Qwen2.5-VL-7B, its whole tower and embeddings.

    scripts/measure/full_width.py --work DIR    makes the model there (4.5 GB) and quantizes it with 16 samples
    scripts/measure/full_width.py --render      prints the docs' table, from eval/full_width.json

Each row is a process with one thread of arithmetic (`process_cost`), start of Python and imports included. Weights are random,
samples have an image of 112 x 112 pixels (16 visual tokens). Phases are wall-clock seconds, by the manifest. The last line is
one JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from process_cost import process_cost, work_or_render

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "full_width.json"
sys.path.insert(0, str(ROOT))
BLOCKS, SAMPLES, SIDE = 2, 16, 112
SCHEMES = ("int8", "gptq", "gptq-plus", "awq", "mbq")
FLAGS = {"mbq": ("--set", "options.objective=gram")}
EACH = ("observing", "solving", "passing on", "gradients")  # what takes as long for each further block
PHASES = {"capturing": ("capturing block inputs", "observing"), "solving": ("solving",), "passing on": ("passing on",)}


def render(rows: list[dict]) -> str:
    """The docs' table; the last column multiplies the phases `EACH` by 28 / `BLOCKS`."""
    lines = [f"| scheme | processor time | {', '.join(PHASES)} | memory at the peak | all 28 blocks, about |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        timing = row["phases"]
        phases = ", ".join(f"{sum(timing.get(n, 0) for n in names):.0f}" for names in PHASES.values())
        whole = timing["capturing block inputs"] + 28 / BLOCKS * sum(timing.get(name, 0) for name in EACH)
        cells = [f"`{row['scheme']}`", f"{row['user'] + row['system']:.0f} s", f"{phases} s"]
        cells += [f"{row['anonymous'] / 1e9:.1f} GB", f"{whole / 60:.0f} minutes"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    args = work_or_render(__doc__, "10 GB")
    if not args.render:
        from full_size import write_model

        from vlmcompress.evaluation.speed.prompts import dead_leaves

        shutil.rmtree(args.work / "bf16", ignore_errors=True)
        write_model(args.work / "bf16", BLOCKS)
        row = '{"id": "%d", "image": "%d.png", "question": "What is in this picture?", "answer": "Leaves."}\n'
        (args.work / "data.jsonl").write_text("".join(row % (number, number) for number in range(SAMPLES)))
        for number in range(SAMPLES):
            dead_leaves((SIDE, SIDE), number).save(args.work / f"{number}.png")
        rows = []
        for scheme in SCHEMES:
            command = ["vlmcompress", "quantize", "bf16", "-o", "out", "--scheme", scheme, "--calib", "data.jsonl"]
            cost = process_cost([*command, *FLAGS.get(scheme, ())], args.work)
            timing = json.loads((args.work / "out" / "vlmcompress.json").read_text())["timing"]
            rows.append({"scheme": scheme, **cost, "phases": timing})
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            shutil.rmtree(args.work / "out")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
