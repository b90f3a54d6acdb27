"""The layers as wide as the vocabulary: the token embedding and the output head, which may share one weight.

A quantized head cannot share its weight with an embedding that is not quantized or has other codes: vLLM would tie it to the
embedding's `weight` and not load its packed tensors. So it becomes a separate matrix, and config.json says so (`with_head`,
`untied`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmcompress.models._names import tied_names
from vlmcompress.models._source import Source
from vlmcompress.models._spec import HEAD, Group, ModelSpec
from vlmcompress.utils import json_files

PADDING = 64
"""vLLM pads the rows of embedding and head to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`)."""


class NormAndHead(nn.Module):
    """The modules after the last block: hidden states `[..., width]` to logits `[..., vocabulary]`."""

    def __init__(self, model: nn.Module, spec: ModelSpec):
        super().__init__()
        self.norm = model.get_submodule(final_norm(spec))
        self.lm_head = model.get_submodule(spec.lm_head)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits."""
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def final_norm(spec: ModelSpec) -> str:
    """Memory name of the norm between the last block and the output head."""
    return f"{spec.layers.rpartition('.')[0]}.{spec.norm}"


def head_group(spec: ModelSpec, layer: int) -> Group:
    """The output head as a group. `layer`: its position, the number of decoder blocks."""
    return Group(layer, HEAD, (spec.lm_head,))


def embedding_name(model: PreTrainedModel) -> str:
    """Memory name of the token embedding."""
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embedding)


def matrices(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers that formats quantize, by memory name: all linear ones and the token embedding."""
    embedding = model.get_input_embeddings()
    return {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) or module is embedding
    }


def is_tied(model: PreTrainedModel, spec: ModelSpec) -> bool:
    """Whether the output head shares the embedding's weight."""
    return f"{spec.lm_head}.weight" in tied_names(model)


def untie(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Make the output head's weight a separate parameter (sharing memory), so that either can be replaced alone."""
    head = model.get_submodule(spec.lm_head)
    head.weight = nn.Parameter(head.get_parameter("weight").data, requires_grad=False)


def head_on_disk(source: Source) -> str:
    """The name on disk for the output head's weight as a separate matrix: by the embedding's, the hub's or transformers'
    rule."""
    embedding, name = f"{embedding_name(source.meta_model)}.weight", f"{source.spec.lm_head}.weight"
    return source.spec.hub_name(name) if source.names[embedding] == source.spec.hub_name(embedding) else name


def with_head(source: Source) -> Source:
    """The checkpoint with an output head that is a separate matrix; unchanged if it already is one."""
    if not is_tied(source.meta_model, source.spec):
        return source
    name, embedding = f"{source.spec.lm_head}.weight", source.names[f"{embedding_name(source.meta_model)}.weight"]
    old, new = source.names.get(name), head_on_disk(source)  # some are stored twice
    stored = {key: value for key, value in source.stored.items() if key != old}
    return replace(
        source,
        config=untied(source.config),
        stored=stored | {new: source.stored[embedding]},
        names=source.names | {name: new},
        copies={new: embedding},
    )


def with_vocabulary(config: Mapping[str, object], rows: int) -> dict[str, object]:
    """config.json's content with another size of the vocabulary."""
    text = config.get("text_config")
    changed = dict(config) | ({"vocab_size": rows} if "vocab_size" in config else {})
    nested = isinstance(text, Mapping) and ("vocab_size" in text or "vocab_size" not in config)
    return changed | ({"text_config": {**text, "vocab_size": rows}} if nested else {})  # type: ignore[dict-item]


def rows_of(model: PreTrainedModel) -> int:
    """Number of rows of a model's token embedding."""
    return model.get_parameter(f"{embedding_name(model)}.weight").shape[0]


def unembedded(folder: Path, rows: int) -> str | None:
    """A message about tokens of a folder's tokenizer without a row in the embedding; None if all have one."""
    ids: dict[str, int] = {}
    try:
        if (folder / "tokenizer.json").is_file():
            content = json_files.read(folder / "tokenizer.json")
            pieces = content["model"]["vocab"]
            ids = dict(pieces) if isinstance(pieces, Mapping) else {piece[0]: i for i, piece in enumerate(pieces)}
            ids |= {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        elif (folder / "added_tokens.json").is_file():
            ids = dict(json_files.read(folder / "added_tokens.json"))
        beyond = sorted((index, token) for token, index in ids.items() if index >= rows)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None  # reported when it is loaded
    if not beyond:
        return None
    what = f"the tokenizer has {len(beyond)} tokens for which the embedding of {rows:,} rows has none"
    return f"{what}, first {beyond[0][1]!r} ({beyond[0][0]:,})"


def untied(config: Mapping[str, object]) -> dict[str, object]:
    """config.json's content with `tie_word_embeddings` off."""
    text = config.get("text_config")
    changed: dict[str, object] = {**config, "tie_word_embeddings": False}
    return changed | ({"text_config": {**text, "tie_word_embeddings": False}} if isinstance(text, Mapping) else {})
