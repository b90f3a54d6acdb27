"""Examine a draft head: whether its files are complete, and whether it fits its target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from vlmcompress import models
from vlmcompress.export import draft_folder
from vlmcompress.export.draft_folder import Draft
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Check
from vlmcompress.utils.text import size


def examine_draft(folder: Path, target: Path | None) -> list[Check]:
    """Examine the draft in `folder` and its match with the checkpoint `target`: findings about files, values, sizes, and the
    target's identity. A draft of another checkpoint is a problem, as it guesses less well. `target` None: not checked."""
    try:
        draft = Draft.of(folder)
    except UserError as error:
        return [Check("draft files", False, str(error))]
    examinations: dict[str, Callable[[], str]] = {
        "draft files": lambda: _files(draft),
        "draft values": lambda: _values(draft),
    }
    if target is not None:
        examinations["draft sizes"] = lambda: _sizes(draft, models.read_config(target))
        examinations["draft target"] = lambda: _target(draft, target)
    findings = []
    for name, examine in examinations.items():
        try:
            findings.append(Check(name, True, examine()))
        except UserError as error:
            findings.append(Check(name, False, str(error)))
    return findings


def _files(draft: Draft) -> str:
    needed = draft.shapes()
    stored = {name: tuple(entry.spec.shape) for name, entry in draft.stored().items()}
    wrong = [name for name, shape in needed.items() if stored.get(name) != shape]
    if wrong:
        state = f"has the shape {list(stored[wrong[0]])}" if wrong[0] in stored else "is missing"
        raise UserError(f"{len(wrong)} tensors are not as config.json says: {wrong[0]} {state}; train the draft again")
    return f"eagle3, {len(stored)} tensors, {size(draft.bytes)}, {draft.tokens} tokens at once"


def _values(draft: Draft) -> str:
    tensors = load_file(draft.folder / draft_folder.WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{name} holds NaN or Inf; train the draft again")
    return "all are finite"


def _sizes(draft: Draft, config: dict) -> str:
    draft_folder.require_draft_target(config)
    if problem := draft.mismatch(config):
        raise UserError(problem)
    taps = ", ".join(map(str, draft.settings["eagle_aux_hidden_state_layer_ids"]))
    sizes = f"hidden size {draft.block['hidden_size']}, vocabulary {draft.block['vocab_size']:,}"
    return f"{sizes}, hidden states before blocks {taps}"


def _target(draft: Draft, target: Path) -> str:
    if not draft.is_for(target):
        raise UserError(
            f"it was trained for another checkpoint, {draft.target.get('name', 'with other files')}; train one for "
            f"this one with `vlmcompress draft {target}`"
        )
    return "the checkpoint that it was trained for"
