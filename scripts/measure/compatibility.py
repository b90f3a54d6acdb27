#!/usr/bin/env python
"""Try every family with every scheme and reducer on tiny checkpoints, and render the docs' tables of what works.

    scripts/measure/compatibility.py                    tries all families, but for what is in eval/compatibility.json
    scripts/measure/compatibility.py --family qwen3-5   this family; with --again also what is in the file
    scripts/measure/compatibility.py --render           print the tables from that file; --overview: the README's

A family has two parts, schemes and reducers, of about a minute each. A part is added to the file when it is whole, so that a
run that was ended goes on with the rest. Of a scheme, T says that transformers loaded the quantized checkpoint and answered
a question about an image (t: with the loader of our engine `hf`, where experts are quantized), V that vLLM on this
machine did. Of a reducer, V says that vLLM answered with it; where it takes a share the prompt must have become shorter.
The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "compatibility.json"
SCHEMES = ("awq", "gptq", "int8", "fp8", "fp8-static", "w8a16")
# Those that vLLM's plugin serves for some family, with options that suit towers and decoders of two blocks.
REDUCERS = (
    *("random:0.5", "uniform:0.5", "dart:0.5", "divprune:0.5", "visionzip:0.5", "vscan:0.5,shallow=1"),
    "dymu:0.5",
)
NOT_SHORTER = ("dymu",)  # by what is in the images
Cell = dict[str, Any]


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


def compress(source: Path, data: Path, out: Path, **keys: str) -> str | None:
    """Write one checkpoint and examine it; returns what went wrong, or None."""
    from vlmcompress.evaluation.doctor import files as doctor
    from vlmcompress.quantization.run import quantize
    from vlmcompress.recipe import resolve
    from vlmcompress.utils.errors import UserError

    try:
        quantize(resolve({"model": str(source), "out": str(out), "calibrate": {"data": str(data)}} | keys).recipe)
    except UserError as error:
        return str(error)
    return next((f"{check.name}: {check.detail}" for check in doctor.diagnose(out, source) if not check.ok), None)


def in_transformers(out: Path) -> Cell:
    """Load a checkpoint and let it answer: by transformers alone (`transformers`), or as the engine `hf` does (`loader`)."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from tests.kit.inputs import images
    from vlmcompress import models

    cell: Cell = {"problem": None}
    with models.quiet_transformers():
        try:
            loaded: Any = AutoModelForImageTextToText.from_pretrained(out, dtype="auto", output_loading_info=True)
            model, info = loaded
            if lacking := info["missing_keys"]:  # filled with random numbers
                raise ValueError(f"transformers finds no tensor for {min(lacking)}")
            cell["transformers"] = True
        except (RuntimeError, ValueError) as error:
            cell |= {"transformers": False, "problem": str(error).splitlines()[0]}
            model, _ = models.open_model(out, dtype="auto")
            cell["loader"] = True
        processor = AutoProcessor.from_pretrained(out)
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it"}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[text], images=images(1), return_tensors="pt").to(model.dtype)
        model.eval().generate(**inputs, max_new_tokens=2, do_sample=False)
    return cell


def carried(spec, source: Path, out: Path) -> str | None:
    """What became of the head that drafts tokens, byte for byte; None where the family has none."""
    from safetensors.torch import load_file

    if spec.mtp is None:
        return None
    heads = []
    for folder in (source, out):
        tensors = load_file(folder / "model.safetensors")
        heads.append({name: tensors[name] for name in tensors if name.startswith(f"{spec.mtp.prefix}.")})
    before, after = heads
    if not before:
        return "not tried"
    same = before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    return "carried" if same else "lost"


def try_schemes(family: str, base: Path) -> dict[str, Any]:
    """Quantize one family by every scheme, and ask both engines; with what its spec says."""
    from tests.kit import tiny, vllm_answers
    from tests.kit.engine import asked
    from vlmcompress import models

    spec = models.REGISTRY.get(family).SPEC
    data, source = calibration(base), tiny.build(family, base / family)
    cells: dict[str, Cell] = {}
    for scheme in SCHEMES:
        problem = compress(source, data, base / scheme, scheme=scheme)
        cells[scheme] = in_transformers(base / scheme) if problem is None else {"problem": problem}
    mtp = carried(spec, source, base / SCHEMES[0])
    tried = [scheme for scheme, cell in cells.items() if "transformers" in cell]
    answers = asked("answers", vllm_answers.jobs(base / scheme for scheme in tried))
    for scheme, result in zip(tried, answers, strict=True):
        cells[scheme] |= said(result)
    about = {
        "model_types": list(spec.model_types),
        "experts": spec.experts is not None,
        "vllm_cpu": spec.engine.vllm_cpu,
    }
    return about | {"mtp": mtp, "schemes": cells}


