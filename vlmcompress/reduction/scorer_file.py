"""The file of a trained scorer, which `vlmcompress learn-reducer` writes, recipes name and checkpoints carry.

It is a safetensors file with the float32 tensors of `methods.learned.shapes`. Its metadata have one entry,
`vlmcompress_scorer`, with a JSON object: `schema_version` (1), `model_type`, `source` (the model's name), `width` (channels
of a token), `hidden`, `keep`, and how it was trained.

A checkpoint has it as `reducer/scorer.safetensors`, as engines read every safetensors file at the top level as weights. Files
are not trusted: nothing in them is executed, and size, names, shapes and numbers are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from vlmcompress.reduction.choice import ReducerChoice
from vlmcompress.reduction.methods import learned
from vlmcompress.utils import folders, json_files
from vlmcompress.utils.errors import UserError

CARRIED = "reducer/scorer.safetensors"
"""Path of the file within a checkpoint."""
FACTS, SCHEMA_VERSION = "vlmcompress_scorer", 1
LARGEST, MOST_HIDDEN = 64 << 20, 1024
COMMAND = "vlmcompress learn-reducer MODEL --calib DATA --keep 0.25 -o FILE.safetensors"


@dataclass(frozen=True)
class Scorer:
    """Content of a file: the network's weights, facts about it (see the module), and the hash of the file."""

    weights: dict[str, Tensor]
    facts: dict[str, Any]
    sha256: str


def with_scorer_hash(chosen: ReducerChoice) -> ReducerChoice:
    """The reducer with the hash of its scorer's file, which identifies it. Raises UserError for an invalid file."""
    if not chosen.reducer.scorer:
        return chosen
    return _with(chosen, sha256=read(Path(chosen.reducer.scorer)).sha256)


def load_scorer(config: Any, chosen: ReducerChoice, folder: Path | None = None) -> ReducerChoice:
    """The reducer with the network loaded from its file; unchanged if its method has none.

    Args:
        config: the config of the model, as transformers has it.
        folder: folder of the checkpoint that carries the reducer; None: the reducer's options name the file.

    Raises:
        UserError: no file is named, it is invalid, belongs to another model, or has changed since the checkpoint was written.
    """
    options = chosen.reducer
    if options.scorer is None or options.network is not None:
        return chosen
    if not options.scorer:
        raise UserError(
            f"'{chosen.method}' has no scorer; train one with `{COMMAND}` and name it: scorer=FILE.safetensors"
        )
    if folder is not None and options.scorer != CARRIED:
        raise UserError(f"reduce.scorer is {options.scorer[:80]!r}, should be {CARRIED!r}; export it again")
    path = Path(options.scorer) if folder is None else folder / CARRIED
    scorer = read(path)
    expected = getattr(options, "sha256", "")
    if expected and expected != scorer.sha256:
        raise UserError(
            f"scorer {path} has sha256 {scorer.sha256[:12]}, not {expected[:12]}: it was changed; export it again"
        )
    model_facts = {"model_type": config.model_type, "width": config.get_text_config().hidden_size}
    for key, value in model_facts.items():
        if scorer.facts[key] != value:
            raise UserError(
                f"scorer {path} is of another model, '{scorer.facts['source']}': its {key} is {scorer.facts[key]}, here it is "
                f"{value}; train one with `{COMMAND}`"
            )
    return _with(chosen, sha256=scorer.sha256, network=learned.Network(scorer.weights))


def carried(chosen: ReducerChoice, folder: Path | None = None) -> ReducerChoice:
    """The reducer with the path of its file within a checkpoint; with `folder`, the path in that checkpoint's folder."""
    path = CARRIED if folder is None else str(folder / CARRIED)
    return _with(chosen, scorer=path) if chosen.reducer.scorer else chosen


def content(chosen: ReducerChoice) -> bytes:
    """The file's bytes, for a checkpoint. Raises UserError if the file has changed since it was read."""
    assert chosen.reducer.scorer
    path = Path(chosen.reducer.scorer)
    data = _bytes(path)
    if hashlib.sha256(data).hexdigest() != getattr(chosen.reducer, "sha256", ""):
        raise UserError(f"scorer {path} was changed during the run; start again")
    return data


