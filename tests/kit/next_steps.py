"""Follow the commands that a verb names as next steps, up to where an engine would start."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vlmcompress import cli
from vlmcompress.evaluation.accuracy import tasks


def follow(commands: Sequence[str], data: Path, folder: Path) -> list[str]:
    """Fill in the words in capitals and check that each command would run; returns the verbs.

    `eval` finds its questions, `quantize` plans, others are parsed.

    Args:
        data: questions with answers about images.
        folder: where OUT would be.
    """
    places = {"FILE": str(data), "DATA": str(data), "SCHEME": "gptq", "OUT": str(folder / "next")}
    verbs = []
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "vlmcompress"
        words = [places.get(word, word) for word in words]
        args = cli.parse(words)
        if args.verb == "eval":
            tasks.load_suite(None, args.data, candidate=args.out, baseline=args.baseline)
        elif args.verb == "quantize":
            assert cli.main([*words, "--dry-run"]) == 0, command
        verbs.append(args.verb)
    return verbs
