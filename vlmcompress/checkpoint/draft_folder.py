"""The folder of a draft head: the config that vLLM 0.32 reads, facts about the training, and whether it fits a target.

The config is in the form of the `speculators` library (vLLM reads it in `transformers_utils/configs/speculators`): the draft's
block as a Llama config, the target's taps, and how many tokens to guess. `vlmcompress-draft.json` beside it says which
checkpoint the draft was trained for, by the hash of its files: another one accepts fewer guesses, one of other sizes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmcompress import __version__, models
from vlmcompress.common import folders, identity
from vlmcompress.errors import UserError
from vlmcompress.models import read_json

FACTS = "vlmcompress-draft.json"
TARGETS = (
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Architectures of ours whose classes in vLLM 0.32 give their hidden states to a draft (`SupportsEagle3`). Qwen3.5, with
recurrent states, and mixtures of experts were not tried."""
PREFIX = "Vlmcompress"  # of an architecture that carries a reducer


def check_target(config: Mapping[str, Any]) -> None:
    """Raise UserError for a target that vLLM can't speculate on with a draft head."""
    architecture = (config.get("architectures") or ["?"])[0]
    if architecture.removeprefix(PREFIX) not in TARGETS:
        raise UserError(
            f"vLLM 0.32's {architecture} gives no hidden states to a draft head, or was not tried; those that do: "
            f"{', '.join(TARGETS)}; speculate with ngram or suffix instead"
        )


def write(folder: Path, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write config, facts and a card beside the weights of a draft."""
    length = facts["acceptance"]["length"]
    card = (
        "---\ntags: [vlmcompress, eagle3, speculative-decoding]\n---\n# A draft head\n\n"
        f"EAGLE-3 head for `{settings['speculators_config']['verifier']['name_or_path']}`, trained on "
        f"{facts['samples']['trained_on']} of the target's own answers.\nOn held-out samples {length:.2f} tokens a step are "
        "accepted, the target's own included.\n\n```bash\nvlmcompress serve TARGET --draft .\n```\n"
    )
    content = {"vlmcompress": __version__, **facts}
    for name, text in {"config.json": folders.dump(settings), FACTS: folders.dump(content), "README.md": card}.items():
        (folder / name).write_text(text, encoding="utf-8")


def speculative_config(draft: Path, target: Path) -> dict[str, Any]:
    """What vLLM's `--speculative-config` is for a draft of ours and its target.

    Raises:
        UserError: the folder is no draft of ours, or one of another target.
    """
    if not (draft / FACTS).is_file():
        raise UserError(
            f"{draft} is no draft of vlmcompress (no {FACTS}); name the folder that `vlmcompress draft` wrote"
        )
    facts = read_json(draft / FACTS, "draft")
    settings = read_json(draft / "config.json", "config")
    check_target(models.read_config(target))
    if problem := mismatch(settings, models.read_config(target)):
        raise UserError(f"{draft}: {problem}; train one for {target} with `vlmcompress draft`")
    if facts["target"].get("content_sha256") != identity.model_hash(target):
        raise UserError(
            f"{draft} was trained for another checkpoint, {facts['target'].get('name', 'with other files')}; train one for "
            f"{target}, or serve it all the same with --speculative-config "
            f'\'{{"method": "eagle3", "model": "{draft}", "num_speculative_tokens": 3}}\''
        )
    method = settings["speculators_config"]["proposal_methods"][0]
    return {
        "method": "eagle3",
        "model": str(draft.resolve()),
        "num_speculative_tokens": method["speculative_tokens"],
    }


def mismatch(settings: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    """Why a draft's config can't go with a target's, in words; None where it can."""
    text, layer = target.get("text_config") or target, settings["transformer_layer_config"]
    for name, here in (("hidden_size", settings["target_hidden_size"]), ("vocab_size", layer["vocab_size"])):
        there = text.get(name)
        if there is not None and there != here:
            return f"it was trained for a {name} of {here}, the target's is {there}"
    last = max(settings["eagle_aux_hidden_state_layer_ids"])
    blocks = text.get("num_hidden_layers")
    if blocks is not None and last > blocks:
        return f"it reads hidden states before block {last}, and the target has {blocks} blocks"
    return None
