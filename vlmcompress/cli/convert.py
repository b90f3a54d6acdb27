"""Convert another tool's quantized checkpoint to ours, or to another format."""

from __future__ import annotations

import argparse

from vlmcompress.cli import _flags
from vlmcompress.cli._outcome import Outcome
from vlmcompress.cli.export import carry_out, converting

GROUP = "carry on"
PLACE = 42


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of the quantized checkpoint, or its id on the Hub")
    converting(parser, default="compressed-tensors")
    parser.epilog = (
        "Reads compressed-tensors, AutoAWQ (gemm), GPTQ (v1, v2), auto-round, FP8, ModelOpt and MLX, from safetensors only.\n"
        "Nothing is rounded again. The result has a manifest, which doctor, eval, bench and serve use."
    )


def run(args: argparse.Namespace) -> Outcome:
    """Write the checkpoint in the chosen format."""
    from vlmcompress.utils import hub

    _flags.check_model(args.model, family=False)
    return carry_out(hub.local(args.model), args)
