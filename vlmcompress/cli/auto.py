"""Compress a model as far as its answers allow, given only a folder of images."""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import closing
from pathlib import Path

from vlmcompress.cli import _flags, search
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import Outcome
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

GROUP = "compress"
PLACE = 20
MOST = 1000


def options(parser: Parser) -> None:
    none = argparse.SUPPRESS
    _flags.model(parser)
    parser.add_argument("-o", "--out", metavar="DIR", default=none, required=True, help="folder of the search")
    parser.add_argument("--images", metavar="FOLDER", required=True, help="images like those that the model will see")
    parser.add_argument("--prompts", metavar="FILE", help="questions about them, one per line; default: six short ones")
    parser.add_argument("--min-agreement", default=0.9, metavar="SHARE", help="answers that must not change")
    parser.add_argument("--most", default=MOST, metavar="N", help="maximum number of images")
    parser.add_argument("--seed", type=int, metavar="S", default=none, help="random seed; default: 0")
    search.objective_flags(parser)
    parser.epilog = (
        "The reference is the original's answers to short prompts, as there are no correct answers. A quarter of the images\n"
        "is for calibration, a quarter for the search, and the winner's agreement is confirmed on the other half, at least 36\n"
        "images at the default floor; so 64 images are needed. If you have questions with answers, use `vlmcompress search`,\n"
        "which keeps accuracy above a floor."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Ask the original about the images, and search with its answers as reference."""
    if not 0 < args.min_agreement < 1:
        raise UserError(f"--min-agreement {args.min_agreement:g} is not a share between 0 and 1; e.g. 0.9")
    if args.most < 1:
        raise UserError(f"--most is {args.most}; it should be at least 1")
    args.max_drop = round(1 - args.min_agreement, 9)
    request = search.request(args)
    prompts = _prompts(args.prompts)
    from vlmcompress.evaluation.search import own_answers, trial_log
    from vlmcompress.evaluation.search.search import QUESTIONS, setup_of
    from vlmcompress.utils.work_folder import locked_output

    parts = own_answers.split_images(args.images, args.most, args.max_drop)
    setup = setup_of(request)
    with locked_output(request.out):
        if args.restart:
            trial_log.clear(request.out)
        with closing(ProgressBar()) as progress:
            files = own_answers.written(parts, prompts, request.out / QUESTIONS, setup, progress)
        calibrate = {"data": str(files[own_answers.CALIBRATION]), "samples": len(parts.calibration)}
        base = {**request.base, "calibrate": calibrate}
        data, confirm = str(files[own_answers.SEARCH]), str(files[own_answers.CONFIRM])
        request = dataclasses.replace(request, base=base, data=data, confirm=confirm, small=True)
        return search.search_outcome(request, args, reference="the original's own answers")


def _prompts(file: str | None) -> tuple[str, ...]:
    """The prompts in a text file, one per line; None: the bundled ones."""
    from vlmcompress.evaluation.search.own_answers import PROMPTS

    if file is None:
        return PROMPTS
    try:
        lines = tuple(line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--prompts {file} cannot be read ({error}); give a text file with one prompt per line"
        ) from error
    if not lines:
        raise UserError(f"--prompts {file} is empty; give one prompt per line")
    return lines
