"""VLMQ's importance of single tokens (arXiv 2508.03351), for GPTQ's Gram matrices of attention's linear layers.

A token matters to a block's attention as much as the attention's own error depends on it. With `F` the input of a block behind
unquantized ones, `U` the one behind quantized ones, and `Attn(x) = x + self_attn(norm(x))`,

    L = ||Attn(U) - Attn(F)||^2        g_t = mean_c |dL/dZ_tc|        H = sum_t g_t^2 x_t x_t^T

at the output `Z` of each layer: rows of the layer's input are multiplied by g. The MLP's layers have no weights, nor does the
first block, where U is F.

What is not the paper's: the quantized prefix here is one rounded to nearest in the method's own format, so that weights come of
one pass over the float model instead of GPTQ's own; q, k and v have one weight for the three, the mean over all their channels,
as they share a Gram matrix; weights are scaled to a mean square of 1 over all samples, which changes no result; and there is no
residual term (GPTAQ's). Of norms behind attention (Gemma 3) L knows nothing.

Cost, for each sample: two forward passes, attention's backward pass, and rounding all weights once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmcompress import models
from vlmcompress.models import VLM, Group
from vlmcompress.models.devices import accelerated
from vlmcompress.numerics import round_to_nearest
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.utils.progress import Progress, silent

Weights = dict[tuple[int, str], Tensor]  # (block, group) -> weight of each token of a sample


@torch.no_grad()
def token_weights(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    method: QuantMethod,
    batches: Sequence[dict[str, Tensor]],
    progress: Progress = silent,
) -> list[Weights]:
    """Compute the weights `[tokens]` of each sample's tokens for the groups in attention; the MLP's groups have none.

    Args:
        blocks: groups of each decoder block that will be quantized.
        method: the method, whose number formats the quantized prefix has.
        batches: the samples, as they will be observed.
        progress: called with (label, done, total).
    """
    paths = models.decoder_layers(vlm.model, vlm.spec)
    parts = [_Block(vlm.model, path, groups, method) for path, groups in zip(paths, blocks, strict=True)]
    weights: list[Weights] = []
    with accelerated(vlm.model, paths) as device:
        for index, batch in enumerate(batches):
            inputs = {key: value.to(device) for key, value in batch.items() if key != "modality"}
            for kind in (_Block.float_pass, _Block.quantized_pass):
                with contextlib.ExitStack() as hooks:
                    for part in parts:
                        hooks.enter_context(kind(part))
                    vlm.model(**inputs, use_cache=False, logits_to_keep=1)
            weights.append({key: weight for part in parts for key, weight in part.weights.items()})
            progress("weighing tokens", index + 1, len(batches))
    return _scaled(weights)


class _Block:
    """A decoder block while a sample goes through it, first behind float blocks, then behind quantized ones.

    Attributes:
        target: `Attn(F) [1, tokens, hidden]` of the sample.
        weights: the weights computed for the sample, by group.
    """

    def __init__(self, model: nn.Module, path: str, groups: Sequence[Group], method: QuantMethod):
        self.block = model.get_submodule(path)
        self.attention = getattr(self.block, "self_attn", None)
        inside = f"{path}.self_attn."
        self.groups = [group for group in groups if group.linears[0].startswith(inside)] if self.attention else []
        methods: list[tuple[Any, QuantMethod]]
        methods = [(model.get_submodule(name), method.of(group)) for group in groups for name in group.linears]
        self.formats = [
            (linear, layer_method.scheme.weights) for linear, layer_method in methods if layer_method.scheme
        ]
        self.linears: dict[str, list[Any]]
        self.linears = {group.name: [model.get_submodule(name) for name in group.linears] for group in self.groups}
        self.entry = torch.empty(0)
        self.target = torch.empty(0)
        self.weights: Weights = {}

    @contextlib.contextmanager
    def float_pass(self) -> Iterator[None]:
        """Remember the output of attention plus residual while the float block runs within the context."""

        def put_out(_module: nn.Module, _args: Any, output: Any) -> None:
            self.target = self.entry + _first(output)

        with self._entering(), _hooked(self.attention, "register_forward_hook", put_out):
            yield

    @contextlib.contextmanager
    def quantized_pass(self) -> Iterator[None]:
        """Weigh the tokens when the block's input reaches its attention, then let the block go on with rounded weights."""
        kept = [(linear, linear.weight.data) for linear, _ in self.formats]

        def weigh(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.weights = self._weigh(args, kwargs) if self.groups else {}
            self._round()

        def restore(*_: Any) -> None:
            for linear, weight in kept:
                linear.weight.data = weight

        before: nn.Module | None = self.attention or self.block
        with (
            self._entering(),
            _hooked(before, "register_forward_pre_hook", weigh, with_kwargs=True),
            _hooked(self.block, "register_forward_hook", restore),
        ):
            try:
                yield
            finally:
                restore()

    def _weigh(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Weights:
        """Compute the weights `g [tokens]` by group, from the arguments of attention's `forward`."""
        assert self.attention is not None
        sums: dict[str, Tensor] = {}
        hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
        with contextlib.ExitStack() as hooks, torch.enable_grad():
            for name, linears in self.linears.items():
                for linear in linears:
                    hooks.enter_context(_hooked(linear, "register_forward_hook", _adder(sums, name)))
            output = _first(self.attention.forward(hidden, *args[1:], **rest))
            (self.entry + output - self.target).float().square().sum().backward()
        channels = {name: sum(len(linear.weight) for linear in linears) for name, linears in self.linears.items()}
        return {(group.layer, group.name): sums[group.name] / channels[group.name] for group in self.groups}

    def _round(self) -> None:
        for linear, fmt in self.formats:
            weight = linear.weight.data
            linear.weight.data = round_to_nearest(weight, fmt, scale_dtype=weight.dtype).dequantize(weight.dtype)

    def _entering(self) -> contextlib.AbstractContextManager[None]:
        def enter(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self.entry = args[0].detach()

        return _hooked(self.block, "register_forward_pre_hook", enter)


def _adder(sums: dict[str, Tensor], name: str) -> Callable:
    """Make a forward hook whose backward pass adds `sum_c |dL/dZ_tc|` to `sums[name] [tokens]`."""

    def add(grad: Tensor) -> None:
        sizes = grad.detach().reshape(-1, grad.shape[-1]).float().abs().sum(1)
        sums[name] = sums[name] + sizes if name in sums else sizes

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(add)

    return hook


def _scaled(samples: list[Weights]) -> list[Weights]:
    """Scale weights to a mean square of 1 over all samples' tokens; a group whose weights are all zero gets none."""
    sizes = {}
    for key in {key for weights in samples for key in weights}:
        together = torch.cat([weights[key] for weights in samples]).double()
        sizes[key] = float(together.square().mean().sqrt())
    return [{key: (w / sizes[key]).cpu() for key, w in weights.items() if sizes[key] > 0} for weights in samples]


@contextlib.contextmanager
def _hooked(module: nn.Module | None, register: str, hook: Callable, **options: Any) -> Iterator[None]:
    """Register a hook within the context; for no module, do nothing."""
    handle = getattr(module, register)(hook, **options) if module is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
