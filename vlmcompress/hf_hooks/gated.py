"""Attach a scorer in training: all tokens stay, and attention weighs each by its gate (`hf_hooks.gating`).

Hiding a token from attention is the same as dropping it, as kept tokens keep their positions, where the decoder is of attention
alone. So the scorer is trained on what will be served.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from vlmcompress.errors import UserError
from vlmcompress.hf_hooks._attach import Attachment
from vlmcompress.hf_hooks.gating import attend
from vlmcompress.hf_hooks.slots import Slots
from vlmcompress.hf_hooks.units import Unit
from vlmcompress.models import VLM
from vlmcompress.reducers import REGISTRY, Grid

Gate = Callable[[Tensor, Grid], Tensor]
"""A function of an image's tokens `[n, d]` and their grid: the gates `[n]`."""

_NAME = "vlmcompress_gated"


class Gated(Attachment[Slots]):
    """Gates on the visual tokens of a model. `gate`: computes those of an image; None: all tokens pass."""

    def __init__(self, vlm: VLM) -> None:
        if vlm.spec.mixed_blocks:
            raise UserError(
                f"a scorer is trained by hiding tokens from attention, and decoder blocks of {vlm.spec.family} have "
                f"{vlm.spec.mixed_blocks}; use another reducer, such as coverage"
            )
        self.gate: Gate | None = None
        self._gates: Tensor | None = None
        method = REGISTRY.get("learned")
        super().__init__(vlm, method, method.Options())

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._gates = None  # a prompt without images has none
        return super()._begin(module, args, kwargs)

    def _hook(self) -> None:
        AttentionInterface.register(_NAME, _run)
        layers: Any = self.vlm.model.get_submodule(self.vlm.spec.layers)
        for layer in layers:
            self._undo.append(self._listen(layer.self_attn))

    def _listen(self, attention: nn.Module) -> Callable[[], None]:
        """Have an attention module of the decoder run `attend`, and return what undoes it."""
        own: Any = attention.config
        config: Any = copy.copy(own)
        config._attn_implementation = _NAME
        attention.config = config
        attention._vlmcompress_gates = lambda: self._gates  # type: ignore[assignment]

        def undo() -> None:
            attention.config = own
            del attention._vlmcompress_gates

        return undo

    def _reduce(self, kwargs: dict[str, Any], units: list[Unit], past: Slots | None) -> dict[str, Any]:
        embeds = kwargs["inputs_embeds"]
        if self.gate is not None:
            gates = torch.ones(embeds.shape[:2], device=embeds.device)
            for unit in units:
                own = self.gate(embeds[unit.row, unit.columns].detach(), unit.grid)
                gates = gates.index_put((torch.full_like(unit.columns, unit.row), unit.columns), own)
            self._gates = gates
        return kwargs


def _run(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UserError(
            "a scorer is not trained with this model's attention yet; use another reducer, such as coverage"
        )
    gates = module._vlmcompress_gates()
    if gates is None:
        gates = query.new_ones(key.shape[0], key.shape[2], dtype=torch.float32)
    # Attention maps of all blocks would take far more memory than all else, so backward computes each again.
    out = checkpoint(attend, query, key, value, gates, mask, kwargs["scaling"], use_reentrant=False)
    return out.transpose(1, 2).contiguous(), None
