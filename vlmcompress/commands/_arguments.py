"""The command line's grammar. Argparse, but wrong usage is a `UserError` with the closest right word, as anywhere else."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

from vlmcompress import __version__
from vlmcompress.commands import bench as bench
from vlmcompress.commands import doctor as doctor
from vlmcompress.commands import eval as evaluation
from vlmcompress.commands import report as report
from vlmcompress.commands import report_error as report_error
from vlmcompress.commands import sweep as sweep
from vlmcompress.commands import thresholds as thresholds
from vlmcompress.errors import UserError, did_you_mean
from vlmcompress.recipe import layers as settings

# Destination of a flag -> the recipe key that it gives a value to.
RECIPE_KEYS = {
    "model": "model",
    "out": "out",
    "target": "target",
    "goal": "goal",
    "scheme": "scheme",
    "vision": "vision",
    "kv_cache": "kv_cache",
    "reduce": "reduce",
    "calib": "calibrate.data",
    "text": "calibrate.text",
    "samples": "calibrate.samples",
    "stats": "calibrate.stats",
    "seed": "seed",
}

STATISTICS = ("absmax", "absmean", "entropy", "gradient", "gram")  # `calibrate.KINDS`, which would bring torch along
LISTED = ("schemes", "targets", "families", "recipes", "formats", "reducers", "suites", "gates")


class Parser(argparse.ArgumentParser):
    """Raises `UserError` instead of printing usage and leaving."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = [choice.strip(" '") for choice in found[3].split(",")]
            message = f"{found[1]}: no '{found[2]}'{did_you_mean(found[2], choices)}"
        elif found := re.match(r"the following arguments are required: (.*)", message):
            message = f"{self.prog}: missing {found[1]}"
        raise UserError(f"{message}; see {self.prog} --help")

    def options(self) -> list[str]:
        """All flags."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The arguments of one call."""
    parser, verbs = _parser()
    extra: list[str] = []
    if arguments[:1] in (["serve"], ["bench"]) and "--" in arguments:  # the rest is vLLM's
        cut = arguments.index("--")
        arguments, extra = arguments[:cut], arguments[cut + 1 :]
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        close = difflib.get_close_matches(flag, verbs[args.verb].options(), n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; see vlmcompress {args.verb} --help"
        raise UserError(f"vlmcompress {args.verb} takes no '{flag}'{hint}")
    args.extra = extra
    return args


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe values that flags gave, nested. What was not given is absent; what is falsy was given."""
    values: dict[str, Any] = {}
    for name, key in RECIPE_KEYS.items():
        if hasattr(args, name):
            *parents, last = key.split(".")
            into = values
            for parent in parents:
                into = into.setdefault(parent, {})
            into[last] = getattr(args, name)
    for setting in args.set:
        settings.assign(values, setting)
    return values


def needs(text: str | None) -> tuple[str, ...] | None:
    """The statistics that `--needs` names; None: all that the data have."""
    if text is None:
        return None
    names = tuple(text.split(","))
    for name in names:
        if name not in STATISTICS:
            raise UserError(f"--needs: no '{name}'{did_you_mean(name, STATISTICS)}")
    return names


def refuse_foreign(values: dict[str, Any]) -> None:
    """Recipe keys that mean nothing to `calibrate`."""
    known = ("model", "out", "kv_cache", "reduce", "calibrate", "trust_remote_code", "seed")
    foreign = [key for key in values if key not in known]
    foreign += ["calibrate.stats"] if "stats" in values.get("calibrate", {}) else []
    if foreign:
        raise UserError(f"--set {foreign[0]}: no such key of calibrate{did_you_mean(foreign[0], known)}")


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="vlmcompress",
        description="Make a vision-language model smaller, in a form that vLLM serves, and measure what it cost.",
        epilog="Exit codes: 0 done, 1 a quality gate failed, 2 bad input, 3 internal error, 4 a gate can't tell, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"vlmcompress {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=Parser)
    common = Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object on stdout")
    common.add_argument("--verbose", action="store_true", help="show what the libraries log")
    common.add_argument("--debug", action="store_true", help="print tracebacks")

    def verb(name: str, about: str) -> Parser:
        return verbs.add_parser(name, help=about, description=about, parents=[common])

    _calibrate(
        verb(
            "calibrate",
            "Collect statistics of a model's activations once; quantize --stats then needs no forward pass.",
        )
    )
    _quantize(verb("quantize", "Write a compressed checkpoint."))
    sweep.options(verb("sweep", "Score dozens of settings from statistics alone: predicted error against size."))
    check = verb("check", "Tell in seconds whether a recipe works for a model, a target and an engine.")
    _recipe(check)
    check.add_argument("--engine", help="vllm, transformers, sglang, lmdeploy or tensorrt-llm; default: the recipe's")
    doctor.options(verb("doctor", "Examine a finished checkpoint, or ask it in the engine that will serve it."))
    _tokens(verb("tokens", "Count what images cost before and after a reducer, without reading weights."))
    _inspect(verb("inspect", "Draw which parts of an image reducers keep, merge and drop."))
    thresholds.options(
        verb("thresholds", "Learn DyMU's thresholds: how alike tokens must be to merge, layer by layer.")
    )
    evaluation.options(verb("eval", "Ask the compressed and the original model the same questions and compare."))
    bench.options(verb("bench", "Measure speed and memory against the original; flags after -- go to vllm serve."))
    report.options(verb("report", "Put the reports of several runs on one page."))
    report_error.options(
        verb("report-error", "Show each layer's error by modality, and what changed between two checkpoints.")
    )
    _serve(verb("serve", "Run vLLM's OpenAI-compatible server; flags after -- go to vllm serve."))
    listing = verb("list", "List what has a name.")
    listing.add_argument("what", nargs="?", choices=LISTED)
    return parser, dict(verbs.choices)


def _recipe(parser: Parser) -> None:
    """The flags that stand for recipe keys; absent ones leave no trace."""
    none = argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", nargs="?", default=none, help="folder of the original")
    parser.add_argument("-o", "--out", default=none, help="folder to write")
    parser.add_argument("--recipe", metavar="FILE", help="YAML file, or the name of a bundled recipe")
    parser.add_argument("--scheme", default=none, help="see vlmcompress list schemes")
    parser.add_argument("--target", default=none, help="machine to serve on; see vlmcompress list targets")
    parser.add_argument("--goal", default=none, help="memory or throughput: which of the target's schemes to take")
    parser.add_argument("--vision", default=none, help="bf16, fp8 or int8: the vision tower")
    parser.add_argument("--kv-cache", default=none, help="fp8: store scales for an FP8 KV cache")
    _reducer(parser, "what the checkpoint carries: a visual-token reducer")
    _data(parser)
    parser.add_argument(
        "--stats", metavar="STATS", default=none, help="what calibrate wrote: solve from it, running nothing"
    )
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", default=[], help="any recipe key, e.g. options.bits=4"
    )


def _data(parser: Parser) -> None:
    """The flags that choose calibration data."""
    none = argparse.SUPPRESS
    parser.add_argument("--calib", metavar="DATA", default=none, help="folder of images, .jsonl, .parquet or data set")
    parser.add_argument("--text", metavar="FILE", default=none, help="text samples to mix in, one for each of DATA")
    parser.add_argument("--samples", type=int, metavar="N", default=none, help="calibration samples")
    parser.add_argument("--seed", type=int, metavar="S", default=none, help="of everything random")


def _reducer(parser: Parser, about: str) -> None:
    example = "e.g. dart:0.5, see vlmcompress list reducers"
    parser.add_argument("--reduce", metavar="METHOD:KEEP", default=argparse.SUPPRESS, help=f"{about}, {example}")


def _calibrate(parser: Parser) -> None:
    none = argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", default=none, help="folder of the original")
    parser.add_argument("-o", "--out", metavar="STATS", required=True, help="folder to write")
    _data(parser)
    parser.add_argument("--kv-cache", default=none, help="fp8: collect ranges of keys and values, too")
    _reducer(parser, "collect what the decoder sees behind a visual-token reducer")
    parser.add_argument(
        "--needs",
        metavar="A,B",
        help="of gram (the large one), absmax, absmean, entropy, gradient (only with answers); default: all",
    )
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", default=[], help="calibrate.max_length or trust_remote_code"
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace STATS once the new ones are whole")
    parser.epilog = (
        "Statistics are of the unquantized model (prefix float) and serve every scheme: for each group of layers and each\n"
        "modality (text, vision, answer) the Gram matrix X^T X, absolute maxima, means and counts. quantize without --stats\n"
        "observes each block behind quantized ones instead (prefix quantized)."
    )


def _quantize(parser: Parser) -> None:
    _recipe(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the plan; read no weights, write nothing")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT once the new one is whole")


def _reducers(parser: Parser, required: bool) -> None:
    parser.add_argument(
        "--reduce",
        metavar="METHOD:KEEP",
        action="append",
        default=[],
        required=required,
        help="e.g. dart:0.25 or dart:0.25,pivots=8; may be repeated; see vlmcompress list reducers",
    )


def _tokens(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder with config.json and the processor's files")
    parser.add_argument(
        "--image-size", metavar="WxH", action="append", required=True, help="may be repeated: images of one prompt"
    )
    _reducers(parser, required=False)
    parser.add_argument("--question", metavar="Q", default="", help="text behind the images")
    parser.add_argument("--kv-cache", metavar="TYPE", help="fp8 or bf16; default: the model's own type")
    parser.epilog = (
        "prefill and KV cache are the language model's; the encoder works on whole images whatever is dropped."
    )


def _inspect(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of the original")
    parser.add_argument("--image", metavar="FILE", action="append", required=True, help="may be repeated")
    parser.add_argument("--question", metavar="Q", default="", help="text behind the images; some methods look at it")
    _reducers(parser, required=True)
    parser.add_argument("-o", "--out", metavar="FILE", required=True, help="the picture to write; .png")


def _serve(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, metavar="N", help="context length; default: what fits")
    parser.add_argument("--images", type=int, default=4, metavar="N", help="most images of a request")
