"""Search schemes, bits and visual tokens for the best recipe whose accuracy stays above a floor."""

from __future__ import annotations

import argparse
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import GATE, OK, UNDECIDED, Outcome
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import parse_pixels

if TYPE_CHECKING:
    from vlmcompress.evaluation.search.search import SearchRequest

GROUP = "compress"
PLACE = 22
GOALS = ("throughput", "ttft", "memory", "cost")
CONFIRMATION = "confirmation"


def options(parser: Parser) -> None:
    none = argparse.SUPPRESS
    _flags.model(parser)
    parser.add_argument("-o", "--out", metavar="DIR", default=none, required=True, help="folder of the search")
    _flags.data(parser)
    parser.add_argument(
        "--data",
        mistaken_for=["--dataset"],
        metavar="VALIDATION",
        help="questions and answers to evaluate candidates on",
    )
    parser.add_argument(
        "--suite", aliases=["--tasks"], metavar="NAME|FILE", help="scoring of the data; see vlmcompress list suites"
    )
    parser.add_argument("--confirm", metavar="TEST", help="other questions, asked once and only of the winner")
    objective_flags(parser)
    parser.add_argument("--max-drop", default=0.01, metavar="SHARE", help="allowed loss of accuracy (the floor)")
    parser.add_argument(
        "--space", metavar="FILE", help="recipe keys and values to try; default: all that the target runs"
    )
    parser.add_argument("--recover", action="store_true", help="also try models trained with their reducer")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="maximum number of questions of VALIDATION; default: all"
    )


def objective_flags(parser: Parser) -> None:
    """Add the flags of the objective and the search, shared with `auto`."""
    _flags.target(parser)
    parser.add_argument("--optimize", default="throughput", metavar="WHAT", help="throughput, ttft, memory or cost")
    parser.add_argument(
        "--speed", default="", metavar="HOW", help="measured (in vLLM here) or modelled (from the target's rates)"
    )
    parser.add_argument(
        "--image-size",
        aliases=["--image"],
        default="448x448",
        metavar="WxH",
        help="of a typical request, for modelled speed",
    )
    parser.add_argument("--out-tokens", default=32, metavar="N", help="tokens of a typical answer")
    parser.add_argument(
        "--price", type=float, metavar="PER_HOUR", help="price of the machine, for the cost of 1,000 requests"
    )
    parser.add_argument(
        "--max-time", aliases=["--budget"], metavar="TIME", help="time limit of the search, like 30m or 2h"
    )
    parser.add_argument("--engine", default="vllm", metavar="NAME", help="engine that answers: vllm or hf")
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="distribute candidates over a Ray cluster: auto, HOST:PORT or local"
    )
    parser.add_argument(
        "--keep-work",
        aliases=["--keep"],
        action="store_true",
        help="keep the work folder with the checkpoints of all candidates",
    )
    _flags.restartable(parser)
    parser.set_defaults(set=[])


def run(args: argparse.Namespace) -> Outcome:
    """Search, confirm the winner, and write page and recipe."""
    if not args.data and not args.suite:
        raise UserError("vlmcompress search: missing --data; give questions with answers")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}, it should be at least 1")
    search_request = request(args)
    from vlmcompress.evaluation.search import trial_log
    from vlmcompress.utils.work_folder import locked_output

    with locked_output(search_request.out):
        if args.restart:
            trial_log.clear(search_request.out)
        return search_outcome(search_request, args)


