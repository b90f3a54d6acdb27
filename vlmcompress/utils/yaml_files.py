"""YAML files of users: duplicate keys are errors, `1e-4` is a number, and messages name file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from vlmcompress.utils.errors import UserError
from vlmcompress.utils.json_files import read_text
from vlmcompress.utils.messages import error_text


class _Loader(yaml.SafeLoader):
    """A `yaml.SafeLoader` (no code runs) that refuses duplicate keys and reads `1e-4` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a list or a mapping", key.start_mark)
            if key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 requires a dot in a float; JSON, YAML 1.2 and most users do not.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML document. `where` names it in the message of the `UserError` that bad syntax raises."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{where}{line} is not valid YAML: {problem}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an invalid date, a number of thousands of digits; nested too deeply
        raise UserError(f"{where} is not valid YAML: {error_text(error)}") from error


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file. Raises `UserError`, in which `what` is the kind of file."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error_text(error)
        raise UserError(f"cannot read {what} {path}: {why}; give a YAML file") from error
    content = parse_yaml(text, f"{what} {path}")
    if not isinstance(content, dict):
        raise UserError(f"{what} {path} holds no mapping; write it as lines of `key: value`")
    return content
