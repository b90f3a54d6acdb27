"""The verbs. Each turns arguments into a call of the package and returns what to print; `main` does the rest.

A verb gets parsed arguments and returns `(exit code, data, text)`. While it runs, stdout leads to stderr; then either the text
or, with `--json`, the data as one JSON object goes to stdout. Heavy imports are inside the verbs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from vlmcompress.commands import _arguments as arguments
from vlmcompress.commands import _summary as summary
from vlmcompress.commands import _terminal as terminal
from vlmcompress.errors import GateError, UserError

Outcome = tuple[int, Any, str]
OK, GATE, BAD_INPUT, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130

# Package that is absent -> the extra that brings it.
_EXTRAS = {
    "llmcompressor": "compress",
    "datasets": "compress",
    "pyarrow": "compress",
    "lm_eval": "eval",
    "aiohttp": "eval",
    "openai": "eval",
    "vllm": "serve",
}


def quantize(args: argparse.Namespace) -> Outcome:
    """`vlmcompress quantize`"""
    from vlmcompress.recipe import resolve

    resolved = resolve(arguments.given(args), args.recipe)
    if args.dry_run:
        from vlmcompress.planning import plan

        planned = plan.build(resolved.recipe)
        if planned.budget and planned.statistics:
            from vlmcompress.common.progress import silent
            from vlmcompress.compression import allocate

            planned = allocate.planned(planned, progress=silent)
        return OK, {"ok": True, **planned.to_dict(), "origins": resolved.origins}, summary.plan_text(planned, resolved)
    if resolved.recipe.out is None:
        raise UserError("no output folder given; add -o OUT")
    from vlmcompress.compression.quantize import quantize as run

    began, progress = time.monotonic(), terminal.Progress()
    try:
        done = run(resolved.recipe, resume=args.resume, overwrite=args.overwrite, progress=progress)
    finally:
        progress.close()
    for line in done.manifest["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    result = summary.quantize_result(done.out, resolved.recipe.model, done.manifest, time.monotonic() - began)
    return OK, result, summary.quantize_text(result)


def calibrate(args: argparse.Namespace) -> Outcome:
    """`vlmcompress calibrate`"""
    from vlmcompress.recipe import resolve

    given = arguments.given(args)
    arguments.refuse_foreign(given)
    chosen = resolve(given | {"scheme": "none"}).recipe
    needs = arguments.needs(args.needs)
    from vlmcompress.compression.calibrate import calibrate as run

    began, progress = time.monotonic(), terminal.Progress()
    try:
        done = run(chosen, needs=needs, resume=args.resume, overwrite=args.overwrite, progress=progress)
    finally:
        progress.close()
    result = summary.calibrate_result(done.out, chosen.model, done.manifest, time.monotonic() - began)
    return OK, result, summary.calibrate_text(result)


def check(args: argparse.Namespace) -> Outcome:
    """`vlmcompress check`"""
    from vlmcompress.recipe import resolve

    recipe = resolve(arguments.given(args), args.recipe, refuse=False).recipe
    from vlmcompress.planning.check import findings

    engine = args.engine or recipe.engine
    found = findings(recipe, engine)
    fine = all(finding.ok for finding in found)
    title = f"{recipe.model} with {recipe.scheme} on {recipe.target or 'any target'} in {engine}"
    data = {"ok": fine, "engine": engine, "recipe": recipe.plain(), "findings": [vars(f) for f in found]}
    return OK if fine else BAD_INPUT, data, summary.looked_text(title, found)


def _verb(module: str, function: str = "run_verb") -> Callable[[argparse.Namespace], Outcome]:
    """A verb of another module, which is imported when it runs."""

    def run(args: argparse.Namespace) -> Outcome:
        return getattr(importlib.import_module(f"vlmcompress.{module}"), function)(args)

    return run


def serve(args: argparse.Namespace) -> Outcome:
    """`vlmcompress serve`: this process becomes the server."""
    from vlmcompress.engines.vllm.serve import serve as run

    settings = {"host": args.host, "port": args.port, "images": args.images, "max_model_len": args.max_model_len}
    run(args.out, **settings, extra=args.extra)
    return OK, {"ok": True}, ""


def listing(args: argparse.Namespace) -> Outcome:
    """`vlmcompress list`"""
    from vlmcompress import targets
    from vlmcompress.common.registry import Registry
    from vlmcompress.recipe import layers as settings
    from vlmcompress.recipe import recipe

    def registered(registry: Registry) -> list[dict[str, Any]]:
        return [{"name": name, "about": registry.summary(name)} for name in registry.names()]

    def machines() -> list[dict[str, Any]]:
        found = [(name, targets.get(name)) for name in targets.REGISTRY.names()]
        return [
            {
                "name": name,
                "about": f"{t.title}: {t.schemes[None]} by default, {t.schemes['throughput']} for throughput",
            }
            for name, t in found
        ]

    def recipes() -> list[dict[str, Any]]:
        lines = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in settings.bundled().items()}
        return [{"name": name, "about": line.lstrip("# ")} for name, line in lines.items()]

    def reducers() -> list[dict[str, Any]]:
        from vlmcompress.engines.vllm.plugin import REDUCERS as registry
        from vlmcompress.engines.vllm.plugin import served

        keys = {"stage": "STAGE", "count": "COUNT", "served": "SERVED", "why_not": "WHY_NOT"}
        return [
            {"name": name, "about": registry.summary(name), "vllm": served(name)}
            | {key: registry.constant(name, constant) for key, constant in keys.items()}
            for name in registry.names()
        ]

    def gates() -> list[dict[str, Any]]:
        from vlmcompress.evaluation import gate

        return [{"name": name, "about": gate.about(name)} for name in gate.names()]

    def suites() -> list[dict[str, Any]]:
        from vlmcompress.evaluation import catalogue

        return [{"name": name, "about": catalogue.about(name)} for name in catalogue.names()]

    kinds: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "schemes": lambda: registered(recipe.SCHEMES),
        "targets": machines,
        "families": lambda: registered(Registry("vlmcompress.models", "model family")),
        "recipes": recipes,
        "formats": lambda: registered(recipe.FORMATS),
        "reducers": reducers,
        "suites": suites,
        "gates": gates,
    }
    entries = {kind: find() for kind, find in kinds.items() if args.what in (None, kind)}
    return OK, entries, summary.list_text(entries)


VERBS = {
    "calibrate": calibrate,
    "quantize": quantize,
    "check": check,
    "doctor": _verb("doctor_options"),
    "tokens": _verb("reduction.verbs", "tokens"),
    "inspect": _verb("reduction.verbs", "inspect"),
    "thresholds": _verb("thresholds_options"),
    "eval": _verb("evaluation.options"),
    "bench": _verb("bench.options"),
    "report": _verb("report.options"),
    "report-error": _verb("report.error_options"),
    "sweep": _verb("report.sweep_options"),
    "serve": serve,
    "list": listing,
}


def main(argv: list[str] | None = None) -> int:
    """Run one call and return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    as_json, debug = "--json" in given, "--debug" in given
    try:
        args = arguments.parse(given)
        if not args.verbose and args.verb != "serve":  # a server's log is what one looks at
            terminal.quiet_libraries()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a model is a folder; nothing is fetched behind the user's back
        with terminal.stdout_kept_clean():
            code, data, text = VERBS[args.verb](args)
        print(json.dumps(data, indent=1, default=str, ensure_ascii=False) if as_json else text, flush=True)
        return code
    except BrokenPipeError:  # the reader of our stdout left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return OK
    except KeyboardInterrupt:
        hint = (
            "; continue with --resume"
            if given[:1] in (["quantize"], ["calibrate"]) and "--dry-run" not in given
            else ""
        )
        return _fail(f"interrupted{hint}", INTERRUPTED, as_json)
    except GateError as error:
        return _fail(str(error), GATE, as_json)
    except UserError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), BAD_INPUT, as_json)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _unexpected(error, debug, as_json)


def _unexpected(error: Exception, debug: bool, as_json: bool) -> int:
    """An error that nobody planned: some are the machine's or the installation's, the rest are defects."""
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) in _EXTRAS:
        return _fail(f"{package} is not installed; pip install 'vlmcompress[{_EXTRAS[package]}]'", BAD_INPUT, as_json)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _fail("out of memory; use fewer --samples or a larger machine (see --dry-run)", BAD_INPUT, as_json)
    where = "" if debug else f"; traceback in {_save_traceback()}"
    first = (str(error).strip().splitlines() or [""])[0]
    return _fail(f"internal error: {type(error).__name__}: {first}{where}", INTERNAL, as_json)


def _fail(message: str, code: int, as_json: bool) -> int:
    """One line on stderr; with --json also the object."""
    line = " ".join(message.split())
    print(f"error: {line}" if code != INTERRUPTED else line, file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"ok": False, "error": line, "exit_code": code}), flush=True)
    return code


def _save_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="vlmcompress-error-", suffix=".txt", delete=False) as file:
        traceback.print_exc(file=file)
    return file.name
