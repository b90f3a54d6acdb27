"""Compare the answers of the compressed and the original model to the same questions."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import Outcome
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

if TYPE_CHECKING:
    from vlmcompress.evaluation.results import Side

GROUP = "measure"
PLACE = 31
MOST = 10**9
"""The largest number of questions and of tokens of an answer."""


def options(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="the candidate: a checkpoint, or a model that the server knows")
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        help="the original, or the report of an earlier evaluation of it; default with --reduce: OUT itself",
    )
    parser.add_argument(
        "--suite",
        aliases=["--tasks"],
        metavar="NAME|FILE",
        action="append",
        default=[],
        help="see vlmcompress list suites; or a task's .yaml, or data; may be repeated; default: world",
    )
    parser.add_argument(
        "--data",
        mistaken_for=["--dataset", "--calib"],
        metavar="FILE",
        help="local copy of the suite's data; without --suite: your questions and answers",
    )
    _flags.rows(parser)
    parser.add_argument(
        "--score",
        default="auto",
        metavar="NAME",
        help="how to score your own data: exact, normalized, contains, anls, box, edit, regex:PATTERN or FILE.py:FUNCTION; "
        "default: auto, which depends on the baseline's first answers",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="of an answer; default: the suite's, 4096 more for a model that thinks",
    )
    parser.add_argument(
        "--thoughts",
        metavar="OPEN,CLOSE",
        help="further marks around thoughts, which are not scored; <think>,</think> and other common ones are known",
    )
    parser.add_argument(
        "--engine", default="vllm", metavar="NAME", help="vllm, hf, llamacpp, openvino, mlx or openai:URL"
    )
    parser.add_argument("--baseline-engine", metavar="NAME", help="default: the same engine")
    parser.add_argument(
        "--reduce",
        metavar="METHOD[:KEEP]",
        help="use this visual-token reducer instead of OUT's; --engine hf",
    )
    _flags.speculation(parser, "OUT drafts tokens; --engine vllm")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="distribute the questions over a Ray cluster: auto, HOST:PORT or local"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="maximum number of questions per suite")
    parser.add_argument(
        "--seed", default=0, metavar="S", help="of the questions that --limit chooses, and of few-shot examples"
    )
    _flags.judging(parser)
    _flags.restartable(parser)
    parser.add_argument(
        "--max-drop",
        metavar="[SUITE=]SHARE",
        action="append",
        default=[],
        help="a gate of one rule: the allowed loss of accuracy, e.g. 0.01; of a suite: pages=0.01; may be repeated",
    )


def run(args: argparse.Namespace) -> Outcome:
    """Measure both sides, and judge them if a gate is given."""
    from vlmcompress.evaluation import sides

    sides.require_side(args.out, args.engine)
    sides.require_side(args.baseline or args.out, args.baseline_engine or args.engine)
    if args.data is not None:
        hub.require_data(args.data, answered=not args.suite)  # a suite's local copy may be a folder
    from vlmcompress.cli._conclude import conclude, require_report_folder
    from vlmcompress.evaluation.accuracy import gate as gates
    from vlmcompress.evaluation.report.files import JOURNAL

    for flag, number in (("--limit", args.limit), ("--max-tokens", args.max_tokens)):
        if number is not None and not 1 <= number <= MOST:
            raise UserError(f"{flag} is {number}, it should be from 1 to {MOST:,}")
    if args.baseline is None and not args.reduce:
        raise UserError("vlmcompress eval: missing --baseline; name the original, or attach a reducer with --reduce")
    gate = gates.choose_gate(args.gate, args.max_drop)
    # Wrong flags and files end the run before anything slow is imported.
    from vlmcompress import engines
    from vlmcompress.evaluation.accuracy import free_answers, thoughts
    from vlmcompress.models.data import sources

    engine = engines.get_engine(args.engine)
    if args.reduce and engine.name != "hf":
        raise UserError(
            f"--reduce attaches to transformers models, not in {engine.name}; add --engine hf, or quantize --reduce"
        )
    free_answers.named_score(args.score)
    thoughts.read_marks(args.thoughts)
    if args.data and not args.suite:
        sources.require_answers(args.data, getattr(args, "columns", None) or {})
    require_report_folder(args.report, lambda: _sides(args), overwrite=args.overwrite)
    from vlmcompress.api import evaluate

    with closing(ProgressBar()) as progress:
        results = evaluate(
            args.out,
            args.baseline or args.out,
            # one --suite may list several suites with commas, as in lm-eval's --tasks
            suites=[suite for text in args.suite for suite in ([text] if Path(text).exists() else text.split(","))],
            data=args.data,
            columns=getattr(args, "columns", None),
            skip_bad=getattr(args, "skip_bad", 0),
            engine=args.engine,
            baseline_engine=args.baseline_engine,
            reduce=args.reduce,
            speculative=_flags.drafting(args, args.out),
            ray=args.ray,
            limit=args.limit,
            seed=args.seed,
            score=args.score,
            max_tokens=args.max_tokens,
            thoughts=args.thoughts,
            margins=gates.margins(gate),
            journal=Path(args.report) / JOURNAL if args.report else None,
            restart=args.restart,
            progress=progress,
        )
    return conclude(results, gate, args.report, overwrite=args.overwrite)


def _sides(args: argparse.Namespace) -> tuple[Side, Side]:
    """The sides of a report: baseline and candidate."""
    from vlmcompress import engines
    from vlmcompress.evaluation.accuracy import accuracy

    engine, baseline_engine = (engines.get_engine(name) for name in (args.engine, args.baseline_engine or args.engine))
    baseline = accuracy.described(args.baseline or args.out, baseline_engine)
    return baseline, accuracy.described(args.out, engine, args.reduce)
