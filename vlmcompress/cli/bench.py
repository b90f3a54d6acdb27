"""Measure speed and memory against the original; flags after -- go to vllm serve."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import Outcome
from vlmcompress.utils.progress import ProgressBar

if TYPE_CHECKING:
    from vlmcompress.evaluation.results import Side

GROUP = "measure"
PLACE = 32
PASSES_ON = "vllm serve"


def options(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="the candidate's folder")
    parser.add_argument("--baseline", metavar="MODEL", required=True, help="the original")
    parser.add_argument(
        "--load", default="closed:8", metavar="KIND:N", help="closed:CLIENTS or rate:REQUESTS_PER_SECOND (Poisson)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="requests per burst; default: enough for the load")
    parser.add_argument(
        "--data",
        aliases=["--images"],
        mistaken_for=["--dataset", "--calib"],
        metavar="DATA",
        help="images to send: a folder, .jsonl or .parquet; default: demo data",
    )
    parser.add_argument("--out-tokens", default=32, metavar="N", help="tokens per answer")
    parser.add_argument("--repeats", default=3, metavar="N", help="bursts per side")
    parser.add_argument(
        "--slo", metavar="LIMITS", help="limits for goodput in milliseconds, e.g. ttft=200,tpot=50,e2e=2000"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N", help="context length; default: what fits")
    _flags.speculation(parser, "OUT drafts tokens", baseline=True)
    parser.add_argument("--seed", default=0, metavar="S", help="of generated images, their order and arrivals")
    _flags.judging(parser)


def run(args: argparse.Namespace) -> Outcome:
    """Measure both sides, and judge them if a gate is given."""
    from vlmcompress.evaluation import sides

    for model in (args.out, args.baseline):
        sides.require_side(model, "vllm")
    from vlmcompress.cli._conclude import conclude, require_report_folder
    from vlmcompress.evaluation.accuracy import gate as gates
    from vlmcompress.evaluation.speed import runs
    from vlmcompress.evaluation.speed.measure import parse_slo

    gate = gates.choose_gate(args.gate)
    require_report_folder(args.report, lambda: _sides(args), overwrite=args.overwrite)
    with closing(ProgressBar()) as progress:
        results = runs.run(
            args.out,
            args.baseline,
            load=args.load,
            requests=args.requests,
            data=args.data,
            out_tokens=args.out_tokens,
            repeats=args.repeats,
            slo=parse_slo(args.slo),
            max_model_len=args.max_model_len,
            speculative={"candidate": _flags.drafting(args, args.out), "baseline": args.baseline_speculative_config},
            flags=args.extra,  # of `vllm serve`
            seed=args.seed,
            progress=progress,
        )
    return conclude(results, gate, args.report, overwrite=args.overwrite)


def _sides(args: argparse.Namespace) -> tuple[Side, Side]:
    """The sides of a report: baseline and candidate."""
    from vlmcompress.evaluation import sides
    from vlmcompress.utils import hub

    baseline, candidate = (sides.side(sides.folder(hub.local(model)), {}) for model in (args.baseline, args.out))
    return baseline, candidate
