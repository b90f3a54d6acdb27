#!/usr/bin/env python
"""Write one model in every format and scheme, ask vLLM here, and render the docs' table of formats, engines and targets.

    scripts/measure/format_table.py    writes, converts, examines and asks in vLLM; writes eval/formats.json
    scripts/measure/format_table.py --render    print the table from that file

The model is a tiny Qwen2.5-VL with random weights. "runs" stands where it answered in vLLM on this machine; of other engines
the table `export.readers` is asked: "loads" stands where they were run (scripts/measure/other_readers.py), "read" where
their source says that they read such files, and nothing was run; a number leads to the reason why not. Targets are those on
which vLLM computes in the format, with a gain. The last line is one JSON object.
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
OTHERS = ("transformers", "sglang", "lmdeploy", "tensorrt-llm")


def measure() -> list[dict]:
    """Try every format with its schemes; a row for each."""
    sys.path.insert(0, str(ROOT))
    from tests.kit import rtn, tiny, vllm_answers
    from tests.kit.engine import asked
    from vlmcompress.evaluation.doctor import files as doctor
    from vlmcompress.export.convert import convert
    from vlmcompress.numerics import Format, Scheme, label
    from vlmcompress.recipe import targets
    from vlmcompress.utils.errors import UserError

    schemes_of = rtn.SCHEMES | {"w2": Scheme(Format("int", 2, 32))}
    rows, written = [], {}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        source = tiny.build(FAMILY, base / "source")
        for name, schemes in TRIED.items():
            for key in schemes:
                scheme, first, out = schemes_of[key], base / f"compressed-tensors-{key}", base / f"{name}-{key}"
                row = {"format": name, "scheme": label(scheme), "targets": gains(targets, name, scheme)}
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


def gains(targets, name: str, scheme) -> list[str]:
    """Targets on which vLLM computes in a scheme; of GPTQ it reads symmetric 4 and 8 bits, of `bf16` nothing but 16-bit
    numbers."""
    if name.startswith("gptq") and (not scheme.weights.symmetric or scheme.weights.bits not in (4, 8)):
        return []
    key = targets.format_key(None if name == "bf16" else scheme)
    machines = {name: targets.get(name) for name in targets.REGISTRY.names()}
    return [name for name, machine in machines.items() if name != "cpu" and machine.refusal(key) is None]


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


def render(rows: list[dict]) -> str:
    """Render the rows as a Markdown table with numbered reasons below."""
    from vlmcompress.export import readers

    reasons: list[str] = []
    every = sorted({name for row in rows for name in row["targets"]})

    def why(text: str) -> str:
        if text not in reasons:
            reasons.append(text)
        return f"({reasons.index(text) + 1})"

    titles = [readers.ENGINES[name].title for name in OTHERS]
    lines = [
        f"| format | scheme | vLLM's CPU build | {' | '.join(titles)} | targets |",
        f"|{'---|' * (4 + len(titles))}",
    ]
    for row in rows:
        head = f"| {row['format']} | {row['scheme']}"
        if "refused" in row:
            lines.append(f"{head} | refused {why(row['refused'])} |{' |' * (1 + len(OTHERS))}")
            continue
        cells = ["runs" if row["vllm"] == "runs" else f"no {why(row['vllm'])}"]
        groups = {key: readers.QuantizedGroup(**group) for key, group in row["facts"]["groups"].items()}
        checkpoint = readers.LoadFacts("OUT", **row["facts"] | {"groups": groups})
        for name in OTHERS:
            verdict = readers.load_verdict(name, checkpoint)
            loads = "loads" if verdict.evidence.startswith("run") else "read"
            cells.append(f"no {why(verdict.reason)}" if verdict.reason else loads)
        lines.append(f"{head} | {' | '.join(cells)} | {named(row['targets'], every)} |")
    return "\n".join([*lines, "", *(f"{number}. {text}" for number, text in enumerate(reasons, start=1))])


def named(schemes: list[str], every: list[str]) -> str:
    """Targets in few words: all of them, all but some, or their names."""
    absent = [name for name in every if name not in schemes]
    if not schemes or len(schemes) <= len(absent):
        return ", ".join(schemes) or "none"
    return f"all but {', '.join(absent)}" if absent else "all"


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    if not parser.parse_args().render:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, measure())) + "\n]\n")
    rows = json.loads(RESULTS.read_text())
    print(render(rows))
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
