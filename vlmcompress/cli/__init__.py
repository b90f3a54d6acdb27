"""The command line: parse a call, run its verb, print the result, return the exit code.

While a verb runs, stdout is redirected to stderr; then its text or, with `--json`, its data as one JSON object is printed to
stdout. Every error is one line on stderr.

A verb is a file of this folder: a docstring whose first sentence is its line in `--help`, and

    GROUP = "compress"         its heading in `--help`; default: "more"
    PLACE = 20                 its position there; groups are ordered by their first verbs, verbs without a position come last
    PASSES_ON = "vllm serve"   the program that gets the flags after `--`, as `args.extra`; default: no such flags
    def options(parser): ...   adds its flags
    def run(args): ...         runs the verb and returns `(exit code, data, text)` (`_outcome.Outcome`)

Only the module of the requested verb is imported, and at its top only what its own `--help` needs: heavy imports are inside
`run`. Third parties add verbs by entry points of the group `vlmcompress.cli`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import textwrap
import time
import traceback

from vlmcompress import __version__
from vlmcompress.cli import _flags
from vlmcompress.cli import _process as process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import BAD_INPUT, GATE, INTERNAL, INTERRUPTED
from vlmcompress.utils import distributed, folders, hub
from vlmcompress.utils.errors import GateError, UserError
from vlmcompress.utils.messages import installing, memory_problem, misfit_problem, path_problem, shortened
from vlmcompress.utils.registry import VERBS

# Earlier verb -> what to type now.
RETIRED = {
    "calibrate": "vlmcompress quantize MODEL --calib FOLDER -o OUT, which runs the samples itself",
    "auto": "vlmcompress search MODEL --images FOLDER -o OUT",
    "report-error": "vlmcompress report OUT --errors",
    "convert": "vlmcompress export MODEL -o NEW",
    "thresholds": "vlmcompress learn-reducer MODEL -o FILE.json",
    "push": "hf upload ORG/NAME OUT, after vlmcompress doctor OUT",
    "tokens": "vlmcompress check MODEL --image-size WxH",
    "recover": "vlmcompress learn-reducer MODEL -o FILE.safetensors, or train MODEL in your own trainer, such as "
    "transformers' with peft, after vlmcompress.reduction.hooks.attach",
}
# Earlier flag -> what to do now.
RETIRED_FLAGS = {
    "--stats": "name the samples by --calib",
    "--vision-attention": "leave it out",
    "--hidden": "leave it out, a scorer is 64 wide",
    "--top": "the table has the worst layers, --json has all",
    "--sizes": "give --data with images of the size that you want",
    "--speed": "leave it out, as speed is measured where the target is this machine",
    "--shard-size": "files have at most 5 GB; vlmcompress quantize takes --set shard_size=SIZE",
    "--no-warm": "leave it out, as all runs are without caches",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse one call: the result's `verb` is its verb, `extra` the arguments after `--` for another program.

    Raises:
        UserError: an unknown or earlier verb, an unknown flag, a bad value, or one that is not text.
    """
    for word in arguments:
        # Arguments can be file names, which are written to manifests and engine settings in UTF-8.
        if word.encode(errors="ignore").decode() != word:
            name = os.fsencode(word)
            try:
                raise UserError(f"the locale can't write '{name.decode()}'; set LC_ALL=C.UTF-8, or PYTHONUTF8=1")
            except UnicodeDecodeError:
                text = name.decode(errors="backslashreplace")
                raise UserError(f"'{text}' is not UTF-8; rename the file") from None
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if verb in RETIRED and verb not in VERBS:
        raise UserError(f"there is no verb '{verb}' any more; type {RETIRED[verb]}")
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what can follow, and gets no answer but names
        import argcomplete

        typed = (word for word in os.environ["COMP_LINE"].split()[1:] if not word.startswith("-"))
        argcomplete.autocomplete(_parser(next(typed, None))[0])
    extra: list[str] = []
    if "--" in arguments and verb is not None and verb in VERBS and getattr(VERBS.get(verb), "PASSES_ON", False):
        cut = arguments.index("--")
        arguments, extra = arguments[:cut], arguments[cut + 1 :]
    parser, verbs = _parser(verb)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if flag in RETIRED_FLAGS:
            raise UserError(f"there is no flag {flag} any more; {RETIRED_FLAGS[flag]}")
        takers = [name for name in VERBS if name != args.verb and _parser(name)[1][name].has(flag)]
        verbs[args.verb].raise_unknown(unknown[0], takers, getattr(VERBS.get(args.verb), "PASSES_ON", None))
    args.extra = extra
    return args