def try_reducers(family: str, base: Path) -> dict[str, Any]:
    """Give one family every reducer, and ask vLLM."""
    from tests.kit import tiny, vllm_answers
    from tests.kit.engine import asked

    data, source = calibration(base), tiny.build(family, base / family)
    cells: dict[str, Cell] = {}
    for reducer in REDUCERS:
        name = reducer.partition(":")[0]
        cells[name] = {"problem": compress(source, data, base / name, scheme="none", reduce=reducer)}
    tried = [name for name, cell in cells.items() if cell["problem"] is None]
    if not tried:
        return {"reducers": cells}
    whole, *answers = asked("answers", vllm_answers.jobs([source, *(base / name for name in tried)]))
    for name, result in zip(tried, answers, strict=True):
        cells[name] |= said(result)
        pairs = zip(result.get("answers", ()), whole.get("answers", ()), strict=False)
        if name not in NOT_SHORTER and any(len(reduced["prompt"]) >= len(other["prompt"]) for reduced, other in pairs):
            cells[name] = {"vllm": False, "problem": "the prompt is as long as without it"}
    return {"reducers": cells}


PARTS = {"schemes": try_schemes, "reducers": try_reducers}


def said(result: dict[str, Any]) -> Cell:
    """Whether vLLM answered, and if not, the first line of why."""
    return {"vllm": False, "problem": result["error"].splitlines()[0][:200]} if "error" in result else {"vllm": True}


def render(results: dict[str, dict]) -> str:
    """Render a Markdown table of families by reducer in vLLM: those that answered with the same ones share a row."""
    names = [reducer.partition(":")[0] for reducer in REDUCERS]
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, row in results.items():
        rows.setdefault(tuple(letters(row["reducers"][name]) for name in names), []).append(f"`{family}`")
    lines = [f"| families | {' | '.join(f'`{name}`' for name in names)} |", f"|---|{'---|' * len(names)}"]
    served = {cells: families for cells, families in rows.items() if set(cells) != {"–"}}
    lines += [f"| {', '.join(families)} | {' | '.join(cells)} |" for cells, families in served.items()]
    return "\n".join(lines)


def overview(results: dict[str, dict]) -> str:
    """Render one table of models by scheme for the README: models that answered in the same places share a row."""
    from vlmcompress.utils.registry import FAMILIES

    rows: dict[tuple[str, ...], list[str]] = {}
    for family, row in results.items():
        cells = [ticks(row["schemes"][scheme]) for scheme in SCHEMES]
        pruned = any(cell.get("vllm") for cell in row["reducers"].values())
        models = FAMILIES.summary(family).partition(":")[0].partition(" (`")[0]
        rows.setdefault((*cells, "✓" if pruned else "–"), []).append(models)
    lines = [f"| models | {' | '.join(SCHEMES)} | pruning |", f"|---|{':-:|' * (len(SCHEMES) + 1)}"]
    lines += [f"| {'; '.join(models)} | {' | '.join(cells)} |" for cells, models in rows.items()]
    return "\n".join(lines)


def ticks(cell: Cell) -> str:
    """A tick where vLLM answered, `T` where only transformers did, a dash for nowhere."""
    return "✓" if cell.get("vllm") else "T" if cell.get("transformers") or cell.get("loader") else "–"


def letters(cell: Cell) -> str:
    """Where a checkpoint answered; a dash for nowhere."""
    engines = (("T", "transformers"), ("t", "loader"), ("V", "vllm"))
    return " ".join(letter for letter, engine in engines if cell.get(engine)) or "–"


def keep(family: str, **cells: Any) -> None:
    """Add to what the file has of a family."""
    results = json.loads(RESULTS.read_text())
    results[family] = results.get(family, {}) | cells
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--family", nargs="+", help="try these; default: all")
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    parser.add_argument("--render", action="store_true", help="print the tables of the last measurements")
    parser.add_argument("--overview", action="store_true", help="with --render: the README's table")
    args = parser.parse_args()
    if not args.render:
        sys.path.insert(0, str(ROOT))
        from vlmcompress import models

        for family in args.family or models.REGISTRY.names():
            measured = json.loads(RESULTS.read_text()).get(family, {})
            for name, attempt in PARTS.items():
                if args.again or name not in measured:
                    with tempfile.TemporaryDirectory() as place:
                        keep(family, **(tried := attempt(family, Path(place))))
                    print(family, tried[name], file=sys.stderr, flush=True)
    tried = {name: row for name, row in json.loads(RESULTS.read_text()).items() if PARTS.keys() <= row.keys()}
    print(overview(tried) if args.overview else render(tried))
    cells = [cell for row in tried.values() for part in ("schemes", "reducers") for cell in row[part].values()]
    counts = {engine: sum(bool(cell.get(engine)) for cell in cells) for engine in ("transformers", "vllm")}
    print(json.dumps({"families": len(tried), "combinations": len(cells), **counts}))


if __name__ == "__main__":
    main()
