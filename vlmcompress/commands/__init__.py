"""The verbs of the command line, one a file; adding a verb is adding a file.

A verb's module has a docstring whose first sentence is its line in `--help`, and

    PLACE = 20                 its place in `--help`; without one it stands behind the others
    PASSES_ON = True           flags behind `--` are for another program and come as `args.extra`; left out: there are none
    def options(parser): ...   adds its flags
    def run(args): ...         does it and returns `(exit code, data, text)` (`_outcome.Outcome`)

While `run` works, stdout leads to stderr; then `cli.main` prints the text or, with `--json`, the data. Only the module of the
verb that is asked for is imported, and at its top only what its own `--help` needs: heavy imports are inside `run`. Third
parties add verbs by entry points of the group `vlmcompress.commands`.
"""

from vlmcompress.common.registry import Registry

REGISTRY = Registry("vlmcompress.commands", "verb")
