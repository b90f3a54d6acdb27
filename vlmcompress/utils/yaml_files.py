"""YAML for people: duplicate keys are errors, `1e-4` is a number, and messages name file and line.

Untrusted documents are bounded: an anchor must not contain itself, and a document must not unfold to more than `NODES` values
or be nested more than `DEPTH` deep, as a reader that walks through it would not end.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.json_files import DEPTH, Unreadable, read_text
from vlmcompress.utils.messages import reason

NODES = 100_000
"""The most values in a document, those of an alias counted each time it is used."""
LARGEST = 1 << 20
"""The most bytes in a file; the parser takes seconds for as many."""


class _Loader(yaml.SafeLoader):
    """A `yaml.SafeLoader` (no code runs) that refuses duplicate keys and unbounded documents and reads `1e-4` as a number."""

    def __init__(self, text: str):
        super().__init__(text)
        self._open: list[yaml.Event] = []  # the events that began the nodes around the next one
        self._sizes: dict[int, int] = {}  # id of a finished node -> its values, unfolded

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == around.anchor for around in self._open if hasattr(around, "anchor")):
                mark: Any = event.start_mark
                raise yaml.composer.ComposerError(None, None, f"'*{event.anchor}' holds itself", mark)
        elif len(self._open) == DEPTH:
            raise yaml.composer.ComposerError(None, None, f"nested more than {DEPTH} deep", event.start_mark)
        self._open.append(event)
        node: Any = super().compose_node(parent, index)
        self._open.pop()
        if id(node) not in self._sizes:
            inner = node.value if not isinstance(node, yaml.ScalarNode) else []
            parts = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
            if self._sizes[id(node)] > NODES:
                raise yaml.composer.ComposerError(
                    None, None, f"unfolds to more than {NODES:,} values", event.start_mark
                )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot in a float; JSON, YAML 1.2 and everybody's fingers do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse(text: str, where: str) -> Any:
    """The value of a YAML document. `where` names it in the message of the `UserError` that bad syntax raises."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{where}{line} is not valid YAML: {problem}") from error
    except ValueError as error:  # a date that is none, or a number of thousands of digits
        raise UserError(f"{where} is not valid YAML: {reason(error)}") from error


def read(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file. `what` says in messages which kind of file it is."""
    try:
        text = read_text(path, LARGEST)
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} is not a text file; give a YAML file") from error
    except Unreadable as error:
        raise UserError(f"cannot read {what} {path}: {error}; give a YAML file") from error
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror or error}; give a YAML file") from error
    content = parse(text, f"{what} {path}")
    if not isinstance(content, dict):
        raise UserError(f"{what} {path} holds no mapping; write it as lines of `key: value`")
    return content
