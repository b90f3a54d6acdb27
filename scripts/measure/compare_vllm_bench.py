#!/usr/bin/env python
"""Compare our streaming client with `vllm bench serve`: the same requests to the same server, by turns.

scripts/measure/compare_vllm_bench.py [MODEL] [--requests 32] [--clients 4] [--repeats 3] [--out-tokens 32]

Medians over the turns. Requests per second and end-to-end times agree where client and server have cores of their own; on
two shared ones what the client itself costs shows, too. The inter-token gaps differ by one a request: vLLM's client counts
the empty chunk with the role as a token, see `vlmcompress/bench/client.py`. Needs `pandas` and `datasets`
in the engine's environment. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from vlmcompress.bench import client
from vlmcompress.bench.counters import Counters
from vlmcompress.bench.load import parse
from vlmcompress.bench.measure import figures, serve_run
from vlmcompress.bench.prompts import open_prompts
from vlmcompress.bench.serving import ALWAYS, FLAGS
from vlmcompress.engines.vllm import environment, interpreter
from vlmcompress.engines.vllm.launch import Server, server

# `vllm bench serve` itself, entered past the command line, which wants a distribution with the name `vllm`.
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
NAMES = {
    "request_throughput": "request_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "e2e_p50_ms": "median_e2el_ms",
    "e2e_p99_ms": "p99_e2el_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "itl_p50_ms": "median_itl_ms",
}


def ours(running: Server, burst: list, options: argparse.Namespace) -> dict[str, float]:
    bodies = [client.encode(running.name, messages, options.out_tokens) for messages in burst]
    outcomes, duration = client.send(running.url, bodies, parse(f"closed:{options.clients}"))
    run = serve_run(outcomes, duration, side="baseline", state="cold", repeat=0, slo={}, seen=Counters())
    assert not run.failed, outcomes
    found = figures(run)
    return {name: found[name] for name in NAMES} | {"gaps": len(run.itl_ms)}


def theirs(running: Server, burst: list, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.jsonl")
        data.write_text("".join(json.dumps({"content": messages[-1]["content"]}) + "\n" for messages in burst))
        flags = f"""--backend openai-chat --endpoint /v1/chat/completions --base-url {running.url} --model {options.model}
            --served-model-name {running.name} --dataset-name custom_image --dataset-path {data} --disable-shuffle
            --no-oversample --num-prompts {len(burst)} --custom-output-len {options.out_tokens} --ignore-eos
            --temperature 0 --max-concurrency {options.clients} --ready-check-timeout-sec 0 --disable-tqdm
            --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,99 --save-result --save-detailed
            --result-dir {folder} --result-filename result.json"""
        command = [interpreter(), "-c", VLLM_BENCH, *flags.split()]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        found = json.loads(Path(folder, "result.json").read_text())
    assert found["completed"] == len(burst), found["errors"]
    return {name: found[key] for name, key in NAMES.items()} | {"gaps": sum(map(len, found["itls"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="eval/demo/demo-llava")
    for name, value in (("requests", 32), ("clients", 4), ("repeats", 3), ("out-tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    prompts = open_prompts(None, [(448, 336), (224, 224)], Path(options.model), Path(options.model), seed=0)
    found: dict[str, list[dict[str, float]]] = {"vlmcompress": [], "vllm": []}
    with server(options.model, flags=[*FLAGS["cold"], *ALWAYS]) as running:
        ours(running, prompts.burst(options.repeats, options.requests), options)  # warm-up
        for repeat in range(options.repeats):
            burst = prompts.burst(repeat, options.requests)
            for name in list(found) if repeat % 2 == 0 else list(found)[::-1]:
                found[name].append((ours if name == "vlmcompress" else theirs)(running, burst, options))
    summary = {
        tool: {name: round(median(run[name] for run in runs), 2) for name in runs[0]} for tool, runs in found.items()
    }
    print(f"{'':20} {'vlmcompress':>12} {'vllm bench':>12}")
    for name in summary["vllm"]:
        print(f"{name:20} {summary['vlmcompress'][name]:12} {summary['vllm'][name]:12}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
