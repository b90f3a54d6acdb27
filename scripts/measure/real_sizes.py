#!/usr/bin/env python
"""Ask engines and transformers about images of real sizes, with tiny models of every family, and render what differs.

    scripts/measure/real_sizes.py                             asks all engines, but for what is in eval/real_sizes.json
    scripts/measure/real_sizes.py --engine vllm --family glm4v     these; with --again also what is in the file
    scripts/measure/real_sizes.py --render                    print the table from that file

The models are random, in float32, with processors that make up to 512 tokens of an image (tests/kit/published.py). A cell is
the largest difference of the likeliest first token's log-probability from transformers', in nats, or the two numbers of
tokens. Families whose cells are all below 0.01 share a row. "Scaled before" is the largest difference that is left where
transformers' processor does not scale the image. The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "real_sizes.json"
SMALL = "224x224"
QUESTIONS = 2  # of each size
SAME = 0.01  # nats
SEEDS = {"qwen3-5": 1}  # of weights, as with 0 first tokens are parts of characters, which llama.cpp does not report
ENGINES = {"vllm": "vLLM", "llamacpp": "llama.cpp", "openvino": "OpenVINO", "mlx": "MLX"}
# Families that mlx-vlm of the environment loads; the others' are read from the folders of formats.
MLX = (
    *("gemma3", "gemma4", "glm4v", "idefics3", "internvl3-5", "lfm2-vl", "llava", "llava-onevision", "mistral3"),
    *("qwen2-vl", "qwen2-5-vl", "qwen3-5", "qwen3-5-moe", "qwen3-vl"),
)


def families(engine: str) -> list[str]:
    """Families that an engine runs here."""
    from vlmcompress import models
    from vlmcompress.export import gguf, openvino

    if engine == "vllm":
        names = models.REGISTRY.names()
        return [name for name in names if not models.REGISTRY.get(name).SPEC.engine.vllm_cpu]
    return sorted({"llamacpp": gguf.REGISTRY.names, "openvino": openvino.REGISTRY.names, "mlx": lambda: MLX}[engine]())


def source(family: str, engine: str, folder: Path) -> Path:
    """Write the tiny checkpoint."""
    from tests.kit import published
    from tests.kit.float_models import floats

    made = published.VARIANTS.get(family, {}) if engine == "llamacpp" else {}
    floats(family, folder, **made, seed=SEEDS.get(family, 0))
    getattr(published, f"for_{engine}")(family, folder)
    return published.with_real_limits(family, folder)


def served(engine: str, folder: Path, out: Path) -> Path:
    """The checkpoint in the form that the engine loads."""
    from vlmcompress.cli import main
    from vlmcompress.export.formats import _mlx_config

    if engine == "vllm":
        return folder
    if engine == "mlx":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(_mlx_config.published(config)))
        return folder
    form = {"llamacpp": "gguf"}.get(engine, engine)
    if main(["quantize", str(folder), "--scheme", "none", "--format", form, "-o", str(out)]):
        raise ValueError("not written")
    return out


def in_transformers(family: str, engine: str, folder: Path, media: Path, requests: list) -> dict[str, Any]:
    """transformers' answers, with LLaVA's order of tokens as in llama.cpp where that is the engine."""
    from tests.kit.published import as_llama_cpp_computes
    from vlmcompress.engines import Answer, first_tokens, hf

    job = {"model": str(folder), "media": str(media), "settings": settings(), "images_per_prompt": 3}
    running, _ = hf.start(job)
    if engine == "llamacpp":
        as_llama_cpp_computes(family, running.model)
    answers = {}
    for name, answer in hf.answers(running, [vars(request) for request in requests], job):
        refused = isinstance(answer, Exception)
        fields = {"text": "", "finish": "refused", "prompt_tokens": 0, "output_tokens": 0, "refused": str(answer)}
        answers[name] = Answer(name, **(fields if refused else answer | {"first": first_tokens(answer["first"] or ())}))
    return answers


def settings() -> dict[str, Any]:
    """Settings of both sides."""
    from tests.kit.published import CONTEXT
    from vlmcompress.engines import EngineSettings

    return vars(
        EngineSettings(max_tokens=1, max_model_len=CONTEXT, max_num_seqs=1, logprobs=8, dtype="float32", refusals=99)
    )


def measure(family: str, engine: str, place: Path) -> dict[str, Any]:
    """Cells of one family in one engine by size, or why the engine refuses it."""
    from dataclasses import replace

    from vlmcompress import engines
    from vlmcompress.engines import EngineSettings
    from vlmcompress.evaluation.doctor.questions import REAL, SCALED, sized_questions
    from vlmcompress.evaluation.doctor.real_sizes import nats, whole_characters, without_special_tokens
    from vlmcompress.utils.errors import UserError

    folder, sizes = source(family, engine, place / "source"), (SMALL, *REAL)
    requests = []
    for seed in range(QUESTIONS):
        media = place / "media" / str(seed)
        media.mkdir(parents=True)
        sized = sized_questions(media, sizes, None, seed, folder)
        requests += [replace(request, id=f"{request.id}|{seed}") for request in sized]
    expected = whole_characters(in_transformers(family, engine, folder, place, requests))
    if engine == "openvino":
        expected = without_special_tokens(expected, folder)
    try:
        model = served(engine, folder, place / "out")
        run = engines.get_engine(engine).answer(model, requests, media=place, settings=EngineSettings(**settings()))
    except (UserError, ValueError) as error:
        return {"refused": str(error).replace(str(place), "")[:200]}
    answers, cells = whole_characters(run.answers), dict[str, Any]()
    for size in (*sizes, *(size + SCALED for size in sizes)):
        pairs = [
            (expected[f"{size}|{seed}"], answers[f"{size}|{seed}"])
            for seed in range(QUESTIONS)
            if f"{size}|{seed}" in expected
        ]
        if not pairs:
            continue
        if any(reference.refused for reference, _ in pairs):
            cells[size] = {"refused": "transformers"}
        elif why := next((got.refused for _, got in pairs if got.refused), None):
            cells[size] = {"refused": why.replace(str(place), "")[:120]}
        else:
            gaps = [gap for reference, got in pairs if (gap := nats(got, reference)) is not None]
            counts = [reference.prompt_tokens for reference, _ in pairs[:1]] + [
                got.prompt_tokens for _, got in pairs[:1]
            ]
            cells[size] = {"tokens": counts, "nats": float(f"{max(gaps):.2g}") if gaps else None}
    return cells


def cell(entry: dict[str, Any] | None) -> str:
    """A cell as text."""
    if entry is None:
        return ""
    if "refused" in entry:
        return "–" if entry["refused"] == "transformers" else "refused"
    reference, got = entry["tokens"]
    return (
        f"{got} tokens, not {reference}"
        if got != reference
        else "?"
        if entry["nats"] is None
        else number(entry["nats"])
    )


def number(value: float) -> str:
    """A difference in nats as text."""
    return f"{value:.1g}"


def differs(entry: dict[str, Any]) -> bool:
    """Whether a cell shows a difference."""
    refused = entry.get("refused")
    if refused:
        return refused != "transformers"
    return len(set(entry["tokens"])) > 1 or (entry["nats"] or 0.0) >= SAME


def render(results: dict[str, dict]) -> str:
    """Render the Markdown table: engines and families by size."""
    from vlmcompress.evaluation.doctor.questions import REAL, SCALED

    sizes = (SMALL, *REAL)
    lines = [f"| engine | families | {' | '.join(sizes)} | scaled before |", f"|---|---|{'---:|' * (len(sizes) + 1)}"]
    for engine, title in ENGINES.items():
        rows = {name: row for name, row in results.get(engine, {}).items() if "refused" not in row}
        same = [name for name, row in rows.items() if not any(map(differs, (row[size] for size in sizes)))]
        if same:
            most = [max((rows[name][size].get("nats") or 0.0 for name in same), default=0.0) for size in sizes]
            lines.append(f"| {title} | {', '.join(same)} | {' | '.join(map(number, most))} | |")
        for name, row in rows.items():
            if name in same:
                continue
            left = [
                entry["nats"]
                for size, entry in row.items()
                if size.endswith(SCALED) and entry.get("nats") is not None and len(set(entry["tokens"])) == 1
            ]
            lines.append(
                f"| {title} | {name} | {' | '.join(cell(row[size]) for size in sizes)} | {number(max(left)) if left else ''} |"
            )
    return "\n".join(lines)


def keep(engine: str, family: str, row: dict[str, Any]) -> None:
    """Add a row to the file."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[engine] = dict(sorted((results.get(engine, {}) | {family: row}).items()))
    RESULTS.write_text(json.dumps({name: results[name] for name in ENGINES if name in results}, indent=1) + "\n")


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=[*reversed(ENGINES)])
    parser.add_argument("--family", nargs="+", help="default: all that the engine runs here")
    parser.add_argument("--again", action="store_true", help="also what is in the file already")
    parser.add_argument("--render", action="store_true", help="print the table of the last measurements")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if not args.render:
        import os

        from tests.kit import forks

        for engine in args.engine:
            if engine == "vllm":
                os.environ["VLMCOMPRESS_ENGINE_PYTHON"] = forks.python(*forks.VLLM)
            for family in args.family or families(engine):
                measured = json.loads(RESULTS.read_text()).get(engine, {}) if RESULTS.exists() else {}
                if args.again or family not in measured:
                    with tempfile.TemporaryDirectory() as place:
                        keep(engine, family, row := measure(family, engine, Path(place)))
                    print(engine, family, row, file=sys.stderr, flush=True)
    results = json.loads(RESULTS.read_text())
    print(render(results))
    rows = [row for part in results.values() for row in part.values()]
    entries = [entry for row in rows if "refused" not in row for entry in row.values()]
    finite = [entry["nats"] for entry in entries if entry.get("nats") is not None]
    print(json.dumps({"families": len(rows), "cells": len(entries), "largest": max(finite, default=math.nan)}))


if __name__ == "__main__":
    main()
