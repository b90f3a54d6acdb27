"""The parser of the command line, flags that several verbs share, and the recipe values of flags."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vlmcompress.utils.errors import UserError, closest, did_you_mean

if TYPE_CHECKING:
    from vlmcompress.recipe import Recipe


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and folds those that are longer than the terminal's."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = super()._fill_text(text, width, indent).splitlines()
        return "\n".join(textwrap.fill(line, width) if len(line) > width else line for line in lines)


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UserError` with a suggestion instead of printing usage and exiting."""

    def __init__(self, **settings: Any):
        settings.setdefault("formatter_class", _Help)
        super().__init__(allow_abbrev=False, **settings)
        for number in (int, float):
            self.register("type", number, partial(_ascii, number))
        self._alternatives: dict[str, list[str]] = {}

    def add_argument(
        self, *names: Any, aliases: Iterable[str] = (), mistaken_for: Iterable[str] = (), **settings: Any
    ) -> argparse.Action:
        """Add a flag as argparse does. A default that is a number or text sets its type and ends its help.

        Args:
            aliases: hidden alternative spellings, such as those of other tools.
            mistaken_for: flags of other tools; errors about them suggest this one.
        """
        default, about = settings.get("default"), settings.get("help", argparse.SUPPRESS)
        plain = isinstance(default, int | float | str) and not isinstance(default, bool) and "action" not in settings
        if plain and default not in ("", argparse.SUPPRESS):
            settings.setdefault("type", type(default))
            if about != argparse.SUPPRESS and "default:" not in about:
                settings["help"] = f"{about}; default: {default}"
        action = super().add_argument(*names, **settings)
        for alias in aliases:
            self._option_string_actions[alias] = action
        for foreign in mistaken_for:
            self._alternatives.setdefault(foreign, []).append(action.option_strings[-1])
        return action

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string.strip() and action.option_strings and action.default != "":
            raise UserError(f"{self.prog}: {action.option_strings[-1]} has an empty value; give one, or leave it out")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        if match := re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            choices = [choice.strip(" '") for choice in match[3].split(",")]
            # flags have a name; positional arguments do not
            where = match[1] if match[1].startswith("-") else self.prog
            message = f"{where}: no '{match[2]}'{did_you_mean(match[2], choices)}"
        elif match := re.match(r"argument (\S+): expected one argument", message):
            flag = match[1].rpartition("/")[2]
            message = f"{self.prog}: {flag} needs a value; one that begins with '-' is written {flag}=-..."
        elif match := re.match(r"the following arguments are required: (.*)", message):
            message = f"{self.prog}: missing {match[1]}"
        raise UserError(message if message.endswith("?") else f"{message}; see {self.prog} --help")

    def raise_unknown(self, unknown: str, takers: Sequence[str] = (), other: str | None = None) -> NoReturn:
        """Raise `UserError` for an unknown argument, with a suggestion.

        Args:
            takers: other verbs that have this flag.
            other: the program that gets the flags after `--`; None: no such program.
        """
        flag = unknown.partition("=")[0]
        flags = [name[2:] for action in self._actions for name in action.option_strings if name.startswith("--")]
        suggestions = self._alternatives.get(flag) or [
            f"--{name}" for name in [closest(flag.lstrip("-"), flags, 0.7)] if name
        ]
        hints = [f"did you mean {' or '.join(repr(name) for name in suggestions)}?"] if suggestions else []
        if not unknown.startswith("-") and self.has("--out"):
            hints.append("OUT is given by --out")
        elif other:
            hints.append(
                f"{'Flags' if suggestions else 'flags'} of {other} go after --, as in {self.prog} OUT -- {unknown}"
            )
        elif takers and not suggestions:
            hints.append(f"{' and '.join(takers)} {'have' if len(takers) > 1 else 'has'} it")
        raise UserError(f"{self.prog} takes no '{flag}'; {' '.join(hints) or f'see {self.prog} --help'}")

    def has(self, flag: str) -> bool:
        """Whether the parser's help shows this flag."""
        return any(flag in action.option_strings for action in self._actions)


def _ascii(number: Callable[[str], float], text: str) -> float:
    """The number that a text in ASCII is; `int` and `float` alone take digits of every script. Raises ValueError."""
    if not text.isascii():
        raise ValueError
    return number(text)


