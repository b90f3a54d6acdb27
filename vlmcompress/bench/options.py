"""The verb `bench`: its flags, and what it prints."""

from __future__ import annotations

import argparse
from typing import Any

from vlmcompress import terminal
from vlmcompress.results import Memory, Ratio, Results

SHOWN = {
    "request_throughput": "requests per second",
    "output_throughput": "output tokens per second",
    "goodput": "good requests per second",
    "ttft_p50_ms": "time to first token, p50",
    "ttft_p99_ms": "time to first token, p99",
    "tpot_p50_ms": "time per output token, p50",
    "itl_p99_ms": "between two tokens, p99",
    "e2e_p50_ms": "whole request, p50",
    "e2e_p99_ms": "whole request, p99",
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("out", metavar="OUT", help="the candidate's folder")
    parser.add_argument("--baseline", metavar="MODEL", required=True, help="the original")
    parser.add_argument(
        "--load", default="closed:8", metavar="KIND:N", help="closed:CLIENTS or rate:REQUESTS_PER_SECOND (Poisson)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="of one burst; default: enough for the load")
    parser.add_argument("--images", metavar="DATA", help="folder of images, .jsonl or .parquet; default: demo data")
    parser.add_argument(
        "--sizes", nargs="+", default=[], metavar="WxH", help="scale images, or generate some where none are given"
    )
    parser.add_argument("--out-tokens", type=int, default=32, metavar="N", help="tokens of every answer")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="bursts of each side, in ABBA order")
    parser.add_argument("--slo", metavar="LIMITS", help="goodput: milliseconds, e.g. ttft=200,tpot=50,e2e=2000")
    parser.add_argument("--no-warm", action="store_true", help="leave out runs with caches")
    parser.add_argument("--no-offline", action="store_true", help="leave out runs of the engine without a server")
    parser.add_argument("--resident", action="store_true", help="keep both servers up; needs memory for both")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="context length; default: what fits")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--report", metavar="FOLDER", help="write report.html, report.md and results.json")


def run_verb(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Run `vlmcompress bench`: exit code, data for `--json`, text."""
    from vlmcompress.report import write

    results = measure(args)
    files = write(results, args.report) if args.report else {}
    shown = text(results) + (f"\n\nReport: {files['html']}" if files else "")
    return 0, {"ok": True, **results.to_dict(), "report": str(files["html"]) if files else None}, shown


def measure(args: argparse.Namespace) -> Results:
    """What the flags ask for. `args.extra` are further flags of `vllm serve`."""
    from vlmcompress.bench.measure import parse_slo
    from vlmcompress.bench.runs import run

    progress = terminal.Progress()
    try:
        return run(
            args.out,
            args.baseline,
            load=args.load,
            requests=args.requests,
            data=args.images,
            sizes=args.sizes,
            out_tokens=args.out_tokens,
            repeats=args.repeats,
            slo=parse_slo(args.slo),
            warm=not args.no_warm,
            offline=not args.no_offline,
            resident=args.resident,
            max_model_len=args.max_model_len,
            flags=getattr(args, "extra", ()),
            seed=args.seed,
            progress=progress,
        )
    finally:
        progress.close()


def text(results: Results) -> str:
    """The benchmark for a terminal."""
    bench = results.bench
    assert bench is not None
    seen = f"{bench.requests} requests a burst, {bench.out_tokens} tokens an answer, {bench.repeats} repeats"
    lines = [f"{results.candidate.name} against {results.baseline.name}, load {bench.load}: {seen}"]
    for mode, states in bench.summary.items():
        for state, found in states.items():
            rows = [_row(title, found[name]) for name, title in SHOWN.items() if name in found]
            head = ("", "baseline", "candidate", "ratio", "of repeats")
            lines += ["", f"{mode}, {'no caches' if state == 'cold' else 'caches on'}", terminal.table([head, *rows])]
    if bench.memory:
        lines += ["", "memory", terminal.table(_memory(bench.memory))]
    failed = sum(run.failed for run in bench.runs)
    if failed:
        lines += ["", f"{failed} of {failed + sum(run.completed for run in bench.runs)} requests failed."]
    return "\n".join(lines)


def _row(title: str, found: Ratio) -> tuple[str, ...]:
    spread = f"{found.low:.2f} to {found.high:.2f}"
    return (
        title,
        *(f"{value:.4g} {found.unit}" for value in (found.baseline, found.candidate)),
        f"{found.ratio:.2f}",
        spread,
    )


def _memory(sides: dict[str, Memory]) -> list[tuple[str, ...]]:
    rows = [
        ("", *sides),
        ("weights", *(terminal.size(side.weight_bytes) for side in sides.values())),
        ("KV cache of a token", *(terminal.size(side.kv_bytes_per_token) for side in sides.values())),
        ("KV cache of a request", *(terminal.size(side.kv_bytes_per_request) for side in sides.values())),
        ("requests that fit", *(f"{side.max_concurrency:.4g}" for side in sides.values())),
    ]
    return rows
