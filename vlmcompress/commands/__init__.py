"""The verbs of the command line, one a file; adding a verb is adding a file.

A verb's module has a docstring whose first sentence is its line in `--help`, and

    GROUP = "compress"         the heading that it stands under in `--help`; left out: "more"
    PLACE = 20                 its place there; groups stand in the order of their first verbs, and what has no place last
    PASSES_ON = "vllm serve"   the program that flags behind `--` are for; they come as `args.extra`; left out: there are none
    KEPT_BY = "out"            the flag by which the same command goes on where it was stopped; left out: --resume or nothing
    def options(parser): ...   adds its flags
    def run(args): ...         does it and returns `(exit code, data, text)` (`_outcome.Outcome`)

While `run` works, stdout leads to stderr; then `cli.main` prints the text or, with `--json`, the data. Only the module of the
verb that is asked for is imported, and at its top only what its own `--help` needs: heavy imports are inside `run`. Third
parties add verbs by entry points of the group `vlmcompress.commands`.
"""

from vlmcompress.common.registry import Registry

REGISTRY = Registry("vlmcompress.commands", "verb")
