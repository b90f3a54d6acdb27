"""Search schemes, bits and visual tokens for the best recipe whose accuracy stays above a floor."""

from __future__ import annotations

import argparse
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import GATE, OK, UNDECIDED, Outcome
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import parse_pixels

if TYPE_CHECKING:
    from vlmcompress.evaluation.search.search import SearchRequest
    from vlmcompress.utils.progress import Progress

GROUP = "compress"
PLACE = 22
GOALS = ("throughput", "ttft", "memory")
CONFIRMATION = "confirmation"
DROP, DROP_OF_IMAGES = 0.01, 0.1  # default floors, of accuracy and of agreement


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
    parser.add_argument(
        "--images", metavar="FOLDER", help="without questions: images like those that the model will see"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="questions about --images, one per line; default: six short ones"
    )
    _flags.target(parser)
    parser.add_argument("--optimize", default="throughput", metavar="WHAT", help="throughput, ttft or memory")
    parser.add_argument(
        "--max-drop",
        type=float,
        metavar="SHARE",
        help=f"allowed loss of accuracy (the floor); default: {DROP:g}, with --images {DROP_OF_IMAGES:g} of agreement",
    )
    parser.add_argument(
        "--space", metavar="FILE", help="recipe keys and values to try; default: all that the target runs"
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="maximum number of questions, or of images with --images"
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
    parser.epilog = (
        "With --images alone the original's answers to short prompts are the reference, as there are no correct ones. A\n"
        "quarter of the images is for calibration, a quarter for the search, and the winner's agreement is confirmed on\n"
        "the other half, at least 36 images at the default floor; so 64 images are needed."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Search, confirm the winner, and write page and recipe."""
    search_request = request(args)
    from vlmcompress.evaluation.report import search as report
    from vlmcompress.evaluation.search import trial_log
    from vlmcompress.evaluation.search.search import run_search
    from vlmcompress.utils.work_folder import locked_output

    out = search_request.out
    with locked_output(out), closing(ProgressBar()) as progress:
        if args.restart:
            trial_log.clear(out)
        search_request, data, winner = run_search(search_request, progress)
        code = OK
        if winner and search_request.confirm:
            code, data["confirmed"] = _confirm(search_request, winner, progress)
        if not winner:
            # That nothing qualifies is a result, and has a gate's code, if every candidate was refuted by measurement.
            tried = [
                candidate["why"] for candidate in data["candidates"] if not candidate["why"].startswith("predicted")
            ]
            code = GATE if all(why.startswith(("loses more", "gains nothing")) for why in tried) else UNDECIDED
        files = report.write_search_report(data, out)
        if not args.keep_work:
            shutil.rmtree(out / trial_log.WORK, ignore_errors=True)
    data = {"ok": code == OK, **data, "out": str(out), "files": {kind: str(path) for kind, path in files.items()}}
    return code, data, report.search_text(data)


def request(args: argparse.Namespace) -> SearchRequest:
    """The search that the flags describe.

    Raises:
        UserError: a flag has a bad value, or a file that it names is missing; before libraries are imported.
    """
    if args.images and (args.data or args.suite or args.confirm or hasattr(args, "calib")):
        raise UserError("--images is for a search without questions; leave out --data, --suite, --confirm and --calib")
    if not (args.data or args.suite or args.images):
        raise UserError(
            "vlmcompress search: missing --data; give questions with answers, or images alone with --images"
        )
    if args.prompts and not args.images:
        raise UserError("--prompts are questions about --images; give both or none")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}, it should be at least 1")
    if args.optimize not in GOALS:
        raise UserError(f"--optimize {args.optimize}: no such objective{did_you_mean(args.optimize, GOALS)}")
    margin = args.max_drop if args.max_drop is not None else DROP_OF_IMAGES if args.images else DROP
    if not 0 < margin < 1:
        raise UserError(f"--max-drop {margin:g} is not a share between 0 and 1; for one point write 0.01")
    if args.out_tokens < 1:
        raise UserError(f"--out-tokens is {args.out_tokens}; it should be at least 1")
    if args.engine not in ("vllm", "hf"):
        raise UserError(f"--engine {args.engine}: a search evaluates its own checkpoints; give vllm or hf")
    for name in (args.data, args.confirm):
        if name is not None:
            hub.require_data(name, answered=True)
    image, budget = parse_pixels(args.image_size, "--image-size", most=999_999), seconds(args.max_time)
    base = _flags.recipe_values(args)
    prompts = _prompts(args.prompts) if args.prompts else None
    from vlmcompress.evaluation.search.own_answers import PROMPTS
    from vlmcompress.evaluation.search.search import SearchRequest
    from vlmcompress.evaluation.search.speed import TypicalRequest

    return SearchRequest(
        out=Path(base.pop("out")),
        base=base,
        data=args.data,
        suite=args.suite,
        confirm=args.confirm,
        images=args.images,
        prompts=prompts or PROMPTS,
        limit=args.limit,
        margin=margin,
        goal=args.optimize,
        load=TypicalRequest(image=image, out=args.out_tokens),
        budget=budget,
        engine=args.engine,
        ray=args.ray,
        space=args.space,
    )


def seconds(text: str | None) -> float | None:
    """The seconds of a time like 90s, 30m or 1h30m; None without one. Raises `UserError` for other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    if not match or not any(int(part or 0) for part in match.groups()):
        raise UserError(f"--max-time {text}: write a time like 90s, 30m or 1h30m")
    hours, minutes, rest = (int(part or 0) for part in match.groups())
    return 3600.0 * hours + 60.0 * minutes + rest


def _prompts(file: str) -> tuple[str, ...]:
    """The prompts in a text file, one per line."""
    try:
        lines = tuple(line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {file} cannot be read ({error}); write one prompt per line") from error
    if not lines:
        raise UserError(f"--prompts {file} is empty; write one prompt per line")
    return lines


def _confirm(search_request: SearchRequest, winner: Path, progress: Progress) -> tuple[int, dict[str, Any]]:
    """Ask winner and original the unused questions, once; exit code, and the verdict as data."""
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
    return EXIT[overall.verdict], {
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
