"""The folder of a draft head: the config that vLLM 0.32 reads, facts about the training, and checks against a target.

EAGLE-3's config has the form of the `speculators` library (vLLM reads it in `transformers_utils/configs/speculators`): the
draft's block as a Llama config, the target's tapped blocks, and the number of tokens to guess. Medusa's is that of
`transformers_utils/configs/medusa`. `vlmcompress-draft.json` next to it identifies the draft's target by the hash of its files:
another checkpoint accepts fewer guesses, one of other sizes none.
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
from vlmcompress.export import draft_images, draft_tensors, manifest
from vlmcompress.export.draft_images import DraftImages
from vlmcompress.reduction.support import PREFIX
from vlmcompress.utils import folders, schema
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.schema import Count, Number, Size
from vlmcompress.utils.tensor_headers import Entry, read_entries

FACTS = "vlmcompress-draft.json"
CARD = "README.md"
WEIGHTS = "model.safetensors"
TARGETS = (
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
"""Supported architectures whose classes in vLLM 0.32 pass hidden states to a draft (`SupportsEagle3`). Qwen3.5, with recurrent
states, and mixtures of experts were not tried."""
IN_PIECES = ("Mistral3ForConditionalGeneration",)
"""Architectures whose visual tokens are not contiguous, so that a draft gets them as vLLM passes them."""


def require_draft_target(config: Mapping[str, Any], images: DraftImages | None = None) -> None:
    """Raise `UserError` for a target that vLLM can't serve with a draft head, or not with one that gets `images`."""
    # A reduced checkpoint has our prefix before vLLM's class, which is the same otherwise.
    architecture = (config.get("architectures") or ["?"])[0].removeprefix(PREFIX)
    if architecture not in TARGETS:
        raise UserError(
            f"vLLM 0.32's {architecture} passes no hidden states to a draft head, or was not tried; those that do: "
            f"{', '.join(TARGETS)}; speculate with ngram or suffix instead"
        )
    if images and not images.plain and architecture in IN_PIECES:
        raise UserError(
            f"--images: {architecture} has other tokens among an image's; leave out --images and --image-vector"
        )


_REMEDY = "train the draft again"
_Target = TypedDict("_Target", {"content_sha256": str, "name": NotRequired[str]})
_Samples = TypedDict("_Samples", {"trained_on": Count, "held_out": Count})
_Acceptance = TypedDict("_Acceptance", {"by_position": list[Number], "length": Number})
_Proposal = TypedDict("_Proposal", {"speculative_tokens": Size})
_Proposals = TypedDict("_Proposals", {"proposal_methods": Annotated[list[_Proposal], Field(min_length=1)]})


class _Facts(TypedDict):
    """The fields of `vlmcompress-draft.json` that are read."""

    method: Literal["eagle3", "medusa"]
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


class _Eagle3(TypedDict):
    """config.json of an EAGLE-3 draft."""

    draft_vocab_size: Size
    target_hidden_size: Size
    eagle_aux_hidden_state_layer_ids: Annotated[list[Count], Field(min_length=1)]
    transformer_layer_config: _Block
    speculators_config: _Proposals


