#!/usr/bin/env python
"""What vlmcompress costs around vLLM, in processor seconds: `eval` next to vLLM's own benchmark, and the idle plugin.

    scripts/measure/engine_costs.py --work DIR    both parts, on demo-llava; needs vLLM
    scripts/measure/engine_costs.py --render      prints the docs' text, from eval/engine_costs.json

`eval` asks the model, and finds the same answers in its journal for the other side, so that vLLM is started once;
`vllm bench throughput` gets the same images and questions, for as many tokens as the answers have on average. For the plugin
two servers of the same model run side by side, one with `VLLM_PLUGINS` empty, and get the same bursts in turns. The last line
is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from process_cost import ROOT, family, process_cost, work_or_render

sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "eval" / "engine_costs.json"
DEMO = ROOT / "eval" / "demo" / "demo-llava"
QUESTIONS, TURNS, REQUESTS = 400, 8, 64
PHASES = ("questions", "engine start", "answers", "scores and report")
FLAGS = [
    "--no-enable-prefix-caching",
    "--mm-processor-cache-gb",
    "0",
    "--disable-uvicorn-access-log",
    "--max-model-len",
    "1024",
]


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process and of all that descend from it, with those that have ended."""
    ticks = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def evaluation(folder: Path) -> None:
    """Run one `eval` in this process; write its phases, and the questions in vLLM's form, to `folder`."""
    from vlmcompress import api
    from vlmcompress.cli._conclude import conclude
    from vlmcompress.evaluation.accuracy import tasks

    marks: dict[str, float] = {}

    def progress(label: str, done: int, total: int) -> None:
        phase = PHASES[0] if ": starting" in label else PHASES[2] if done == total else PHASES[1] if not done else None
        if phase and "baseline" in label:
            marks.setdefault(phase, processor_seconds(os.getpid()))

    journal = folder / "report" / "answers.jsonl"
    results = api.evaluate(DEMO, DEMO, limit=QUESTIONS, journal=journal, progress=progress)
    conclude(results, None, folder / "report")
    marks[PHASES[3]] = processor_seconds(os.getpid())
    times = [0.0, *(marks[phase] for phase in PHASES)]
    phases = {phase: after - before for phase, before, after in zip(PHASES, times, times[1:], strict=False)}
    entries = [json.loads(line)["entry"] for line in journal.read_text().splitlines()]
    tokens = statistics.fmean(entry["output_tokens"] for entry in entries if "output_tokens" in entry)
    rows: list[dict[str, Any]] = []
    for task in tasks.load_suite(None, None, candidate=DEMO, baseline=DEMO, limit=QUESTIONS).tasks.values():
        for document in task.eval_docs:
            row: dict[str, Any] = {
                "conversations": [
                    {"value": str(task.doc_to_text(document)).replace("<image>", "").strip()},
                    {"value": "."},
                ]
            }
            for image in task.doc_to_image(document) or ():  # at most one; some questions are of text alone
                row["image"] = str(folder / f"{len(rows)}.png")
                image.save(row["image"])
            rows.append(row)
    (folder / "questions.json").write_text(json.dumps(rows))
    (folder / "phases.json").write_text(json.dumps({"phases": phases, "questions": len(rows), "tokens": tokens}))


def benchmark(folder: Path) -> dict[str, Any]:
    """An `eval`, and vLLM's benchmark on its questions, each as a whole process."""
    from vlmcompress.engines.vllm import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    ours = process_cost([sys.executable, __file__, "--evaluation", str(folder)], ROOT)
    about = json.loads((folder / "phases.json").read_text())
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "throughput", "--model", str(DEMO)]
    command += [
        "--backend",
        "vllm-chat",
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(folder / "questions.json"),
    ]
    command += ["--num-prompts", str(about["questions"]), "--output-len", str(round(about["tokens"]))]
    command += ["--allowed-local-media-path", str(folder), "--enforce-eager", "--max-num-seqs", "32"]
    theirs = process_cost(command, ROOT)
    costs = {"eval": sum(about["phases"].values()), "bench": theirs["user"] + theirs["system"]}
    return about | costs | {"seconds": [ours["seconds"], theirs["seconds"]]}


def plugin() -> dict[str, Any]:
    """Processor milliseconds of a request to a server with our plugin over those of one without, in bursts by turns."""
    from vlmcompress.engines.vllm.serve import vllm_server
    from vlmcompress.evaluation.speed import client
    from vlmcompress.evaluation.speed.prompts import open_prompts

    prompts, ratios, costs = open_prompts(None, [(84, 84)], DEMO, DEMO, 0), {}, {}
    with ExitStack() as stack:
        servers = [stack.enter_context(vllm_server(DEMO, flags=FLAGS, images=1))]
        os.environ["VLLM_PLUGINS"] = ""
        servers.append(stack.enter_context(vllm_server(DEMO, flags=FLAGS, images=1)))
        del os.environ["VLLM_PLUGINS"]
        starts = [processor_seconds(server.pid) for server in servers]
        for clients in (1, 8):
            runs: list[list[float]] = []
            for turn in range(TURNS + 1):
                messages = prompts.burst(TURNS * clients + turn, REQUESTS)
                cost = [0.0, 0.0]
                for side in (0, 1) if turn % 2 else (1, 0):
                    server = servers[side]
                    bodies = [client.encode_request(server.name, message, 4) for message in messages]
                    before = processor_seconds(server.pid)
                    outcomes, _ = client.send(server.url, bodies, client.Load("closed", clients))
                    cost[side] = 1000 * (processor_seconds(server.pid) - before) / REQUESTS
                    if bad := [outcome.error for outcome in outcomes if outcome.error]:
                        raise SystemExit(bad[0])
                runs += [cost] * (turn > 0)  # the first is a warm-up
            ratios[clients] = sorted(with_plugin / without for with_plugin, without in runs)
            costs[clients] = [statistics.median(side) for side in zip(*runs, strict=True)]
    return {"starts": starts, "ratios": ratios, "costs": costs}


def render(results: dict[str, Any]) -> str:
    """The docs' text."""
    whole, idle = results["benchmark"], results["plugin"]
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in whole["phases"].items())
    lines = [
        f"* `eval` of {whole['questions']} questions takes {whole['eval']:.0f} s of the processor ({phases}), "
        f"`vllm bench throughput` on the same prompts {whole['bench']:.0f} s: {whole['eval'] / whole['bench']:.2f} times."
    ]
    for clients, ratios in idle["ratios"].items():
        costs = idle["costs"][clients]
        lines.append(
            f"* With the idle plugin a request of {clients} client{'s' * (clients != '1')} takes {costs[0]:.0f} ms, without it "
            f"{costs[1]:.0f} ms: {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})."
        )
    lines.append(
        f"* A server's start takes {idle['starts'][0]:.0f} s of the processor with it, {idle['starts'][1]:.0f} s without."
    )
    return "\n".join(lines)


def main() -> None:
    """Measure or render; `--evaluation` is the process of the one `eval`."""
    if sys.argv[1] == "--evaluation":
        return evaluation(Path(sys.argv[2]))
    args = work_or_render(__doc__, "20 MB")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.render:
        args.work.mkdir(parents=True, exist_ok=True)
        for name, part in (("benchmark", lambda: benchmark(args.work)), ("plugin", plugin)):
            results[name] = part()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(render(json.loads(RESULTS.read_text())))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
