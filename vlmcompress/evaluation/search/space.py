"""The space of a search: possible changes to a model on a target, as factors; a candidate has at most one choice of each.

`usual` is the default space. A custom one is a file of recipe keys:

    weights:
      - scheme: int8
      - {name: w4, scheme: gptq-plus, options: {group_size: 64}}
      - {scheme: fp8, kv_cache: fp8}
    images:
      - reduce: coverage:0.5
      - reduce: [resize:0.5, coverage:0.5]

Each entry is a choice, which must also work alone, as all are tried alone first. The unchanged model is always a choice as
well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmcompress.evaluation.search.candidate import Candidate, Choice, Factor
from vlmcompress.quantization.plan import make_plan
from vlmcompress.recipe import resolve, targets
from vlmcompress.utils import yaml_files
from vlmcompress.utils.errors import UserError

MOST = 64
"""Maximum number of choices of all factors; each is a checkpoint that is written and evaluated."""
# keys that the search sets
_FIXED = ("model", "out", "target", "calibrate", "seed", "engine", "trust_remote_code", "format")
_GROUPS = (128, 64, 32)
_SCHEMES = ("fp8", "int8", "w8a16", "nvfp4")
_GROUPED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("awq", {}),
    ("gptq-plus", {}),
    ("gptq-plus balanced", {"balance": "ratio"}),
    ("gptq-plus 3 bits", {"bits": 3}),
)
_MIXED = {"scheme": "gptq", "options": {"group_size": 128}, "bits": {"budget": 3.5, "among": [2, 3, 4, 8]}}
_IMAGES = (
    "coverage:0.75",
    "coverage:0.5,merge=nearest",
    "coverage:1/3,merge=nearest",
    "coverage:0.25,merge=nearest",
    "coverage:1/9,merge=nearest",
    "divprune:0.5",
    "pool",
    "resize:0.75",
    "resize:0.5",
    "resize:0.25",
)
_TWO_STAGES = ("resize:0.5", "coverage:0.5")


@dataclass(frozen=True)
class Space:
    """Factors, and the choices that were left out: name of a choice -> reason."""

    factors: tuple[Factor, ...]
    left_out: Mapping[str, str]


def usual(base: Mapping[str, Any], *, small: bool = False) -> Space:
    """The default space: all that the model and the target support, or a handful of it.

    Args:
        base: recipe keys of all candidates: `model`, `calibrate`, `target`, ...
    """
    names = _SCHEMES[:2] if small else _SCHEMES
    weights: list[list[Choice]] = [[Choice(name, {"scheme": name})] for name in names]
    for name, options in _GROUPED[1:2] if small else _GROUPED:
        scheme = name.partition(" ")[0]
        settings = {
            f"{name} g{size}" if size != _GROUPS[0] else name: {**options, "group_size": size} for size in _GROUPS
        }
        weights.append([Choice(title, {"scheme": scheme, "options": option}) for title, option in settings.items()])
    images = [Choice(name, {"reduce": name}) for name in (_IMAGES[1:5] if small else _IMAGES)]
    if not small:
        images.append(Choice(" + ".join(_TWO_STAGES), {"reduce": list(_TWO_STAGES)}))
    factors = {"weights": weights, "images": [[choice] for choice in images]}
    if not small and base.get("target") and not targets.get_target(base["target"]).is_cpu:
        weights.append([Choice("gptq mixed 3.5 bits", _MIXED)])
        factors["tower"] = [[Choice(f"{name} tower", {"vision": name}) for name in ("fp8", "int8")]]
        # Scales of a cache are stored with quantized layers, so it is not a separate factor, which would be tried alone.
        cached = [Choice(f"{name}, fp8 cache", {"scheme": name, "kv_cache": "fp8"}) for name in ("fp8", "int8")]
        weights.append(cached)
    return _supported(base, factors)


def read_space(file: str | Path, base: Mapping[str, Any]) -> Space:
    """Read a space from a file; `base` as in `usual`.

    Raises:
        UserError: the file is invalid, has a key that the search sets, sets a key in two factors, or leaves no choice.
    """
    content = yaml_files.read_yaml(Path(file), "space")
    factors: dict[str, list[list[Choice]]] = {}
    owner: dict[str, str] = {}
    for factor, entries in content.items():
        if not isinstance(entries, list) or not all(isinstance(item, dict) and item for item in entries):
            raise UserError(f"space {file}: {factor} should be a list of mappings of recipe keys")
        factors[factor] = [[_choice(item, f"space {file}: {factor}")] for item in entries]
        for key in {key for entry in factors[factor] for key in entry[0].keys}:
            if owner.setdefault(key, factor) != factor:
                raise UserError(f"space {file}: {owner[key]} and {factor} both give {key}; put it into one of them")
    return _supported(base, factors)


def _choice(entry: Mapping[str, Any], where: str) -> Choice:
    keys = {key: value for key, value in entry.items() if key != "name"}
    if fixed := next((key for key in keys if key in _FIXED), None):
        raise UserError(f"{where}: {fixed} is the same for all candidates; give it to the search instead")
    return Choice(str(entry.get("name") or ", ".join(_words(keys))), keys)


def _words(keys: Mapping[str, Any]) -> Iterable[str]:
    """Name a choice by its keys."""
    for key, value in keys.items():
        if key == "reduce" and isinstance(value, list):
            yield " + ".join(map(str, value))
        elif key in ("scheme", "reduce"):
            yield str(value)
        elif isinstance(value, Mapping):
            yield " ".join(f"{name} {setting}" for name, setting in value.items())
        else:
            yield f"{key} {value}"


def _supported(base: Mapping[str, Any], factors: Mapping[str, Sequence[Sequence[Choice]]]) -> Space:
    """Keep the first variant of each entry that the model and the target support."""
    left_out: dict[str, str] = {}
    usable, names = [], set[str]()
    for factor, entries in factors.items():
        choices = []
        for forms in entries:
            reasons = [problem(base, Candidate((form,))) for form in forms]
            if all(reasons):
                left_out[forms[0].name] = reasons[0] or ""
                continue
            choice = forms[reasons.index(None)]
            if choice.name in names:
                raise UserError(f"{factor}: two choices are called '{choice.name}'; give them names")
            names.add(choice.name)
            reducer = resolve({**base, **Candidate((choice,)).keys}).recipe.reduce
            choices.append(replace(choice, file_hash=reducer.file_hash() if reducer else ""))
        if choices:
            usable.append(Factor(factor, tuple(choices)))
    if not usable:
        reason = next(iter(left_out.values()), "it is empty")
        raise UserError(f"nothing is left to search: {reason}")
    if len(names) > MOST:
        raise UserError(f"the space has {len(names)} choices, and each of them is tried; give at most {MOST}")
    return Space(tuple(usable), left_out)


def problem(base: Mapping[str, Any], candidate: Candidate) -> str | None:
    """The reason why the model, the target or the engine does not support a candidate; None if they do."""
    try:
        make_plan(resolve({**base, **candidate.keys}).recipe)
    except UserError as error:
        return str(error)
    return None
