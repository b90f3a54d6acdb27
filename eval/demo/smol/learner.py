"""Forward passes for training demo-smol: what the tower sees, answers, and how far the adapted language has moved."""

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from eval.world.vocab import BACKGROUNDS, COLOURS, PER_CELL, THINGS

from .adapter import adapt, adapters, without
from .sequences import Batch

PLACES = (" first", " second", " third"), (" left", " middle", " right")  # words for rows and for columns of the grid


class Learner(nn.Module):
    """demo-smol in training: tower and language model frozen, projector and adapters learned."""

    def __init__(self, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast):
        super().__init__()
        model.requires_grad_(False)
        self.model, self.tokenizer = model, tokenizer
        self.projector = model.model.multi_modal_projector.requires_grad_(True)
        self.language = model.model.language_model
        adapt(self.language.layers)

    def learned(self) -> dict[str, nn.Parameter]:
        """All that is trained, by the names of the shipped file."""
        found = {f"projector.{name}": p for name, p in self.projector.named_parameters()}
        for name, module in adapters(self.language.layers).items():
            found |= {f"{name}.a": module.a, f"{name}.b": module.b}
        return found

    def features(self, pixels: Tensor) -> Tensor:
        """(images, tokens, channels) that the tower hands to the projector."""
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        with torch.no_grad():
            return self.model.model.vision_tower(x, output_hidden_states=True).hidden_states[-2][:, 1:]

    def answer_logits(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits at the positions before answer tokens, those tokens, and (sequence, turn) of each."""
        embeds = self.language.embed_tokens(batch.ids)
        if len(batch.pixels):
            visual = self.projector(self.features(batch.pixels)).flatten(0, 1)
            places = (batch.ids == self.model.config.image_token_id).unsqueeze(-1).expand_as(embeds)
            embeds = embeds.masked_scatter(places, visual)
        hidden = self.hidden(embeds, batch.mask(), batch.positions)
        target = batch.labels[:, 1:]
        learn = target != -100
        rows = torch.arange(len(target))[:, None].expand_as(target)
        owner = torch.stack([rows[learn], batch.turns[:, 1:][learn] - 1], 1)
        return self.model.lm_head(hidden[:, :-1][learn]), target[learn], owner

    def hidden(self, embeds: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        out = self.language(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, use_cache=False)
        return out.last_hidden_state

    def drift(self, ids: Tensor) -> Tensor:
        """Mean KL divergence, in nats, of the adapted language model from the package's, over texts `ids [n, length]`."""
        embeds = self.language.embed_tokens(ids)
        with torch.no_grad(), without(self.language.layers):
            wanted = F.log_softmax(self.model.lm_head(self.hidden(embeds)), -1)
        found = F.log_softmax(self.model.lm_head(self.hidden(embeds)), -1)
        return F.kl_div(found, wanted, log_target=True, reduction="sum") / ids.numel()

    @cached_property
    def words(self) -> dict[str, Tensor]:
        """Centred embeddings of the words for what a visual token lies on, by attribute `[values, hidden]`."""
        table = self.language.embed_tokens.weight
        centre = table.mean(0)

        def word(text: str) -> Tensor:
            return table[self.tokenizer(text)["input_ids"]].mean(0) - centre

        nothing = torch.zeros_like(centre)
        return {
            "thing": torch.stack([nothing, *(word(" " + name) for name in THINGS[1:])]),
            "colour": torch.stack([nothing, *(word(" " + name) for name in COLOURS)]),
            "background": torch.stack([word(" " + name) for name in BACKGROUNDS]),
            "role": torch.stack([nothing, nothing, word(" one"), word(" one")]),
            "row": torch.stack([word(name) for name in PLACES[0]]),
            "column": torch.stack([word(name) for name in PLACES[1]]),
        }

    def named(self, seen: dict[str, Tensor]) -> Tensor:
        """The words' embeddings for `seen`, added up, (tokens, hidden): where a projector may well start from."""
        flat = {key: value.flatten() for key, value in seen.items()}
        for key in ("row", "column"):
            flat[key] = flat[key] // PER_CELL
        empty = (flat["thing"] == 0).float()[:, None]
        total = sum(self.words[key][flat[key]] for key in ("thing", "colour", "role", "row", "column"))
        total = total + empty * self.words["background"][flat["background"]]
        return 0.6 * total + self.language.embed_tokens.weight.mean(0)


@torch.no_grad()
def accuracy(learner: Learner, batches: list[Batch]) -> dict[str, float]:
    """Share of questions by family of which all answer tokens, the stop included, are the most likely ones."""
    right: dict[str, list[bool]] = {}
    for batch in batches:
        logits, target, owner = learner.answer_logits(batch)
        wrong = {tuple(place) for place in owner[logits.argmax(-1) != target].tolist()}
        for row, families in enumerate(batch.families):
            for turn, family in enumerate(families):
                right.setdefault(family, []).append((row, turn) not in wrong)
    return {family: sum(hits) / len(hits) for family, hits in right.items()}