class _Medusa(TypedDict):
    """config.json of a Medusa draft."""

    vocab_size: Size
    truncated_vocab_size: Size
    hidden_size: Size
    num_heads: Size


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
        settings = schema.read_typed(
            _Eagle3 if facts["method"] == "eagle3" else _Medusa, folder / "config.json", _REMEDY
        )
        draft = Draft(folder, settings, facts)
        draft_images.read_draft_images(draft.block)
        if draft_tensors.HEAD not in draft.stored():
            raise UserError(f"{folder / WEIGHTS} has no {draft_tensors.HEAD}; {_REMEDY}")
        return draft

    @property
    def method(self) -> str:
        """The method: `eagle3` or `medusa`."""
        return self.facts["method"]

    @property
    def block(self) -> Mapping[str, Any]:
        """The config of the decoder block; for Medusa, which has none, the whole config."""
        return self.settings.get("transformer_layer_config", self.settings)

    @property
    def target(self) -> Mapping[str, Any]:
        """The recorded identity of the checkpoint that the draft was trained for."""
        return self.facts["target"]

    @property
    def tokens(self) -> int:
        """Number of tokens that the draft guesses per step."""
        if self.method == "medusa":
            return self.settings["num_heads"]
        return self.settings["speculators_config"]["proposal_methods"][0]["speculative_tokens"]

    @property
    def images(self) -> DraftImages:
        """The visual tokens and image vectors that the draft gets."""
        return draft_images.read_draft_images(self.block)

    def stored(self) -> dict[str, Entry]:
        """Its tensors, from the header of the weight file. Raises `UserError` if that is missing or damaged."""
        return {entry.name: entry for entry in read_entries(self.folder / WEIGHTS)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name on disk -> shape of the tensors that its config implies."""
        block, settings = self.block, self.settings
        hidden, words = block["hidden_size"], settings.get("draft_vocab_size", settings.get("truncated_vocab_size"))
        fewer = words < block["vocab_size"]
        if self.method == "medusa":
            tables = {"token_map": (words,)} if fewer else {}
            return tables | draft_tensors.medusa(hidden=hidden, vocabulary=words, heads=self.tokens)
        queries, keys = (block[name] * block["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        tables = {"d2t": (words,), "t2d": (block["vocab_size"],)} if fewer else {}
        return tables | draft_tensors.eagle3(
            hidden=hidden,
            joined=len(settings["eagle_aux_hidden_state_layer_ids"]) * settings["target_hidden_size"],
            intermediate=block["intermediate_size"],
            queries=queries,
            keys=keys,
            vocabulary=words,
            vector=self.images.vector,
        )

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that an engine loads."""
        return sum(entry.spec.nbytes for name, entry in self.stored().items() if name != "t2d")

    def mismatch(self, target: Mapping[str, Any]) -> str | None:
        """The reason why the draft does not fit a target with this config; None if it does."""
        text = target.get("text_config") or target
        width = self.settings.get("target_hidden_size", self.block["hidden_size"])
        for name, here in (("hidden_size", width), ("vocab_size", self.block["vocab_size"])):
            there = text.get(name)
            if there is not None and there != here:
                return f"it was trained for a {name} of {here}, the target's is {there}"
        # Hidden state i is the input of block i, so `blocks` itself, the last block's output, is allowed.
        last, blocks = max(self.settings.get("eagle_aux_hidden_state_layer_ids", [0])), text.get("num_hidden_layers")
        if blocks is not None and last > blocks:
            return f"it reads hidden states before block {last}, and the target has {blocks} blocks"
        return None

    def is_for(self, target: Path) -> bool:
        """Whether the draft was trained for exactly this checkpoint."""
        return self.target.get("content_sha256") == manifest.checkpoint_hash(target)

    def speculative_config(self) -> dict[str, Any]:
        """The value of vLLM's `--speculative-config` for this draft."""
        # Medusa goes without a method: with "medusa", vLLM 0.32 looks for a text model.
        method = {"method": "eagle3"} if self.method == "eagle3" else {}
        return {**method, "model": str(self.folder.resolve()), "num_speculative_tokens": self.tokens}


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
    require_draft_target(config, draft.images)
    if problem := draft.mismatch(config):
        raise UserError(f"{folder}: {problem}; train one for {target} with `vlmcompress draft`")
    setting = draft.speculative_config()
    # It fits by shape, so it would run; of another checkpoint fewer guesses are right, which no engine tells.
    if not draft.is_for(target):
        raise UserError(
            f"{folder} was trained for another checkpoint, {draft.target.get('name', 'with other files')}; adapt it with "
            f"`vlmcompress draft {target} --from {folder}`, or serve it anyway with --speculative-config "
            f"'{json.dumps(setting)}'"
        )
    return setting
