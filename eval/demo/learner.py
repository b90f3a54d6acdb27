"""Forward passes for training: oracle visual tokens, the real tower, answers, and labels of visual tokens."""

import torch
from torch import nn
from torch.nn import functional as F

from eval.world.vocab import BACKGROUNDS, COLOURS, PER_CELL, ROLES, THINGS

from .architectures import HIDDEN
from .sequences import Batch

SIZES = {
    "thing": len(THINGS),
    "colour": len(COLOURS) + 1,
    "role": len(ROLES),
    "background": len(BACKGROUNDS),
    "row": 12,
    "column": 12,
}


class Oracle(nn.Module):
    """Visual tokens looked up instead of seen: the sum of the embeddings of a token's labels and of its place."""

    def __init__(self):
        super().__init__()
        sizes = SIZES | {"cell_row": 12 // PER_CELL, "cell_column": 12 // PER_CELL}
        self.tables = nn.ModuleDict({name: nn.Embedding(size, HIDDEN) for name, size in sizes.items()})
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, cells: dict[str, torch.Tensor]) -> torch.Tensor:
        places = {"cell_row": cells["row"] // PER_CELL, "cell_column": cells["column"] // PER_CELL}
        return sum(self.tables[name](index.flatten()) for name, index in (cells | places).items())


class Heads(nn.Module):
    """Throw-away classifiers on the visual tokens, for dense supervision of the tower."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(HIDDEN, size) for name, size in SIZES.items()})

    def forward(self, visual: torch.Tensor, cells: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        """Summed cross-entropy and accuracy by attribute (things and colours: where there is something)."""
        loss, accuracy = visual.new_zeros(()), {}
        there = cells["thing"].flatten() > 0
        for name, head in self.heads.items():
            target = cells[name].flatten()
            logits = head(visual).float()
            loss = loss + F.cross_entropy(logits, target)
            right = (logits.argmax(-1) == target).float()
            if name in ("thing", "colour"):
                loss = loss + F.cross_entropy(logits[there], target[there])
                right = right[there]
            accuracy[name] = right.mean().item()
        return loss, accuracy


def window_attention(self, hidden_states, cu_seqlens, position_embeddings=None, max_seqlen=None, **kwargs):
    """Qwen2.5-VL's vision attention with chunks of one length done as one batch; the same numbers as the loop, faster."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    n = hidden_states.shape[0]
    q, k, v = self.qkv(hidden_states).reshape(n, 3, self.num_heads, -1).permute(1, 0, 2, 3).unbind(0)
    q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
    lengths = cu_seqlens.diff()
    out = torch.empty_like(q)
    for length in lengths.unique().tolist():
        rows = (cu_seqlens[:-1][lengths == length, None] + torch.arange(length, device=q.device)).flatten()
        parts = (t[rows].reshape(-1, length, self.num_heads, t.shape[-1]).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(*parts, scale=self.scaling)
        out = out.index_copy(0, rows, attended.transpose(1, 2).reshape(len(rows), *q.shape[1:]))
    return self.proj(out.reshape(n, -1))


def qwen_patches(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalized pixels in the order of Qwen2VLImageProcessor: (patches, channels * 2 * 8 * 8), and the grids."""
    count, height, width, _ = pixels.shape
    x = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    rows, columns = height // 16, width // 16
    x = x.reshape(count, 3, rows, 2, 8, columns, 2, 8).permute(0, 2, 5, 3, 6, 1, 4, 7)
    x = x.unsqueeze(6).expand(-1, -1, -1, -1, -1, -1, 2, -1, -1).reshape(count * rows * columns * 4, -1)
    return x, torch.tensor([[1, 2 * rows, 2 * columns]] * count)


class Learner(nn.Module):
    """A demo model with its oracle and heads."""

    def __init__(self, kind: str, model: nn.Module, image_id: int):
        super().__init__()
        self.kind, self.model, self.image_id = kind, model, image_id
        self.oracle, self.heads = Oracle(), Heads()
        model.model.language_model.config._attn_implementation = "eager"  # at this size faster than SDPA on a CPU
        if kind == "qwen":
            for block in model.model.visual.blocks:
                block.attn.forward = window_attention.__get__(block.attn)

    @torch.no_grad()
    def share_geometry(self, tokenizer) -> None:
        """Start oracle and text embeddings of the same thing from the same vector: of " star", "star" and a seen star."""
        embedding, head = self.model.get_input_embeddings().weight, self.model.lm_head.weight
        for token, index in tokenizer.get_vocab().items():
            bare = tokenizer.get_vocab().get(token.removeprefix("\u0120"))
            if token.startswith("\u0120") and bare is not None:
                embedding[bare].lerp_(embedding[index], 0.8)
        head.copy_(embedding * 0.5)
        for table, names in (("thing", THINGS), ("colour", ("", *COLOURS)), ("background", tuple(BACKGROUNDS))):
            for row, name in enumerate(names):
                ids = tokenizer(" " + name.split(" ")[-1])["input_ids"]
                if len(ids) == 1:
                    self.oracle.tables[table].weight[row] += embedding[ids[0]]

    def tower_parameters(self) -> list[nn.Parameter]:
        inner = self.model.model
        parts = [inner.visual] if self.kind == "qwen" else [inner.vision_tower, inner.multi_modal_projector]
        return [p for part in parts for p in part.parameters()]

    def language_parameters(self) -> list[nn.Parameter]:
        return [*self.model.model.language_model.parameters(), *self.model.lm_head.parameters()]

    def look(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode a batch of equally large images as visual tokens, (tokens, hidden)."""
        inner = self.model.model
        if self.kind == "qwen":
            patches, grids = qwen_patches(pixels)
            return inner.visual(patches, grid_thw=grids).pooler_output
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        tower = inner.vision_tower
        hidden = tower.pre_layrnorm(tower.embeddings(x))
        for layer in tower.encoder.layers[:-1]:
            out = layer(hidden, attention_mask=None)
            hidden = out[0] if isinstance(out, tuple) else out
        return inner.multi_modal_projector(hidden[:, 1:]).flatten(0, 1)

    def answer_logits(self, batch: Batch, visual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the logits at the positions that predict answer tokens; returns them with those tokens."""
        language = self.model.model.language_model
        embeds = language.get_input_embeddings()(batch.ids)
        if visual is not None and len(visual):
            places = (batch.ids == self.image_id).unsqueeze(-1).expand_as(embeds)
            embeds = embeds.masked_scatter(places, visual.to(embeds.dtype))
        positions = batch.positions if self.kind == "qwen" else None
        hidden = language(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
        target = batch.labels[:, 1:]
        learn = target != -100
        return self.model.lm_head(hidden[:, :-1][learn]).float(), target[learn]


@torch.no_grad()
def accuracy(learner: Learner, batches: list[Batch], oracle: bool) -> dict[str, float]:
    """Exact match by family and by form: all answer tokens, stop included, are the most likely ones (as in greedy decoding)."""
    learner.eval()
    right: dict[str, list[bool]] = {}
    for batch in batches:
        visual = None
        if len(batch.pixels):
            visual = learner.oracle(batch.cells) if oracle else learner.look(batch.pixels)
        logits, target = learner.answer_logits(batch, visual)
        hits = logits.argmax(-1) == target
        owner = (batch.labels[:, 1:] != -100).nonzero()[:, 0]
        wrong = torch.zeros(len(batch.families)).index_add_(0, owner, (~hits).float())
        for family, form, misses in zip(batch.families, batch.forms, wrong.tolist(), strict=True):
            right.setdefault(family, []).append(misses == 0)
            right.setdefault(form, [False, True]).append(misses == 0)  # forms are few: start from one half
    learner.train()
    return {name: sum(hits) / len(hits) for name, hits in right.items()}
