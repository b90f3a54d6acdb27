"""A surrogate for methods within the language model that can be served: its first K layers run ahead on image and question.

FastV and DART decide within the language model, which engines cannot follow. Here the model's own first K layers see one
image and the question behind it, nothing else, before the prompt runs; the method's rule decides on what layer K - 1 tells,
and the whole model then gets only the tokens that are kept. That costs K of its layers over the image's tokens, once for
each image and question (with FastV's rule the last of them stops at its attention); the key-value cache holds nothing of the
dropped tokens in any layer, where the originals keep all of them in the first K.

What differs from the originals: they see the words before the image, and other images, before it, where here all words stand
behind it; and what they drop has spoken to the text in the first K layers already. Depends on the question.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress.reducers import dart_llm, fastv
from vlmcompress.reducers._base import Grid, ReducerOptions, Reduction, Signals, check_keep, check_whole, share

STAGE = "projected"
NEEDS = frozenset({"ahead", "query"})
COUNT = "fixed"
SERVED = True

RULES = {"fastv": fastv, "dart": dart_llm}


@dataclass(frozen=True)
class Options(ReducerOptions):
    """`keep`: share of the tokens; `rule`: `fastv` or `dart`, which decides on what block `layer` - 1 tells, from 0.

    `pivots`, `text_pivots`: of the rule `dart`, as of `dart-llm`.
    """

    keep: float = 0.5
    rule: str = "fastv"
    layer: int = 2
    pivots: int = 4
    text_pivots: int = 4

    def __post_init__(self) -> None:
        check_keep(self.keep)
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        check_whole("layer", self.layer, least=1)
        check_whole("pivots", self.pivots, least=1)
        check_whole("text_pivots", self.text_pivots)

    @property
    def states(self) -> bool:
        """Whether the rule reads the output of block `layer` - 1; if not, that block need not run beyond its attention."""
        return "features" in RULES[self.rule].NEEDS


def budget(grid: Grid, options: Options) -> int:
    """Number of tokens to keep: the share `keep`."""
    return share(grid, options.keep)


def reduce(signals: Signals, options: Options) -> Reduction:
    """Keep tokens by the rule, from the signals of the first layers."""
    assert signals.ahead is not None
    rule = RULES[options.rule]
    settings = {field: getattr(options, field) for field in rule.Options.__dataclass_fields__}
    return rule.reduce(signals.ahead, rule.Options(**settings))