MODEL = "folder of the original, or an id on the Hub"
ALONE = "default KEEP: the method's, mostly 0.5; see vlmcompress list reducers"

# Destination of a flag -> the recipe key that it sets.
RECIPE_KEYS = {
    **{name: name for name in ("model", "out", "format", "target", "scheme", "vision", "head", "embeddings")},
    "kv_cache": "kv_cache",
    **{name: f"options.{name}" for name in ("bits", "group_size")},
    **{name: name for name in ("rotate", "adapter", "dtype", "from_quantized", "reduce")},
    "calib": "calibrate.data",
    **{name: f"calibrate.{name}" for name in ("columns", "skip_bad", "text", "samples", "all_experts")},
    "seed": "seed",
}

# Recipe keys of a training.
TRAINING = ("model", "out", "calibrate", "trust_remote_code", "seed")


def model(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the verb's model."""
    parser.add_argument("model", metavar="MODEL", help=MODEL)


def target(parser: argparse.ArgumentParser, about: str = "machine to serve on; see vlmcompress list targets") -> None:
    """Add the flag of the machine to serve on; `about`: its help."""
    parser.add_argument("--target", type=target_name, default=argparse.SUPPRESS, help=about)


def target_name(text: str) -> str:
    """The target's name in the table of targets, for a flag's value."""
    from vlmcompress.recipe import targets

    return targets.REGISTRY.name(text)


def settings(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the flag that sets recipe keys; `about`: its help, which names the keys."""
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", default=[], help=about)


def resumable(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the flags of long runs that write `out`."""
    restartable(parser)
    parser.add_argument("--overwrite", action="store_true", help=f"replace {out} once the new one is complete")


def restartable(parser: argparse.ArgumentParser) -> None:
    """Add the flags about an interrupted run's work. `--resume` is the default, and may be written for clarity."""
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run; the default")
    parser.add_argument("--restart", action="store_true", help="start over, and delete an interrupted run's work")


def training(parser: argparse.ArgumentParser, defaults: Mapping[str, Any], lr: str) -> None:
    """Add the flags of a training run; `lr`: the default learning rate as the help shows it."""
    for flag, letter, about in (("steps", "N", "maximum steps"), ("batch", "B", "samples per step")):
        parser.add_argument(f"--{flag}", metavar=letter, default=defaults[flag], help=about)
    parser.add_argument("--lr", type=float, default=float(lr), help=f"peak learning rate; default: {lr}")
    parser.add_argument("--every", metavar="N", default=defaults["every"], help="steps between measurements")


def common(parser: argparse.ArgumentParser, default: Any = argparse.SUPPRESS) -> None:
    """Add the flags of every verb. They may also stand before the verb, whose parser leaves unset flags as they are."""
    about = {
        "json": "one JSON object on stdout",
        "verbose": "show the logs of libraries, and seconds by phase",
        "debug": "print tracebacks",
    }
    for name, text in about.items():
        parser.add_argument(f"--{name}", action="store_true", default=default, help=text)


def recipe(parser: Parser) -> None:
    """Add the flags that set recipe keys. Flags that are not given are omitted from the parsed arguments."""
    none = argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", nargs="?", default=none, help=MODEL)
    parser.add_argument("-o", "--out", default=none, help="folder to write")
    parser.add_argument("--recipe", metavar="FILE", help="YAML file, or the name of a bundled recipe")
    parser.add_argument("--scheme", default=none, help="see vlmcompress list schemes")
    parser.add_argument(
        "--bits", type=int, metavar="N", default=none, help="bits per weight; short for --set options.bits=N"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        default=none,
        help="weights per scale; short for --set options.group_size=N",
    )
    parser.add_argument("--format", default=none, help="file format; see vlmcompress list formats")
    adapter(parser)
    parser.add_argument("--dtype", default=none, help="of scales and unquantized tensors: bfloat16, float16 or float32")
    parser.add_argument("--from-quantized", action="store_true", default=none, help="MODEL is FP8: dequantize it first")
    target(parser)
    parser.add_argument("--vision", default=none, help="scheme of the vision tower: bf16, fp8, int8 or w8a16")
    vocabulary(parser)
    kv_cache(parser, "fp8: store scales for an FP8 KV cache")
    rotation(parser)
    parser.add_argument(
        "--reduce",
        metavar="METHOD[:KEEP]",
        action="append",
        default=none,
        help=f"visual-token reducer of the checkpoint, e.g. coverage:0.5 ({ALONE}); resize:0.5, alone or before a reducer, "
        "makes images smaller",
    )
    data(parser)
    settings(parser, "any recipe key, e.g. options.symmetric=true")


def adapter(parser: Parser) -> None:
    """Add the flag of an adapter."""
    parser.add_argument(
        "--adapter", metavar="FOLDER", default=argparse.SUPPRESS, help="a LoRA adapter, merged into MODEL first"
    )


def vocabulary(parser: Parser) -> None:
    """Add the flags of output head and token embedding."""
    none = argparse.SUPPRESS
    parser.add_argument("--head", default=none, metavar="FORMAT", help="of the output head: fp8, int8, w8a16 or w4a16")
    parser.add_argument("--embeddings", default=none, metavar="FORMAT", help="of the token embedding: w8a16 or w4a16")


def kv_cache(parser: Parser, about: str, **settings: Any) -> None:
    """Add the flag of the KV cache's type; `about`: its help."""
    settings = {"default": argparse.SUPPRESS} | settings
    parser.add_argument("--kv-cache", aliases=["--kv-cache-dtype"], help=about, **settings)


def devices(args: argparse.Namespace) -> int:
    """The value of `--tp`. Raises `UserError` if it is below 1."""
    if args.tp < 1:
        raise UserError(f"--tp {args.tp} is not a number of devices; give 1 or more")
    return args.tp


def tensor_parallel(parser: Parser, about: str) -> None:
    """Add the flag of the number of devices that share the model; `about`: its help."""
    parser.add_argument("--tp", aliases=["--tensor-parallel-size"], default=1, metavar="N", help=about)


def data(parser: Parser, samples: str = "128") -> None:
    """Add the flags that choose calibration data. `samples`: the default number of samples, in words."""
    none = argparse.SUPPRESS
    parser.add_argument(
        "--calib",
        mistaken_for=["--dataset", "--data"],
        metavar="DATA",
        default=none,
        help="folder of images, .jsonl, .parquet or data set",
    )
    rows(parser)
    parser.add_argument("--text", metavar="FILE", default=none, help="text samples to mix in, one per sample of DATA")
    parser.add_argument(
        "--samples",
        aliases=["--num-calibration-samples"],
        type=int,
        metavar="N",
        default=none,
        help=f"calibration samples; default: {samples}",
    )
    parser.add_argument(
        "--all-experts", action="store_true", default=none, help="feed every expert of a mixture all calibration tokens"
    )
    parser.add_argument("--seed", type=int, metavar="S", default=none, help="random seed; default: 0")


class _Columns(argparse.Action):
    """Merge the pairs of all `--columns` flags into one mapping."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        columns = dict(getattr(namespace, self.dest, None) or {})
        for pair in values.split(","):
            field, _, column = (part.strip() for part in pair.partition("="))
            if not field or not column:
                raise UserError(
                    f"--columns {values}: '{pair}' names no column; write FIELD=COLUMN, like question=query"
                )
            columns[field] = column
        setattr(namespace, self.dest, columns)


def _skipped(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number < float("inf"):
        raise UserError(f"--skip-bad {text} is not a number of rows; give one, or a share below 1")
    return number


def rows(parser: Parser) -> None:
    """Add the flags about how rows of data are read."""
    parser.add_argument(
        "--columns",
        action=_Columns,
        metavar="FIELD=COLUMN,...",
        default=argparse.SUPPRESS,
        help="columns of DATA with other names, e.g. image=img,question=query,answer=label",
    )
    parser.add_argument(
        "--skip-bad",
        type=_skipped,
        metavar="N|SHARE",
        default=argparse.SUPPRESS,
        help="maximum number or share of unusable rows to skip; default: 0",
    )


def rotation(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a rotation."""
    parser.add_argument(
        "--rotate", default=argparse.SUPPRESS, help="hadamard or random: rotate the decoder's hidden states first"
    )


def reducers(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add the flag of several reducers to compare."""
    parser.add_argument(
        "--reduce",
        metavar="METHOD[:KEEP]",
        action="append",
        default=[],
        required=required,
        help=f"e.g. dart:0.25 or dart:0.25,pivots=8 ({ALONE}); may be repeated",
    )


def speculation(parser: argparse.ArgumentParser, about: str, baseline: bool = False) -> None:
    """Add the flags of speculative decoding in vLLM. `about`: the start of the help; `baseline`: add one for the baseline."""
    example = '{"method": "ngram", "num_speculative_tokens": 4}, suffix, mtp or a draft model'
    parser.add_argument("--speculative-config", metavar="JSON", help=f"{about}, e.g. {example}")
    parser.add_argument(
        "--draft", metavar="DRAFT", help="folder of a draft head that `vlmcompress draft` trained for OUT"
    )
    if baseline:
        parser.add_argument("--baseline-speculative-config", metavar="JSON", help="the same for the baseline")


def drafting(args: argparse.Namespace, model: str) -> str | None:
    """The JSON of `--speculative-config`, or one for the head of `--draft`; None without either flag. UserError for both."""
    if args.draft is None:
        return args.speculative_config
    if args.speculative_config is not None:
        raise UserError("--draft and --speculative-config exclude each other; give one of them")
    from vlmcompress.export import draft_folder
    from vlmcompress.utils import hub

    return json.dumps(draft_folder.speculative_config(hub.local(args.draft), hub.local(model)))


def judging(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a report and a gate."""
    parser.add_argument(
        "--report",
        metavar="FOLDER",
        help="write report.html, report.md, results.json, junit.xml; of eval also answers.jsonl",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a report of other checkpoints in FOLDER")
    parser.add_argument(
        "--gate", metavar="FILE", help="judge by a gate file or a bundled gate; exit code 1 or 4 unless passed"
    )


def recipe_values(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe values of the given flags, nested; falsy values are kept. `UserError`: as in `read_model_config`."""
    from vlmcompress.utils import hub
    from vlmcompress.utils.settings import assign

    values: dict[str, Any] = {}
    for name, key in RECIPE_KEYS.items():
        if hasattr(args, name):
            *parents, last = key.split(".")
            into = values
            for parent in parents:
                into = into.setdefault(parent, {})
            value = getattr(args, name)
            into[last] = value[0] if isinstance(value, list) and len(value) == 1 else value
    for setting in args.set:
        assign(values, setting)
    if not isinstance(calibrate := values.get("calibrate", {}), dict):
        raise UserError(f"--set calibrate is {calibrate!r}; set keys of it, like calibrate.samples=64")
    for key in ("data", "text"):
        if isinstance(source := calibrate.get(key), str):
            hub.require_data(source)
    if isinstance(path := values.get("model"), str):
        read_model_config(path)
    return values


def training_recipe(values: Mapping[str, Any], training: Any) -> Recipe:
    """The recipe of a training, from `recipe_values`: by default with as many samples as its steps see, and a tenth more."""
    from vlmcompress.recipe import resolve
    from vlmcompress.training.teacher_cache import samples_for

    samples = {"samples": samples_for(training.steps * training.batch)}
    return resolve({**values, "scheme": "none", "calibrate": samples | values.get("calibrate", {})}).recipe


def read_model_config(name: str, family: bool = True) -> dict[str, Any]:
    """Read the config.json of a MODEL, without libraries that take seconds to import; empty for an id and an adapter.

    Args:
        family: whether the model must be of a family that can be quantized.

    Raises:
        UserError: a path with no model, with no valid config.json, or with a model of no such family.
    """
    from vlmcompress import models
    from vlmcompress.utils import hub, model_folder

    if hub.parse_repository(name) is not None:
        return {}
    model_folder.require_model(Path(name))
    config = {} if model_folder.is_adapter(Path(name)) else models.read_config(name, weights=False)
    if config and family:
        models.spec_for(config)
    return config


def require_used_values(values: Mapping[str, Any], verb: str, trained_on: str) -> None:
    """Raise `UserError` for recipe values that a training does not use.

    Args:
        values: from `recipe_values`.
        trained_on: a sentence about its data, used to refuse flags that are for calibration only.
    """
    for key, flag in (("text", "--text"), ("all_experts", "--all-experts")):
        if key in values.get("calibrate", {}):
            raise UserError(f"{flag} is for calibration; {trained_on}, leave it out")
    if foreign := [key for key in values if key not in TRAINING]:
        raise UserError(f"--set {foreign[0]}: no such key of {verb}{did_you_mean(foreign[0], TRAINING)}")