def save_scorer(path: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Scorer:
    """Write the file atomically."""
    metadata = {FACTS: json.dumps({"schema_version": SCHEMA_VERSION, **facts}, sort_keys=True)}
    data = safetensors.torch.save({name: value.float().cpu().contiguous() for name, value in weights.items()}, metadata)
    folders.save_files(path.parent, {"safetensors": (path.name, data)})
    return read(path)


def read(path: Path) -> Scorer:
    """Read and validate a file. Raises UserError if it is invalid."""
    data = _bytes(path)
    try:
        weights = safetensors.torch.load(data)
        # safetensors' reader of bytes gives no metadata: u64 length, then the header, see `utils.tensor_headers`.
        metadata = json_files.parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"scorer {path} is no safetensors file, or cut off; train one with `{COMMAND}`") from error
    if "worth" in weights:  # its name in files of before 29 November 2026
        weights["output"] = weights.pop("worth")
    return Scorer(weights, _require_scorer(path, weights, metadata), hashlib.sha256(data).hexdigest())


def is_scorer(path: Path) -> bool:
    """Whether a file is a scorer that can be read."""
    try:
        read(path)
    except UserError:
        return False
    return True


def _bytes(path: Path) -> bytes:
    try:
        return json_files.read_bytes(path, LARGEST)
    except json_files.Unreadable as error:
        raise UserError(f"cannot read scorer {path}: {error}; train one with `{COMMAND}`") from error
    except OSError as error:
        raise UserError(f"cannot read scorer {path} ({type(error).__name__}); train one with `{COMMAND}`") from error


def _require_scorer(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Check a file's facts and its tensors' names, shapes and numbers; returns the facts."""
    if FACTS not in metadata:
        raise UserError(f"{path} holds no scorer; train one with `{COMMAND}`")
    try:
        facts = json_files.parse_json(metadata[FACTS])
        if (schema := facts.pop("schema_version")) != SCHEMA_VERSION:
            version = _line(str(schema)[:20])
            raise UserError(
                f"scorer {path} is of schema {version}, this vlmcompress reads {SCHEMA_VERSION}; upgrade it"
            )
        width, hidden = facts["width"], facts["hidden"]
        if type(width) is not int or type(hidden) is not int or not (0 < hidden <= MOST_HIDDEN and width > 0):
            raise ValueError
        facts |= {name: _line(str(facts[name])) for name in ("model_type", "source")}
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"scorer {path} does not say what it is of; train one with `{COMMAND}`") from error
    # The names and shapes follow from two numbers, so that a file of anything else ends here.
    shapes = learned.shapes(width, hidden)
    for name in sorted(weights.keys() | shapes.keys()):
        value = weights.get(name)
        if value is None or name not in shapes:
            raise UserError(
                f"scorer {path}: tensor '{_line(name[:40])}' is {'missing' if value is None else 'unknown'}; train it again"
            )
        if tuple(value.shape) != shapes[name] or str(value.dtype) != "torch.float32":
            raise UserError(
                f"scorer {path}: tensor '{name}' is {value.dtype} {list(value.shape)}, should be float32 {list(shapes[name])}"
            )
        if not value.isfinite().all():
            raise UserError(f"scorer {path}: tensor '{name}' holds NaN or Inf; train it again")
    # It is divided by.
    if not (weights["spread"] > 0).all():
        raise UserError(f"scorer {path}: tensor 'spread' holds numbers that are not above 0; train it again")
    return facts


def _line(text: str) -> str:
    """The first characters of an untrusted text, as one line for a message."""
    return "".join(char if char.isprintable() else "?" for char in text[:80])


def _with(chosen: ReducerChoice, **changes: Any) -> ReducerChoice:
    return ReducerChoice(chosen.method, replace(chosen.reducer, **changes))
