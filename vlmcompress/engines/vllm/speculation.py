"""Speculative decoding in vLLM: its JSON setting checked against a checkpoint and an engine, before either is started.

Methods are those of vLLM 0.32 and 0.33 (`config/speculative.py`). `ngram` proposes what followed the
same words earlier in the prompt or the answer; `suffix` does so across requests, with a separate package; `mtp` uses the
checkpoint's draft head; all others use a draft model in a folder. Greedy answers do not depend on the proposals, except for
rounding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmcompress import models
from vlmcompress.engines.vllm import installed, interpreter
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError, did_you_mean

FLAG = "--speculative-config"
_FLAGS = (FLAG, "-sc")
_ALONE = ("ngram", "ngram_gpu", "suffix", "mtp")
_DRAFTED = ("draft_model", "eagle", "eagle3", "dflash", "dspark")


def last_setting(flags: Sequence[str], names: Sequence[str] = _FLAGS) -> str | None:
    """The value of the last `--speculative-config` (or of the flag with these `names`) in `flags`; None if there is none."""
    setting = None
    for index, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in names:
            setting = value if equals else (flags[index + 1] if index + 1 < len(flags) else "")
    return setting


def without_setting(flags: Sequence[str]) -> list[str]:
    """Flags for `vllm serve` without any `--speculative-config` and its value."""
    values = {index + 1 for index, flag in enumerate(flags) if flag in _FLAGS}
    return [flag for index, flag in enumerate(flags) if index not in values and flag.partition("=")[0] not in _FLAGS]


def read_speculative_config(model: Path, text: str) -> dict[str, Any]:
    """Read the JSON of `--speculative-config` for a checkpoint. A draft folder becomes an absolute path.

    Raises:
        UserError: it is not a JSON object, the method is unknown, or a number, the head, the folder, a package or a kernel
            that it needs is missing.
    """
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        example = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
        raise UserError(f"{FLAG} {text[:60]} is no JSON object; write it like '{example}'")
    method = config.get("method", "draft_model" if config.get("model") else None)
    if method not in (*_ALONE, *_DRAFTED):
        raise UserError(f"{FLAG}: unknown method {method!r}{did_you_mean(str(method), (*_ALONE, *_DRAFTED))}")
    count = config.get("num_speculative_tokens")
    if (count is None and method != "suffix") or (count is not None and (type(count) is not int or count < 1)):
        raise UserError(f"{FLAG}: num_speculative_tokens is {count!r}, it should be a whole number from 1 on")
    if method in _DRAFTED:
        config["model"] = _folder(method, config.get("model"))
    engine = installed()
    if method == "suffix" and not engine.suffix:
        raise UserError(
            f"{FLAG}: method suffix needs the package arctic-inference, which {interpreter()} lacks; "
            "pip install arctic-inference==0.1.1 there (it is compiled), or use ngram"
        )
    _require_head(model, method, engine.cpu)
    return config


def speculative_flags(model: Path, text: str) -> list[str]:
    """The flags of `vllm serve` for the JSON of `--speculative-config`, checked."""
    return [FLAG, json.dumps(read_speculative_config(model, text))]


def _folder(method: str, model: Any) -> str:
    """The absolute path of a draft model's folder; an id on the Hub is downloaded first."""
    if not isinstance(model, str) or not model:
        raise UserError(f'{FLAG}: method {method} needs a model; name the draft model\'s folder as "model"')
    model = hub.local(model)
    if not (Path(model) / "config.json").is_file():
        raise UserError(
            f"{FLAG}: the draft model {model} is no folder with a config.json; give its path, or its id on the Hub"
        )
    return str(Path(model).resolve())


def _require_head(model: Path, method: str, cpu: bool) -> None:
    """Raise `UserError` if the checkpoint has no head for the method, or if the CPU build has no kernel for its decoder."""
    config = models.read_config(model, weights=False)
    try:
        spec = models.spec_for(config)
    except UserError:
        return  # an unknown family: left to vLLM
    if method == "mtp":
        specs = {name: entry.spec for name, entry in models.stored_tensors(model).items()}
        problem = models.mtp_problem(spec, config, specs) or models.missing_mtp(spec, config, specs)
        if not problem and not models.mtp_tensors(spec, specs):
            problem = f"{model} has no head that drafts tokens (mtp.*); use ngram, or a draft model's folder"
        if problem:
            raise UserError(f"{FLAG}: {problem}")
    if cpu and spec.mixed_blocks:
        raise UserError(
            f"{FLAG}: {spec.family} has {spec.mixed_blocks}, and vLLM's CPU build lacks the (Triton) kernel that speculation "
            "needs with such a state; leave it out here, or serve on a GPU"
        )
