"""Check a file's content against a type: a TypedDict, a dataclass, or any annotation that pydantic supports.

A type lists the keys that are read; further keys are allowed, as other versions may write more.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from vlmcompress.utils import json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text


def _inside(name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError("should be a place within the folder")
    return name


Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Size = Annotated[int, Field(ge=1, le=2**40)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LogProbability = Annotated[float, Field(le=1)]  # above 0 only by rounding
Place = Annotated[str, AfterValidator(_inside)]
"""The name of a file within a folder."""


_adapter = lru_cache(TypeAdapter)  # building one takes longer than most validations


def require_value(kind: Any, data: Any, where: str, remedy: str) -> None:
    """Check that `data`, from JSON, is a value of `kind`; nothing is converted.

    Args:
        where, remedy: beginning and end of the message: the file, and what to do.

    Raises:
        UserError: the value has another type; the message names the first difference.
    """
    try:
        _adapter(kind).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error)}; {remedy}") from error


def read_typed(kind: Any, path: Path, remedy: str, version: int | None = None) -> Any:
    """The JSON value in `path`, checked to be of type `kind`; keys that `kind` does not list are kept.

    Args:
        remedy: the end of the message.
        version: the required `schema_version`; None: not checked.

    Raises:
        UserError: the file cannot be read, or is of another version or type.
    """
    try:
        content = json_files.read(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error_text(error)
        raise UserError(f"{path} is not readable ({why}); {remedy}") from error
    stored = content.get("schema_version") if isinstance(content, dict) else None
    if version is not None and stored != version and type(stored) is int:
        remedy = "update vlmcompress" if stored > version else remedy
        raise UserError(f"{path} has schema {stored}, this vlmcompress reads {version}; {remedy}")
    require_value(kind, content, str(path), remedy)
    return content


def first_problem(error: ValidationError) -> str:
    """The first problem as text, like `size.weights_after should be a valid integer`."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"])) or "content"
    if first["type"] in ("missing", "extra_forbidden"):
        return f"'{key}' is {'missing' if first['type'] == 'missing' else 'unknown'}"
    text = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key} {text[:1].lower()}{text[1:]}"
