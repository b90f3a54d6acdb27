"""What a Qwen3.5 MTP head drafts, computed with transformers' blocks, and tiny checkpoints with and without the head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file

from tests.kit.float_models import edit, floats

PROMPTS = ("Hello there, what is it?", "one two three", "abc", "What is on the table?", "1 2 3 4 5 6", "zebra")


def few_answers(family: str, folder: Path, **text: Any) -> Path:
    """Write a tiny float32 checkpoint with an output head that only four tokens can win, so that drafts are often right.

    Args:
        text: see `tests.kit.tiny.build`.
    """
    floats(family, folder, **text)
    edit(folder, "config.json", tie_word_embeddings=False, text_config={"tie_word_embeddings": False})
    tensors = load_file(folder / "model.safetensors")
    head = torch.zeros_like(tensors["model.language_model.embed_tokens.weight"])
    rows = torch.randn(2, head.shape[1], generator=torch.Generator().manual_seed(3))
    head[65:69] = torch.cat([rows, -rows])
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_head(folder: Path) -> Path:
    """Remove the head's tensors, and leave config.json as it is: what a tool that knows no head makes of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Oracle:
    """The model of a folder and its head, in float32."""

    def __init__(self, folder: Path):
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = T.AutoModelForImageTextToText.from_pretrained(folder, **options).eval()
        self.text, self.config = self.model.model.language_model, self.model.config.get_text_config()
        self.tokenizer = T.AutoTokenizer.from_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        self.tensors = {name.removeprefix("mtp."): value for name, value in tensors.items() if name.startswith("mtp.")}
        layer = self.config.layer_types.index("full_attention")
        self.block = type(self.text.layers[layer])(self.config, layer).eval()
        prefix = "layers.0."
        inner = {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}
        self.block.load_state_dict(inner)

    def norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm by one of the head's weights."""
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return states * (1 + self.tensors[f"{name}.weight"])

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], start: int) -> list[int | None]:
        """For each pair of a hidden state and the next token, the token that the head expects after them; the head sees the
        pairs from `start` on, and before it None is drafted."""
        ids = torch.tensor([tokens])
        hidden, embedded = self.text(input_ids=ids).last_hidden_state[:, :-1], self.text.embed_tokens(ids)[:, 1:]
        pair = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        states = (torch.cat(pair, -1) @ self.tensors["fc.weight"].T)[:, start:]
        places = torch.arange(states.shape[1])[None]
        mask = torch.full((1, 1, states.shape[1], states.shape[1]), float("-inf")).triu(1)
        turns = self.text.rotary_emb(states, places[None].expand(3, -1, -1))
        states = self.block(states, position_embeddings=turns, attention_mask=mask, position_ids=places)
        states = states[0] if isinstance(states, tuple) else states
        return [None] * start + self.model.lm_head(self.norm(states, "norm")).argmax(-1)[0].tolist()

    def counts(self, prompt: str, answer: Sequence[int], *, prefilled: bool) -> tuple[int, int]:
        """Drafts of one token each while an answer is generated, and how many are accepted.

        Args:
            prefilled: the head's attention sees the prompt, too, and nothing is drafted for the last token.
        """
        prompted = self.tokenizer(prompt)["input_ids"]
        tokens = [*prompted, *answer]
        expected = self.drafts(tokens, 0 if prefilled else len(prompted) - 1)
        place, drafted, accepted = len(prompted) + 1, 0, 0
        while place < len(tokens) - prefilled:
            right = expected[place - 2] == tokens[place]
            place, drafted, accepted = place + 1 + right, drafted + 1, accepted + right
        return drafted, accepted
