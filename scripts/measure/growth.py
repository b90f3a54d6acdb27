#!/usr/bin/env python
"""Time and memory of `quantize --scheme gptq-plus` against blocks, samples and experts, and of a search against its trials.

    scripts/measure/growth.py --work DIR    makes small random models there and quantizes them
    scripts/measure/growth.py --render      prints the docs' list, from eval/growth.json

Each row is a process with one thread of arithmetic (`process_cost`), start of Python and imports included. The last line is one
JSON object.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from process_cost import process_cost, work_or_render

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "growth.json"
sys.path.insert(0, str(ROOT))
SAMPLES = (16, 64, 256)
SEARCHES = (50, 100, 200)
RUNS = [  # what grows, its number, blocks, experts (0: dense), samples
    *[("blocks", n, n, 0, 16) for n in (4, 8, 16)],
    *[("samples", n, 4, 0, n) for n in SAMPLES],
    *[("experts of one block", n, 2, n, 16) for n in (16, 64)],
]


def search(folder: Path, count: int) -> dict[str, Any]:
    """The row of a search with answers that are made up: `count` candidates and their rungs, and again from its journal."""
    from vlmcompress.engines import Answer
    from vlmcompress.evaluation.accuracy.ask import AnsweredQuestion, SuiteAnswers
    from vlmcompress.evaluation.search.candidate import Choice, Factor
    from vlmcompress.evaluation.search.live_trials import LiveTrials, run_halving
    from vlmcompress.evaluation.search.space import Space
    from vlmcompress.evaluation.search.speed import Modelled
    from vlmcompress.evaluation.search.successive_halving import Rules
    from vlmcompress.evaluation.search.trial import Answers
    from vlmcompress.evaluation.search.trial_log import open_trial_log

    def answers(number: int, questions: int) -> Answers:
        samples = []
        for index in range(questions):
            text = str(hash((number, index)) % 50 if hash((number, index)) % 100 < number % 20 else index)
            answer = Answer(str(index), text, "stop", 600 - number, 2, {text: -0.1, "no": -2.5})
            score = float(text == str(index))
            samples.append(
                AnsweredQuestion(str(index), "all", "?", str(index), text, score, True, f"{index}.png", answer)
            )
        return Answers(SuiteAnswers(tuple(samples), "", {}, {}, float(questions), 0), 10**9)

    class Crew:
        def map(self, work: Any, jobs: Any) -> Any:
            for place, job in enumerate(jobs):
                yield place, answers(job.keys["number"], work.keywords["questions"])

    class Gains(Modelled):
        def __init__(self) -> None:
            pass

        def gain(self, candidate: Any) -> float:
            return 1 + candidate.keys["number"] / 1000

    space = Space((Factor("weights", tuple(Choice(f"c{n}", {"number": n}) for n in range(1, count + 1))),), {})
    shutil.rmtree(folder, ignore_errors=True)
    before = time.process_time()
    for _ in range(2):
        with open_trial_log(folder, {}, None) as log:
            run_halving(space, LiveTrials(None, Crew(), log, Gains(), answers(0, 1000)), Rules(0.05, 1000, 500.0))
    written = sum(file.stat().st_size for file in folder.iterdir())
    return {
        "what": "candidates of a search",
        "number": count,
        "processor": time.process_time() - before,
        "written": written,
    }


def render(rows: list[dict]) -> str:
    """The docs' list."""
    grown: dict[str, list[dict]] = {}
    for row in rows:
        grown.setdefault(row["what"], []).append(row)
    lines = []
    for what, several in grown.items():
        unit, key, scale = ("MB on disk", "written", 1e6) if "written" in several[0] else ("GB", "anonymous", 1e9)
        digits = 1 if key == "written" else 0
        numbers = ", ".join(str(row["number"]) for row in several)
        times = ", ".join(f"{row['processor']:.{digits}f}" for row in several)
        sizes = ", ".join(f"{row[key] / scale:.2f}" for row in several)
        lines.append(f"* {numbers} {what}: {times} s of the processor, {sizes} {unit}.")
    return "\n".join(lines)


def main() -> None:
    """Measure or render."""
    args = work_or_render(__doc__, "1 GB")
    if not args.render:
        from tests.kit import tiny
        from vlmcompress.evaluation.speed.prompts import dead_leaves

        data, rows = args.work / "data.jsonl", []
        args.work.mkdir(parents=True, exist_ok=True)
        for number in range(max(SAMPLES)):
            dead_leaves((128, 128), number).save(args.work / f"{number}.png")
        row = '{"id": "%d", "image": "%d.png", "question": "What is in this picture?", "answer": "Leaves."}\n'
        data.write_text("".join(row % (number, number) for number in range(max(SAMPLES))))
        for what, number, blocks, experts, samples in RUNS:
            model, out = args.work / "bf16", args.work / "out"
            for folder in (model, out):
                shutil.rmtree(folder, ignore_errors=True)
            dense = (0,) if experts else tuple(range(blocks))
            mixture = {"num_experts": experts or 4, "mlp_only_layers": dense}
            tiny.build("qwen3-vl-moe", model, num_hidden_layers=blocks, intermediate_size=1536, **mixture)
            command = ["vlmcompress", "quantize", str(model), "-o", str(out), "--scheme", "gptq-plus"]
            command += ["--group-size", "32", "--calib", str(data), "--samples", str(samples)]
            cost = process_cost(command, args.work)
            processor = cost["user"] + cost["system"]
            rows.append({"what": what, "number": number, "processor": processor, "anonymous": cost["anonymous"]})
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        rows += [search(args.work / "search", count) for count in SEARCHES]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
