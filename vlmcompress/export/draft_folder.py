"""The folder of an EAGLE-3 draft head: the tensors and the config that vLLM 0.32 reads, facts about the training, and checks
against a target.

The config has the form of the `speculators` library (vLLM reads it in `transformers_utils/configs/speculators`): the draft's
block as a Llama config, the target's tapped blocks, and the number of tokens to guess. `vlmcompress-draft.json` next to it
identifies the draft's target by the hash of its files: another checkpoint accepts fewer guesses, one of other sizes none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from vlmcompress import __version__, models
from vlmcompress.export import manifest
from vlmcompress.reduction.support import PREFIX
from vlmcompress.utils import folders, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.schema import Count, Number, Size
from vlmcompress.utils.tensor_headers import Entry, read_entries

FACTS = "vlmcompress-draft.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
LAYER = "layers.0"
HEAD = "lm_head.weight"
TARGETS = (
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Supported architectures whose classes in vLLM 0.32 pass hidden states to a draft (`SupportsEagle3`). Qwen3.5, with recurrent
states, and mixtures of experts were not tried."""


def require_draft_target(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for a target that vLLM can't serve with a draft head."""
    # A reduced checkpoint has our prefix before vLLM's class, which is the same otherwise.
    architecture = (config.get("architectures") or ["?"])[0].removeprefix(PREFIX)
    if architecture not in TARGETS:
        raise UserError(
            f"vLLM 0.32's {architecture} passes no hidden states to a draft head, or was not tried; those that do: "
            f"{', '.join(TARGETS)}; speculate with ngram or suffix instead"
        )


def tensor_shapes(
    *, hidden: int, joined: int, intermediate: int, queries: int, keys: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape of the tensors that are trained, in the layout of vLLM's `Eagle3LlamaForCausalLM`.

    Args:
        hidden: width of the head's hidden states; `joined`: summed width of the target's at all tapped blocks.
        intermediate: width of its MLP; `queries`, `keys`: total width of its query and key heads.
        vocabulary: number of tokens that it can guess.
    """
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    return {
        "fc.weight": (hidden, joined),
        f"{LAYER}.input_layernorm.weight": (hidden,),
        f"{LAYER}.hidden_norm.weight": (hidden,),
        f"{attention}.q_proj.weight": (queries, 2 * hidden),
        f"{attention}.k_proj.weight": (keys, 2 * hidden),
        f"{attention}.v_proj.weight": (keys, 2 * hidden),
        f"{attention}.o_proj.weight": (hidden, queries),
        f"{LAYER}.post_attention_layernorm.weight": (hidden,),
        f"{mlp}.gate_proj.weight": (intermediate, hidden),
        f"{mlp}.up_proj.weight": (intermediate, hidden),
        f"{mlp}.down_proj.weight": (hidden, intermediate),
        "norm.weight": (hidden,),
        HEAD: (vocabulary, hidden),
    }


_REMEDY = "train the draft again"
_Target = TypedDict("_Target", {"content_sha256": str, "name": NotRequired[str]})
_Samples = TypedDict("_Samples", {"trained_on": Count, "held_out": Count})
_Acceptance = TypedDict("_Acceptance", {"by_position": list[Number], "length": Number})
_Proposal = TypedDict("_Proposal", {"speculative_tokens": Size})
_Proposals = TypedDict("_Proposals", {"proposal_methods": Annotated[list[_Proposal], Field(min_length=1)]})


class _Facts(TypedDict):
    """The fields of `vlmcompress-draft.json` that are read."""

    method: Literal["eagle3"]  # earlier snapshots had others
    target: _Target
    parameters: Count
    samples: _Samples
    acceptance: _Acceptance


class _Block(TypedDict):
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size


class _Settings(TypedDict):
    """The fields of config.json that are read."""

    speculators_model_type: Literal["eagle3"]  # earlier snapshots had one that only their plugin served
    draft_vocab_size: Size
    target_hidden_size: Size
    eagle_aux_hidden_state_layer_ids: Annotated[list[Count], Field(min_length=1)]
    transformer_layer_config: _Block
    speculators_config: _Proposals


@dataclass(frozen=True)
class Draft:
    """A draft's folder, its config, and the facts about its training."""

    folder: Path
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]

    @staticmethod
    def of(folder: Path) -> Draft:
        """Read a folder. Raises `UserError` if it is not a draft of ours or is damaged."""
        if not (folder / FACTS).is_file():
            raise UserError(
                f"{folder} is not a draft of vlmcompress (no {FACTS}); name the folder that `vlmcompress draft` wrote"
            )
        facts = schema.read_typed(_Facts, folder / FACTS, _REMEDY)
        draft = Draft(folder, schema.read_typed(_Settings, folder / "config.json", _REMEDY), facts)
        if HEAD not in draft.stored():
            raise UserError(f"{folder / WEIGHTS} has no {HEAD}; {_REMEDY}")
        return draft

    @property
    def block(self) -> Mapping[str, Any]:
        """The config of the decoder block."""
        return self.settings["transformer_layer_config"]

    @property
    def target(self) -> Mapping[str, Any]:
        """The recorded identity of the checkpoint that the draft was trained for."""
        return self.facts["target"]

    @property
    def tokens(self) -> int:
        """Number of tokens that the draft guesses per step."""
        return self.settings["speculators_config"]["proposal_methods"][0]["speculative_tokens"]

    def stored(self) -> dict[str, Entry]:
        """Its tensors, from the header of the weight file. Raises `UserError` if that is missing or damaged."""
        return {entry.name: entry for entry in read_entries(self.folder / WEIGHTS)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name on disk -> shape of the tensors that its config implies."""
        block, settings = self.block, self.settings
        words = settings["draft_vocab_size"]
        queries, keys = (block[name] * block["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        tables = {"d2t": (words,), "t2d": (block["vocab_size"],)} if words < block["vocab_size"] else {}
        return tables | tensor_shapes(
            hidden=block["hidden_size"],
            joined=len(settings["eagle_aux_hidden_state_layer_ids"]) * settings["target_hidden_size"],
            intermediate=block["intermediate_size"],
            queries=queries,
            keys=keys,
            vocabulary=words,
        )

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that an engine loads."""
        return sum(entry.spec.nbytes for name, entry in self.stored().items() if name != "t2d")

    def mismatch(self, target: Mapping[str, Any]) -> str | None:
        """The reason why the draft does not fit a target with this config; None if it does."""
        text = target.get("text_config") or target
        sizes = {"hidden_size": self.settings["target_hidden_size"], "vocab_size": self.block["vocab_size"]}
        for name, here in sizes.items():
            there = text.get(name)
            if there is not None and there != here:
                return f"it was trained for a {name} of {here}, the target's is {there}"
        # Hidden state i is the input of block i, so `blocks` itself, the last block's output, is allowed.
        last, blocks = max(self.settings["eagle_aux_hidden_state_layer_ids"]), text.get("num_hidden_layers")
        if blocks is not None and last > blocks:
            return f"it reads hidden states before block {last}, and the target has {blocks} blocks"
        return None

    def is_for(self, target: Path) -> bool:
        """Whether the draft was trained for exactly this checkpoint."""
        return self.target.get("content_sha256") == manifest.checkpoint_hash(target)

    def speculative_config(self) -> dict[str, Any]:
        """The value of vLLM's `--speculative-config` for this draft."""
        return {"method": "eagle3", "model": str(self.folder.resolve()), "num_speculative_tokens": self.tokens}


def write_draft(folder: Path, settings: Mapping[str, Any], facts: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Write config, facts, a card and further files (`texts`: relative path -> content) next to a draft's weights."""
    files = {"config.json": folders.dump(settings), CARD: card(facts), **texts}
    content = {"vlmcompress": __version__, **facts, "files": sorted([*files, WEIGHTS])}
    files[FACTS] = folders.dump(content)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def card(facts: Mapping[str, Any]) -> str:
    """The text of the draft's card."""
    acceptance, samples = facts["acceptance"], facts["samples"]
    shares = ", ".join(f"{share:.0%}" for share in acceptance["by_position"])
    lines = [
        "---",
        "library_name: vllm",
        f"tags: [vlmcompress, {facts['method']}, speculative-decoding]",
        "---",
        f"# A draft head for {facts['target'].get('name', 'a checkpoint')}",
        "",
        f"{facts['method']}, {facts['parameters']:,} parameters, guesses {len(acceptance['by_position'])} tokens in a row. "
        f"Trained on {samples['trained_on']} of the target's own answers.",
        f"On {samples['held_out']} held-out answers {acceptance['length']:.2f} tokens a step are accepted, the target's own "
        f"included; of the guesses, by position: {shares}.",
        "",
        f"It is for the checkpoint whose files have the hash `{facts['target']['content_sha256']}`, no other.",
        "",
        "```bash",
        "vlmcompress serve TARGET --draft .",
        "```",
    ]
    return "\n".join(lines) + "\n"


def speculative_config(folder: Path, target: Path) -> dict[str, Any]:
    """The value of vLLM's `--speculative-config` for a draft of ours and its target.

    Raises:
        UserError: the folder is not a draft of ours, or was trained for another target.
    """
    draft, config = Draft.of(folder), models.read_config(target)
    require_draft_target(config)
    if problem := draft.mismatch(config):
        raise UserError(f"{folder}: {problem}; train one for {target} with `vlmcompress draft`")
    setting = draft.speculative_config()
    # It fits by shape, so it would run; of another checkpoint fewer guesses are right, which no engine tells.
    if not draft.is_for(target):
        raise UserError(
            f"{folder} was trained for another checkpoint, {draft.target.get('name', 'with other files')}; train one for "
            f"this one with `vlmcompress draft {target}`, or serve it anyway with --speculative-config "
            f"'{json.dumps(setting)}'"
        )
    return setting