def request(args: argparse.Namespace) -> SearchRequest:
    """The search request that the flags describe. Raises `UserError` for a flag with a bad value."""
    if args.optimize not in GOALS:
        raise UserError(f"--optimize {args.optimize}: no such objective{did_you_mean(args.optimize, GOALS)}")
    if args.speed not in ("", "measured", "modelled"):
        raise UserError(f"--speed {args.speed}: give measured or modelled")
    if not 0 < args.max_drop < 1:
        raise UserError(f"--max-drop {args.max_drop:g} is not a share between 0 and 1; for one point write 0.01")
    if args.out_tokens < 1:
        raise UserError(f"--out-tokens is {args.out_tokens}; it should be at least 1")
    if args.price is not None and not args.price > 0:
        raise UserError(f"--price is {args.price:g}; give the price of the machine per hour")
    if args.engine not in ("vllm", "hf"):
        raise UserError(f"--engine {args.engine}: a search evaluates its own checkpoints; give vllm or hf")
    image = parse_pixels(args.image_size, "--image-size", most=999_999)
    base = _flags.recipe_values(args)
    from vlmcompress.evaluation.search.search import SearchRequest
    from vlmcompress.evaluation.search.speed import TypicalRequest

    out = Path(base.pop("out"))
    return SearchRequest(
        base=base,
        out=out,
        data=getattr(args, "data", None),
        suite=getattr(args, "suite", None),
        confirm=getattr(args, "confirm", None),
        limit=getattr(args, "limit", None),
        margin=args.max_drop,
        goal=args.optimize,
        speed=args.speed,
        load=TypicalRequest(image=image, out=args.out_tokens),
        budget=seconds(args.max_time) if args.max_time else None,
        engine=args.engine,
        ray=args.ray,
        space=getattr(args, "space", None),
        recover=getattr(args, "recover", False),
    )


def seconds(text: str) -> float:
    """The seconds of a time like 90s, 30m or 1h30m. Raises `UserError` for other text."""
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    if not match or not any(match.groups()) or not any(int(part or 0) for part in match.groups()):
        raise UserError(f"--max-time {text}: write a time like 90s, 30m or 1h30m")
    hours, minutes, rest = (int(part or 0) for part in match.groups())
    return 3600.0 * hours + 60.0 * minutes + rest


def search_outcome(
    search_request: SearchRequest, args: argparse.Namespace, reference: str = "the data's answers"
) -> Outcome:
    """Run a search, confirm its winner and write the page. `reference`: the page's words for the reference answers."""
    from vlmcompress.evaluation.report import search as report
    from vlmcompress.evaluation.search.search import WORK, run_search

    with closing(ProgressBar()) as progress:
        data, winner = run_search(search_request, progress)
        code = OK
        data["reference"] = reference
        if winner and search_request.confirm:
            from vlmcompress.api import evaluate
            from vlmcompress.cli._conclude import EXIT, conclude
            from vlmcompress.evaluation.accuracy import gate as gates
            from vlmcompress.evaluation.search.trial_log import CONFIRMED

            gate = gates.choose_gate(None, [str(search_request.margin)])
            model, calibrate = hub.local(search_request.base["model"]), search_request.base.get("calibrate", {})
            results = evaluate(
                winner,
                model,
                suites=[search_request.suite] if search_request.suite else (),
                data=search_request.confirm,
                columns=calibrate.get("columns"),
                skip_bad=calibrate.get("skip_bad", 0),
                engine=search_request.engine,
                seed=search_request.seed,
                margins=gates.margins(gate),
                journal=search_request.out / CONFIRMED,
                progress=progress,
            )
            conclude(results, gate, search_request.out / CONFIRMATION)
            overall = results.suites[0].overall
            code = EXIT[overall.verdict]
            data["confirmed"] = {
                "verdict": overall.verdict,
                "questions": overall.n,
                "images": overall.clusters,
                "original": overall.baseline,
                "winner": overall.candidate,
                "difference": overall.difference,
                "low": overall.low,
                "high": overall.high,
                "missing": overall.missing,
                "unit": overall.unit,
                "report": f"{CONFIRMATION}/report.html",
            }
    if args.price is not None:
        data["price_per_hour"] = args.price
    if not winner:
        tried = [candidate for candidate in data["candidates"] if not candidate["why"].startswith("predicted")]
        code = (
            GATE
            if all(candidate["why"].startswith(("loses more", "gains nothing")) for candidate in tried)
            else UNDECIDED
        )
    files = report.write_search_report(data, search_request.out)
    if not args.keep_work:
        shutil.rmtree(search_request.out / WORK, ignore_errors=True)
    data = {
        "ok": code == OK,
        **data,
        "out": str(search_request.out),
        "files": {kind: str(path) for kind, path in files.items()},
    }
    return code, data, report.search_text(data)
