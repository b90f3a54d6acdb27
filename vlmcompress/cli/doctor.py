"""Examine a finished checkpoint's files, or its answers in the engine that will serve it."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from vlmcompress.cli import _process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import BAD_INPUT, GATE, OK, Outcome, checks_text
from vlmcompress.utils import hub, model_folder
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import ProgressBar

GROUP = "measure"
PLACE = 30
ENGINES = ("vllm", "llamacpp", "openvino", "mlx")
PROMPTS = 24


def options(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder of the checkpoint")
    parser.add_argument(
        "--source",
        metavar="MODEL",
        help="the original, to compare with; with --engine llamacpp, openvino or mlx one with the same weights that "
        "transformers reads",
    )
    parser.add_argument("--draft", metavar="DRAFT", help="also check that a draft head is complete and fits OUT")
    parser.add_argument("--engine", choices=ENGINES, help="compare answers in the engine and in transformers")
    parser.add_argument("--prompts", type=int, metavar="N", help="questions to ask with --engine; default: 24")
    parser.add_argument(
        "--sizes",
        metavar="WxH,...",
        help="large images to ask about with --engine: pixels, several, all (3840x2160, 1792x2560, 1080x608, 64x8960, "
        "several) or none; default: 1920x1080",
    )
    parser.add_argument(
        "--baseline",
        metavar="MODEL",
        help="the original: with --engine, say whether the engine or the weights differ more",
    )
    parser.add_argument(
        "--data",
        mistaken_for=["--dataset", "--calib"],
        metavar="DATA",
        help="images and questions to ask with --engine; default: drawn images",
    )
    parser.add_argument("--seed", metavar="S", default=0, help="of the choice and of drawn images")
    parser.epilog = (
        "Without --engine, only files are examined. With it, the engine and transformers answer the same questions, and\n"
        "token counts, probabilities of first tokens and texts are compared, for vLLM also with its caches."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Examine the files or ask the engine. Exit code 2 for broken files, 1 for wrong answers of the engine."""
    if args.engine is None:
        for name in ("prompts", "sizes", "baseline", "data"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name} is for the check in an engine; add --engine {ENGINES[0]}")
        model_folder.require_written(Path(args.out))
        _process.import_transformers()
        from vlmcompress.evaluation.doctor.draft import examine_draft
        from vlmcompress.evaluation.doctor.files import diagnose

        checks = diagnose(Path(args.out), hub.local(args.source, weights="headers") if args.source else None)
        if args.draft is not None:
            checks += examine_draft(Path(hub.local(args.draft)), Path(args.out))
    else:
        checks = _conformance(args)
    fine = all(check.ok for check in checks)
    data = {"ok": fine, "out": args.out, "engine": args.engine, "checks": [vars(check) for check in checks]}
    return OK if fine else BAD_INPUT if args.engine is None else GATE, data, checks_text(args.out, checks)


def _conformance(args: argparse.Namespace) -> list[Any]:
    """Run the conformance checks in the engine."""
    if args.draft is not None:
        raise UserError(f"--draft is for examining files; leave out --engine {args.engine}")
    from vlmcompress.engines import mlx
    from vlmcompress.evaluation.doctor import conformance, questions
    from vlmcompress.export import readers

    sizes = questions.DEFAULT if args.sizes is None else questions.read_sizes(args.sizes)

    if args.engine != "llamacpp":
        readers.require_readable(args.out, [args.engine], "without --engine doctor examines its files")
    if args.engine == "vllm" and args.source is not None:
        raise UserError(f"--source is for examining files; leave out --engine {args.engine}")
    if args.source is None and (
        args.engine in ("llamacpp", "openvino") or args.engine == "mlx" and mlx.is_mlx(args.out)
    ):
        raise UserError(
            f"--engine {args.engine} compares with transformers; give the same weights by --source CHECKPOINT"
        )

    with closing(ProgressBar()) as progress:
        comparison = conformance.Comparison(
            Path(hub.local(args.source)) if args.source else None,
            Path(hub.local(args.baseline)) if args.baseline else None,
            prompts=PROMPTS if args.prompts is None else args.prompts,
            sizes=sizes,
            data=Path(args.data) if args.data else None,
            seed=args.seed,
        )
        return conformance.examine(args.out, args.engine, comparison, progress=progress)