def _parser(chosen: str | None) -> tuple[Parser, dict[str, Parser]]:
    """The main parser and all verbs' parsers; only the chosen verb's has flags. If None, the help lists all verbs."""
    about = "Make a vision-language model smaller, in a form that vLLM serves, and measure what it cost."
    parser = Parser(
        prog="vlmcompress",
        usage="vlmcompress [OPTIONS] VERB ...",
        description=about if chosen else f"{about}\n{_verbs_text()}",
        epilog="Exit codes: 0 done, 1 a quality gate failed, 2 bad input, 3 internal error, 4 a gate can't tell, "
        "130 interrupted, 143 and 129 stopped by SIGTERM and SIGHUP.",
    )
    parser.add_argument("--version", action="version", version=f"vlmcompress {__version__}")
    _flags.common(parser, default=False)
    verbs = parser.add_subparsers(
        dest="verb", required=True, metavar="VERB", prog="vlmcompress", parser_class=Parser, help=argparse.SUPPRESS
    )
    for name in VERBS:
        verb = verbs.add_parser(name)
        if name == chosen:
            verb.description = f"{VERBS.summary(name)}."
            _flags.common(verb)
            VERBS.get(name).options(verb)
    return parser, dict(verbs.choices)


def _verbs_text() -> str:
    """The list of verbs for `--help`: one line each, grouped by headings."""
    places = {name: VERBS.constant(name, "PLACE") for name in VERBS}
    groups: dict[str, list[str]] = {}
    for name in sorted(places, key=lambda name: float("inf") if places[name] is None else places[name]):
        groups.setdefault(VERBS.constant(name, "GROUP") or "more", []).append(name)
    column = max(map(len, places)) + 4
    wrap = textwrap.TextWrapper(shutil.get_terminal_size().columns - 2, subsequent_indent=" " * column)
    lines = []
    for group, names in groups.items():
        lines += ["", f"{group}:"]
        for name in names:
            wrap.initial_indent = f"  {name}".ljust(column)
            lines.append(wrap.fill(f"{VERBS.summary(name)}."))
    return "\n".join([*lines, "", "vlmcompress VERB --help shows the flags of one."])


def main(argv: list[str] | None = None) -> int:
    """Run one call and return its exit code."""
    with process.streams():
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    began = time.monotonic()  # before libraries are imported, which can take most of a short run
    words = sys.argv[1:] if argv is None else argv
    as_json, debug = "--json" in words, "--debug" in words
    # Threads that wait for others sleep. By default OpenMP's spin, which on a busy machine takes four times as long, and on a
    # quiet one no less. It is read when torch is loaded, and by engines' processes.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = argparse.Namespace()
    try:
        distributed.rank()  # raises for an environment without a valid rank
        args = parse(words)
        args.began = began
        if not args.verbose:
            process.quiet_libraries()
        hub.offline_except_ids()  # no implicit downloads
        os.environ.update(folders.torch_cache())
        with process.stopping_signals(), process.redirect_stdout():
            code, data, text = VERBS.get(args.verb).run(args)
        if distributed.is_main():
            escape = (sys.stdout.encoding or "utf-8").lower() != "utf-8"
            process.show(
                json.dumps(data, indent=1, default=str, ensure_ascii=escape) if as_json else process.fitted(text)
            )
        return code
    except process.Stopped as stop:
        return _fail(f"stopped by {stop.signal.name}{_resume_hint(args)}", 128 + stop.signal, as_json)
    except KeyboardInterrupt:
        return _fail(f"interrupted{_resume_hint(args)}", INTERRUPTED, as_json)
    except GateError as error:
        return _fail(str(error), GATE, as_json)
    except distributed.NoNumber as error:
        return _say(str(error), BAD_INPUT, as_json)
    except UserError as error:
        if debug:
            traceback.print_exc()
        if not distributed.is_main() and (isinstance(error, distributed.SharedError) or not distributed.has_formed()):
            return BAD_INPUT  # rank 0 reports it
        return _fail(memory_problem(error) or misfit_problem(error) or str(error), BAD_INPUT, as_json)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and (remedy := installing(error)):
            return _fail(f"{(error.name or '').partition('.')[0]} is not installed; {remedy}", BAD_INPUT, as_json)
        if problem := memory_problem(error) or misfit_problem(error) or path_problem(error):
            return _fail(problem, BAD_INPUT, as_json)
        with tempfile.NamedTemporaryFile("w", prefix="vlmcompress-error-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        where = "" if debug else f"; traceback in {file.name}"
        first = (str(error).strip().splitlines() or [""])[0]
        return _fail(f"internal error: {type(error).__name__}: {first}{where}", INTERNAL, as_json)


def _resume_hint(args: argparse.Namespace) -> str:
    """The end of the message about a stopped run: how to resume it; "" if no work is kept."""
    if "restart" not in args or getattr(args, "dry_run", False) or getattr(args, "report", "") is None:
        return ""
    return "; the same command goes on from here"


def _fail(message: str, code: int, as_json: bool) -> int:
    """Print an error as one line on stderr, with `--json` also as an object on stdout, and return the exit code."""
    return _say(message if distributed.is_main() else f"worker {distributed.rank()}: {message}", code, as_json)


def _say(message: str, code: int, as_json: bool) -> int:
    line = shortened(" ".join(message.split()))
    print(f"error: {line}" if code < 128 else line, file=sys.stderr, flush=True)
    if as_json:
        with contextlib.suppress(UserError):  # the line is on stderr
            process.show(json.dumps({"ok": False, "error": line, "exit_code": code}))
    return code
