"""MBQ's search for smoothing scales as published: by the error of a module's output, which runs again for every candidate.

The inputs of the decoder's blocks are captured (`calibration.block_inputs`), and batches go through the blocks of the
unquantized model. In each block the calls of the module around a group's layers are recorded: attention for q/k/v, the MLP for
gate and up; a layer that is alone in its group is its own module. Then the module runs on them with the layers as an engine
would compute them. A module that computes each token by itself, as MLPs do, runs only on tokens in the loss.

Memory: hidden states, the inputs and outputs of one group's module (of all experts' together) for all samples, and the blocks'
other arguments (positions, masks). Time: `grid + 1` runs of each module, some 30 passes through the decoder by default.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vlmcompress import models
from vlmcompress.models import VLM, Group
from vlmcompress.models.devices import accelerator, emulated, replaced_forward, resident, sent, widened
from vlmcompress.numerics import Scheme, fake_quantize, find_params, round_activations
from vlmcompress.numerics.statistics.balance import MODALITIES, Sensitivity
from vlmcompress.quantization.calibration.block_inputs import TOKENS, Batch, StopForward, capture_block_inputs
from vlmcompress.quantization.calibration.routed import routed_to_all
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import mbq
from vlmcompress.utils import distributed
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, silent

Key = tuple[int, str]
_WEIGHED = ("vision", "answer")  # modalities in the loss
_CODES = [MODALITIES.index(name) + 1 for name in _WEIGHED]


@dataclass(frozen=True)
class Searched:
    """Candidates of a group: `scales`, each `[in]`, and their losses."""

    scales: list[Tensor]
    losses: list[float]

    @property
    def best(self) -> Tensor:
        """The scale with the smallest loss."""
        return self.scales[self.losses.index(min(self.losses))]


@torch.no_grad()
def search_blocks(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    samples: Sequence[dict[str, Tensor]],
    method: QuantMethod,
    sensitivities: Mapping[Key, Sensitivity],
    *,
    all_experts: bool = False,
    progress: Progress = silent,
) -> dict[Key, Searched]:
    """Search smoothing scales by (block, group), for the groups that can be smoothed; the model is unchanged.

    Args:
        blocks: the groups of each decoder block, optionally followed by the output head's.
        samples: from `encode`.
        method: scheme `mbq` with `objective: mae`; groups with another scheme are left out.
        sensitivities: (block, group) -> sensitivity.
        all_experts: run every expert of a mixture on all tokens. Otherwise an expert to which no token in the loss is routed
            is left out.
        progress: called with (label, done, total).

    Raises:
        UserError: the samples have neither visual nor answer tokens, or a module's output holds NaN or Inf.
    """
    batches = capture_block_inputs(vlm, samples, progress)
    device, searched = accelerator() or vlm.model.device, dict[Key, Searched]()
    paths = models.decoder_layers(vlm.model, vlm.spec)
    for layer, path in enumerate(paths):
        block = vlm.model.get_submodule(path)
        groups = [g for g in blocks[layer] if g.smooth and method.of(g).needs.block_scales]
        with resident(block, device), routed_to_all(block) if all_experts else contextlib.nullcontext():
            forward = widened(block)
            # Memory holds the calls of one group's module, or of all experts', which together get few rows of each token. The
            # last group's are recorded on the way to the next block.
            units = [list(unit) for _, unit in itertools.groupby(groups, key=lambda group: group.unit)] or [[]]
            for unit in units:
                for calls in _record(vlm.model, forward, layer, unit, batches, device, advance=unit is units[-1]):
                    key = layer, calls.group.name
                    if (result := calls.search(method.of(calls.group), sensitivities[key].rho)) is not None:
                        searched[key] = result
        progress("searching scales", layer + 1, len(paths))
    return searched


def _record(
    model: nn.Module,
    forward: Callable[..., Any],
    layer: int,
    groups: Sequence[Group],
    batches: Sequence[Batch],
    device: torch.device,
    *,
    advance: bool,
) -> list[_Calls]:
    """Record the calls of some groups' modules when a block runs on all batches: of one group, or of experts'.

    Args:
        advance: whether batches advance to the next block.
    """
    recorded = [_Calls(model, group, device, stops=not advance) for group in groups]
    with contextlib.ExitStack() as stack:
        for calls in recorded:
            stack.enter_context(calls.watching())
        for batch in batches:
            for calls in recorded:
                calls.batch = batch
            with contextlib.suppress(StopForward):
                hidden = batch.run_block(forward, layer, device)
                if advance:
                    batch.set_hidden(hidden)
    return recorded


class _Calls:
    """The calls of the module around a group's layers in the unquantized block.

    Attributes:
        batch: the batch that runs.
        stops: whether the block's run ends when a call is recorded; other experts' may follow an expert's.
        tokenwise: whether the module computes each row by itself: it gets one tensor and has only linear layers' weights.
        total: sum of the magnitudes of the layers' input `[in]` over tokens that are not ignored, whose number is `count`.
        inputs: for each call its arguments, and the modality of each row.
    """

    batch: Batch

    def __init__(self, model: nn.Module, group: Group, device: torch.device, *, stops: bool):
        self.group, self.device = group, device
        self.linears: list[Any] = [model.get_submodule(name) for name in group.linears]
        levels = zip(*(name.split(".") for name in (*group.linears, *group.kept)), strict=False)
        self.path = ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
        self.module: Any = model.get_submodule(self.path)
        self.tokenwise = all(isinstance(each, nn.Linear) for each in self.module.modules() if each._parameters)
        parent: Any = model.get_submodule(group.linears[0].rpartition(".")[0])
        self.expert: models.Expert | None = None if group.expert is None else parent
        self.stops = stops and self.expert is None
        self.total = torch.zeros(self.linears[0].in_features, dtype=torch.float64, device=device)
        self.count = torch.zeros(1, dtype=torch.float64, device=device)
        self.inputs: list[tuple[tuple, dict[str, Any], Tensor]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context calls are recorded."""

        def record(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            codes = self._codes()
            self.tokenwise = self.tokenwise and len(args) == 1 and not kwargs
            if self.tokenwise:
                weighed = torch.isin(codes, torch.tensor(_CODES, device=self.device))
                args, codes = (args[0].flatten(0, -2)[weighed],), codes[weighed]
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self.batch.home), (args, kwargs))
            self.inputs.append((args, kwargs, codes))

        def measure(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2)[self._codes() > 0]
            self.total += rows.abs().sum(0, dtype=torch.float64)
            self.count += len(rows)
            if self.stops:
                raise StopForward

        with contextlib.ExitStack() as hooks:
            hooks.callback(self.module.register_forward_pre_hook(record, with_kwargs=True).remove)
            hooks.callback(self.linears[0].register_forward_pre_hook(measure).remove)
            yield

    def _codes(self) -> Tensor:
        """The modality of each row that the module is processing."""
        codes = self.batch.modality.flatten().to(self.device)
        return codes if self.expert is None else codes[self.expert.rows]

    def search(self, method: QuantMethod, rho: float) -> Searched | None:
        """Compute each candidate's loss; None for an expert without rows in the loss. Removes the calls."""
        options, scheme = method.options, method.scheme
        assert isinstance(options, mbq.Options) and scheme is not None
        inputs, self.inputs = self._joined() if self.tokenwise else self.inputs, []
        mean = distributed.all_sum(self.total) / distributed.all_sum(self.count).clamp_min(1)
        scales = mbq.candidates(mean.float(), options.grid)
        run, device = widened(self.module), self.device

        def output(args: tuple, kwargs: dict[str, Any]) -> Tensor:
            args, kwargs = tree_map_only(Tensor, lambda tensor: sent(tensor, device), (args, kwargs))
            result = run(*args, **kwargs)
            return (result[0] if isinstance(result, tuple) else result).flatten(0, -2)

        references = [output(args, kwargs).to(self.batch.home) for args, kwargs, _ in inputs]
        weighed = [(codes[:, None] == torch.tensor(_CODES, device=device)).double() for *_, codes in inputs]
        # |D| of each candidate summed over the tokens and channels of a modality; the last row counts elements.
        sums = torch.zeros(len(scales) + 1, len(_CODES), dtype=torch.float64, device=device)
        for reference, rows in zip(references, weighed, strict=True):
            sums[-1] += rows.sum(0) * reference.shape[-1]
        for candidate, scale in enumerate(scales):
            with contextlib.ExitStack() as stack:
                for linear in self.linears:
                    stack.enter_context(replaced_forward(linear, _engine_forward(linear, scale, scheme)))
                for (args, kwargs, _), reference, rows in zip(inputs, references, weighed, strict=True):
                    error = output(args, kwargs) - sent(reference, device)
                    sums[candidate] += torch.linalg.vector_norm(error, 1, 1, dtype=torch.float32).double() @ rows
        *totals, counts = [dict(zip(_WEIGHED, row, strict=True)) for row in distributed.all_sum(sums).tolist()]
        if self.expert is not None:
            if not sum(counts.values()):
                return None
            rho = rho if math.isfinite(rho) else 1.0  # no answer token with a gradient was routed to it
        try:
            losses = [mbq.loss(total, counts, rho) for total in totals]
        except ValueError as error:
            raise UserError(f"{self.path}: {error}") from error
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        if min(losses) == math.inf:
            raise UserError(f"{self.path}: its output holds NaN or Inf; check the checkpoint and the samples")
        return Searched(scales, losses)

    def _joined(self) -> list[tuple[tuple, dict[str, Any], Tensor]]:
        """The calls of a module that computes each row by itself, cut anew: an expert gets few rows of a batch."""
        if not self.inputs:
            return []
        rows = torch.cat([args[0] for args, _, _ in self.inputs])
        codes = torch.cat([codes for *_, codes in self.inputs])
        return [((some,), {}, kinds) for some, kinds in zip(rows.split(TOKENS), codes.split(TOKENS), strict=True)]


def _engine_forward(layer: nn.Linear, scale: Tensor, scheme: Scheme) -> Callable[[Tensor], Tensor]:
    """Make a layer's `forward` as the engine computes it: `X / scale`, rounded if the scheme rounds activations, times `Q(W
    scale)`."""
    dtype, act = layer.weight.dtype, scheme.activations
    weight = layer.weight.float() * scale
    weight = fake_quantize(weight, *find_params(weight, scheme.weights, scale_dtype=dtype), scheme.weights)
    if act is None:
        weight = weight.div_(scale).to(torch.float32 if emulated(dtype) else dtype)
        return lambda input: nn.functional.linear(input, weight, layer.bias)

    def forward(input: Tensor) -> Tensor:
        x = round_activations(input / scale, act).float()
        bias = None if layer.bias is None else layer.bias.float()
        return nn.functional.linear(x, weight, bias).to(input.dtype)

    return forward
