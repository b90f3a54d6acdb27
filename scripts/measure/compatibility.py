#!/usr/bin/env python
"""Try every scheme with every family in every engine, on tiny checkpoints, and render the docs' table.

    scripts/measure/compatibility.py    quantize, check, reload in transformers, ask in vLLM; writes eval/compatibility.json
    scripts/measure/compatibility.py --render    print the table from that file

A cell says where the checkpoint answered a question about an image: T transformers, V vLLM on this machine. The last stdout
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "compatibility.json"
SCHEMES = ("awq", "gptq", "int8", "fp8", "fp8-static", "w8a16")


def calibration(folder: Path) -> Path:
    """Write a few images with questions, as JSON lines."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    file = folder / "calibration.jsonl"
    rows = []
    for i in range(4):
        Image.fromarray(random.integers(0, 256, (60, 80, 3), np.uint8)).save(folder / f"{i}.png")
        rows.append({"id": str(i), "image": f"{i}.png", "question": "what is it", "answer": "red"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def compress(family: str, scheme: str, source: Path, data: Path, out: Path) -> str | None:
    """Write one checkpoint, examine it and let transformers answer; returns what went wrong, or None."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tests.kit.inputs import images
    from vlmcompress import models
    from vlmcompress.compression.quantize import quantize
    from vlmcompress.diagnosis import files as doctor
    from vlmcompress.errors import UserError
    from vlmcompress.recipe import resolve

    try:
        recipe = resolve(
            {"model": str(source), "out": str(out), "scheme": scheme, "calibrate": {"data": str(data)}}
        ).recipe
        quantize(recipe)
    except UserError as error:
        return str(error)
    failed = [f"{check.name}: {check.detail}" for check in doctor.diagnose(out, source) if not check.ok]
    if failed:
        return failed[0]
    with models.quiet():
        model = AutoModelForImageTextToText.from_pretrained(out, dtype="auto").eval()
        processor = AutoProcessor.from_pretrained(out)
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[text], images=images(1), return_tensors="pt").to(model.dtype)
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    return None


def in_vllm(folders: list[Path]) -> dict[str, dict]:
    """Folder -> what the engine said, all in one engine process."""
    from tests.kit import vllm_answers
    from tests.kit.engine import asked

    return dict(zip(map(str, folders), asked("answers", vllm_answers.jobs(folders)), strict=True))


def measure() -> dict:
    """Try every family with every scheme."""
    sys.path.insert(0, str(ROOT))
    from tests.kit import tiny
    from vlmcompress import models

    found: dict[str, dict[str, dict]] = {}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        data, written = calibration(base), {}
        for family in models.REGISTRY.names():
            source = tiny.build(family, base / family)
            found[family] = {}
            for scheme in SCHEMES:
                out = base / f"{family}-{scheme}"
                problem = compress(family, scheme, source, data, out)
                found[family][scheme] = {"transformers": problem is None, "problem": problem}
                if problem is None:
                    written[str(out)] = found[family][scheme]
                print(family, scheme, problem or "ok", file=sys.stderr, flush=True)
        for folder, result in in_vllm([Path(folder) for folder in written]).items():
            written[folder] |= {"vllm": "error" not in result}
            if "error" in result:
                written[folder]["problem"] = result["error"].splitlines()[0][:200]
    return found


def render(found: dict) -> str:
    """Render the results as a Markdown table."""
    lines = [f"| family | {' | '.join(SCHEMES)} |", f"|---|{'---|' * len(SCHEMES)}"]
    for family, row in found.items():
        cells = []
        for scheme in SCHEMES:
            cell = row[scheme]
            engines = [letter for letter, engine in (("T", "transformers"), ("V", "vllm")) if cell.get(engine)]
            cells.append(" ".join(engines) or "–")
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    args = parser.parse_args()
    if not args.render:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    found = json.loads(RESULTS.read_text())
    print(render(found))
    counts = {
        engine: sum(bool(c.get(engine)) for row in found.values() for c in row.values())
        for engine in ("transformers", "vllm")
    }
    print(json.dumps({"combinations": sum(map(len, found.values())), **counts}))


if __name__ == "__main__":
    main()
