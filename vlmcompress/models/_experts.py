"""Experts of a mixture, each with linear layers of its own.

transformers 5 keeps the experts of a block as two tensors, `gate_up_proj [experts, 2 * width, in]` and `down_proj
[experts, in, width]`, so single layers cannot be found, observed or replaced. Here each expert is a module with `gate_proj`,
`up_proj` and `down_proj`, the names that vLLM expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from vlmcompress.models._spec import ModelSpec
from vlmcompress.utils import tensor_files
from vlmcompress.utils.tensor_headers import Entry

_WIDE = (torch.float32, torch.bfloat16, torch.float16)


class Expert(nn.Module):
    """One expert: `down(act(gate(x)) * up(x))`.

    Attributes:
        rows: indices `[n]` of its tokens among the block's tokens while it runs; else None.
    """

    def __init__(self, width: int, inner: int, act: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(inner, width, bias=False, dtype=dtype)
        self.act_fn = act
        self.rows: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The expert's output for `x [n, width]`."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """The experts of one block, `experts.0`, `experts.1` and so on.

    Attributes:
        all_tokens: whether every expert runs on all tokens, so that calibration sees enough of them. The output still includes
            only routed tokens.
    """

    all_tokens = False

    @property
    def width(self) -> int:
        """Channels of the input."""
        first: Any = self[0]
        return first.gate_proj.in_features

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs, as the fused module of transformers computes it.

        Args:
            hidden_states: `[tokens, width]`.
            top_k_index: `[tokens, k]`, the experts of each token.
            top_k_weights: `[tokens, k]`, their weights.
        """
        output = torch.zeros_like(hidden_states)
        experts: Any = self
        for number, expert in enumerate(experts):
            # The tokens routed to this expert, and the position of this expert among their k experts; [rows].
            rows, place = torch.where(top_k_index == number)
            # In calibration every expert sees all tokens, so that rarely used ones have statistics; only routed ones count.
            tokens = torch.arange(len(hidden_states), device=hidden_states.device) if self.all_tokens else rows
            if not len(tokens):
                continue
            expert.rows = tokens
            try:
                outputs = expert(hidden_states[tokens])
            finally:
                expert.rows = None
            outputs = outputs[rows] if self.all_tokens else outputs
            outputs = outputs * top_k_weights[rows, place, None]
            output.index_add_(0, rows, outputs.to(output.dtype))
        return output


def split_experts(model: nn.Module, spec: ModelSpec) -> None:
    """Replace each block's fused experts by `Experts` on the meta device."""
    for path, fused in _fused(model, spec):
        experts, inner, width = fused.down_proj.shape[0], fused.down_proj.shape[2], fused.down_proj.shape[1]
        with torch.device("meta"):
            bare = [Expert(width, inner, fused.act_fn, fused.down_proj.dtype) for _ in range(experts)]
        model.set_submodule(path, Experts(bare))


def without_experts(kind: type[PreTrainedModel], spec: ModelSpec) -> type[PreTrainedModel]:
    """A subclass of a model class whose blocks have no experts, so that `from_pretrained` reads everything else.

    `put_in` gives an instance its experts and its original class.
    """

    def init(self: Any, config: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, config, *args, **options)
        for path, _ in _fused(self, spec):
            self.set_submodule(path, Experts())

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def put_in(model: PreTrainedModel, meta_model: PreTrainedModel, stored: Mapping[str, Entry]) -> None:
    """Add the experts to a model of `without_experts`, memory-mapped from the files: they are read on first use.

    Args:
        model: the model, changed in place.
        meta_model: the model on the meta device, whose expert modules are used; they may have the tensors of quantized layers.
        stored: memory name of each tensor of an expert -> its place on disk.
    """
    model.__class__ = type(meta_model)
    weights = tensor_files.map_tensors(stored)
    for path, experts in [(path, module) for path, module in meta_model.named_modules() if isinstance(module, Experts)]:
        model.set_submodule(path, experts)
        for name in list(experts.state_dict()):
            owner, _, leaf = name.rpartition(".")
            value, module = weights[f"{path}.{name}"], experts.get_submodule(owner)
            value = value.to(model.dtype) if value.dtype in _WIDE else value
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
            else:
                module._buffers[leaf] = value


def _fused(model: nn.Module, spec: ModelSpec) -> list[tuple[str, Any]]:
    """Path and module of each block's fused experts."""
    modules: list[tuple[str, Any]] = list(model.named_modules()) if spec.experts else []
    return [
        (path, module)
        for path, module in modules
        if path.startswith(f"{spec.layers}.")
        and path.endswith(f".{spec.experts}")
        and isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
    ]
