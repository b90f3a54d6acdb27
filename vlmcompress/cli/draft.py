"""Train a draft head for speculative decoding of a checkpoint in vLLM (EAGLE-3)."""

from __future__ import annotations

import argparse
import shlex
import time
from contextlib import closing
from typing import Any

from vlmcompress.cli import _flags
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import OK, Outcome, written_text
from vlmcompress.utils import distributed, hub
from vlmcompress.utils.progress import ProgressBar
from vlmcompress.utils.text import table

GROUP = "compress"
PLACE = 28
DEFAULTS = {
    "steps": 1000,
    "batch": 8,
    "lr": 1e-3,
    "every": 50,
    "answer_tokens": 128,
    "vocabulary": 32000,
}


def options(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of the checkpoint to serve: quantized, reduced or plain")
    parser.add_argument("-o", "--out", metavar="DRAFT", required=True, help="folder to write")
    _flags.data(parser, samples="enough for the steps, and a tenth more to hold out")
    _flags.training(parser, DEFAULTS, lr="1e-3")
    parser.add_argument(
        "--answer-tokens", metavar="N", default=128, help="maximum tokens of an answer of MODEL to train on"
    )
    parser.add_argument("--vocabulary", metavar="N", default=32000, help="maximum size of the draft's vocabulary")
    parser.add_argument(
        "--engine",
        choices=("vllm", "hf"),
        help="engine that answers the questions of DATA; default: vllm, or hf if it is missing",
    )
    _flags.settings(parser, "calibrate.max_length or trust_remote_code")
    _flags.resumable(parser, "DRAFT")
    parser.epilog = (
        "MODEL answers the questions of DATA itself, greedily; answers in DATA are not used. A tenth of DATA, at least 8\n"
        "samples, is held out, and the state with the lowest divergence there is written. A draft fits only the checkpoint\n"
        "that it was trained for, so train it last.\n"
        "Answers do not change, they only come sooner. Serve with vlmcompress serve MODEL --draft DRAFT; measure the gain\n"
        "with vlmcompress bench MODEL --baseline MODEL --draft DRAFT."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Train the draft and report how many of its guesses the checkpoint accepts."""
    from vlmcompress import engines

    values = _flags.recipe_values(args)
    _flags.require_used_values(values, "draft", "a draft is trained on the questions of DATA")
    from vlmcompress.training.draft import DraftTraining, draft

    training = DraftTraining(**{name: getattr(args, name) for name in DEFAULTS})
    recipe = _flags.training_recipe(values, training)
    from vlmcompress.engines.vllm import available

    engine = engines.get_engine("vllm") if args.engine == "vllm" or (args.engine is None and available()) else None
    options: dict[str, Any] = {"engine": engine, "restart": args.restart, "overwrite": args.overwrite}
    with closing(ProgressBar()) as progress:
        facts = draft(recipe, training, **options, progress=progress)
    if not distributed.is_main():
        return OK, None, ""
    folder, written = shlex.quote(hub.display_path(recipe.model)), shlex.quote(str(recipe.out))
    data = {
        "ok": True,
        "out": str(recipe.out),
        "seconds": round(time.monotonic() - args.began, 3),
        **facts,
        "next": [
            f"vlmcompress serve {folder} --draft {written}",
            f"vlmcompress bench {folder} --baseline {folder} --draft {written}",
        ],
    }
    samples, acceptance = data["samples"], data["acceptance"]
    shares = ", ".join(f"{share:.0%}" for share in acceptance["by_position"])
    steps = f"{data['steps']} of at most {data['training']['steps']}, step {data['best_step']} is kept"
    rows = [
        (
            "accepted",
            f"{acceptance['length']:.2f} tokens a step, the model's included; accepted guesses by position {shares}",
        ),
        ("held-out KL", f"{data['held_out_kl']['before']:.3f} -> {data['held_out_kl']['after']:.3f} nats a guess"),
        ("steps", steps + (f"; {data['ended']}" if data["ended"] else "")),
        ("data", f"{samples['trained_on']} answers of the model, {samples['held_out']} held out"),
        ("size", f"{data['parameters']:,} parameters; guesses {data['vocabulary']:,} tokens"),
    ]
    weak = "Few guesses are accepted; give it more data with longer answers."
    return OK, data, written_text(data, [table(rows)], args.verbose, [weak] * (acceptance["length"] < 1.2))
