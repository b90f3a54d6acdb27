#!/usr/bin/env python
"""Ask vLLM which kernel it picks for each format on each GPU, without the GPU, and render the docs' table.

    scripts/measure/kernel_choice.py    asks the vLLM that is installed, with a pretended platform; writes eval/kernels.json
    scripts/measure/kernel_choice.py --render    print the table from that file

The last stdout line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "kernels.json"
sys.path.insert(0, str(ROOT))
from tests.kit.pretended import MACHINES, Answers, asked, machine_of, word  # noqa: E402
from vlmcompress.recipe import targets  # noqa: E402


def heads(answers: Answers) -> dict[str, list[str]]:
    """Machines that answered alike, under the titles of their targets."""
    alike: dict[str, list[str]] = {}
    for machine, answer in answers.items():
        alike.setdefault(json.dumps(answer), []).append(machine)
    return {", ".join(filter(None, map(titles, machines))): machines for machines in alike.values()}


def titles(machine: str) -> str:
    """The targets that are of a capability or architecture; of a kernel left out, what to set."""
    name, _, without = machine.partition(" without ")
    if without:
        return f"B200 with VLLM_DISABLED_KERNELS={without}"
    every = (targets.get_target(target) for target in targets.REGISTRY.names())
    return ", ".join(target.title for target in every if machine_of(target) == name)


def render(answers: Answers) -> str:
    """Render the answers as a Markdown table, of each format its first kind."""
    columns = {head: machines[0] for head, machines in heads(answers).items() if "VLLM_DISABLED" not in head}
    lines = [f"| format | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for key, kinds in next(iter(answers.values())).items():
        kind = next(iter(kinds))
        cells = [word(answers[machine][key][kind], key) or "–" for machine in columns.values()]
        lines.append(f"| {key}, {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Ask or render."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--render", action="store_true", help="print the table of the last measurement")
    if not parser.parse_args().render:
        answers = asked(MACHINES)
        RESULTS.write_text(json.dumps(answers, indent=1) + "\n")
    results = json.loads(RESULTS.read_text())
    print(render(results))
    every = [answer for formats in results.values() for kinds in formats.values() for answer in kinds.values()]
    print(json.dumps({"questions": len(every), "refused": sum("error" in answer for answer in every)}))


if __name__ == "__main__":
    main()
