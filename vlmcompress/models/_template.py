"""Test whether a chat template terminates, in a process with bounded time and memory.

A template is a program. transformers' sandbox protects against file access and single huge ranges, but not against nested
loops or unbounded output. Run as a script, this file renders the template on its standard input.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS = 3
MEMORY = 1 << 30
LARGEST = 1 << 20
"""Bounds for a short conversation: seconds and bytes for rendering, characters of result and template."""

_CONVERSATION = [
    {"role": "system", "content": [{"type": "text", "text": "Answer briefly."}]},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    {"role": "user", "content": [{"type": "text", "text": "What colour?"}]},
]


@functools.lru_cache(maxsize=64)
def endless(template: str) -> str | None:
    """How a template exceeds the bounds, in a few words; None if it does not, or if it raises an error.

    Two short conversations are rendered, with and without a system turn, as many templates refuse one of them.
    """
    if len(template) > LARGEST:
        return f"it has {len(template):,} characters, more than {LARGEST:,}"
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(__file__)), str(SECONDS), str(MEMORY)],
            input=json.dumps(template),
            capture_output=True,
            text=True,
            timeout=40 * SECONDS,  # of a busy machine; what it computes for is bounded by RLIMIT_CPU
        )
    except subprocess.TimeoutExpired:
        return f"a short conversation takes more than {SECONDS} seconds"
    if done.returncode < 0:
        return f"a short conversation takes more than {SECONDS} seconds or {MEMORY >> 30} GiB"
    return done.stdout.strip() or None


def _environment() -> Any:
    """The jinja environment that transformers 5.17 sets up in `transformers/utils/chat_template_utils.py`."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag `{% generation %}`, which marks an answer; renders its content."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: "2026-01-01"}
    return environment


def _render(template: str) -> str:
    """Render a template; returns a message if it fails or exceeds a bound, else an empty string."""
    from jinja2 import TemplateSyntaxError

    environment = _environment()
    for turns in (_CONVERSATION, _CONVERSATION[1:]):
        for generation in (True, False):
            length = 0
            try:
                made = environment.from_string(template)
                for piece in made.generate(
                    messages=turns, add_generation_prompt=generation, bos_token="", eos_token=""
                ):
                    length += len(piece)
                    if length > LARGEST:
                        return f"a short conversation becomes more than {LARGEST:,} characters"
            except (OverflowError, RecursionError) as error:
                return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
            except TemplateSyntaxError as error:
                return f"line {error.lineno}: {error.message}"[:200].rstrip(".")
            except MemoryError:
                return f"a short conversation takes more than {MEMORY >> 30} GiB"
            except Exception:  # the template may need another conversation; the processor will report it
                continue
    return ""


if __name__ == "__main__":
    import resource

    seconds, memory = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    print(_render(json.load(sys.stdin)))
