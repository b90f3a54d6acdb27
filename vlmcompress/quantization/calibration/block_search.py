"""MBQ's search for smoothing scales as published: by the error of the block's output, re-running the block for every candidate.

llm-compressor's `AWQModifier` has the machinery: it remembers the arguments of a block's modules, re-runs them and folds the
scales found into the model. `BlockSearch` puts MBQ's candidates and losses into it, and mappings scoped to the decoder (its
defaults match the vision towers of several families). It modifies its model, so it gets a copy, and only the scales are used.
This takes twice the memory and many times the arithmetic of the Gram form.

`BlockSearch` uses private parts of `AWQModifier` in llm-compressor 0.14: it replaces `_compute_best_scale` and calls
`_run_samples` and `_smooth_activation_stats` (its test fails if they change).

`run_oneshot` drives llm-compressor's sequential pipeline, which cuts the model into one subgraph per decoder block and runs the
calibration set through each, sample by sample. The modality of each token is passed in the field that llm-compressor calls
`loss_mask`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from llmcompressor import oneshot
from llmcompressor.core import active_session
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from pydantic import PrivateAttr
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vlmcompress import models
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.models import VLM, Group
from vlmcompress.models.data.encode import PIXELS
from vlmcompress.models.devices import replaced_forward
from vlmcompress.numerics import Scheme, fake_quantize, find_params, round_activations
from vlmcompress.numerics.statistics.balance import MODALITIES, Sensitivity
from vlmcompress.quantization.calibration.solve import QuantMethod
from vlmcompress.quantization.schemes import mbq
from vlmcompress.utils.errors import UserError


class BlockSearch(AWQModifier):
    """MBQ's search by the error of a block's output. Tokens need their modality as `loss_mask`.

    Attributes:
        rho: first linear layer of a group -> weight of visual tokens in the search for the scale of the group's input.
    """

    duo_scaling: bool | Literal["both"] = False
    rho: dict[str, float]

    _found: dict[str, Tensor] = PrivateAttr(default_factory=dict)  # op -> the scale that its output is divided by
    _losses: dict[str, list[float]] = PrivateAttr(default_factory=dict)  # op -> loss of each candidate

    def on_sequential_epoch_end(self, state: Any, event: Any, modules: Any = (), **kwargs: Any) -> None:
        # `IntermediatesCache.pin_memory` serves copies to an accelerator, and raises where there is none.
        original = IntermediatesCache.pin_memory
        if not torch.accelerator.is_available():
            IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
        try:
            super().on_sequential_epoch_end(state, event, **kwargs)
        finally:
            IntermediatesCache.pin_memory = original  # type: ignore[method-assign]

    def _compute_best_scale(self, mapping: Any, fp16_outputs: list[Tensor], orig_layer_weights: Any) -> Tensor:
        # The modifier's hooks have summed |X| [in] and counted tokens. Its own search, which this replaces, takes the mean
        # squared error of all tokens alike.
        total, count = self._smooth_activation_stats[mapping.smooth_name]
        device = mapping.balance_layers[0].weight.device
        scales = mbq.candidates((total / count).to(device), self.n_grid)
        rho = self.rho[mapping.balance_names[0]]
        losses = []
        for scale in scales:
            with contextlib.ExitStack() as stack:
                for layer in mapping.balance_layers:
                    # Set by `QuantizationModifier`; None: the layer stays in 16 bits.
                    args = getattr(layer, "quantization_scheme", None)
                    if args is not None and args.weights is not None:
                        scheme = compressed_tensors.scheme_of(args.model_dump(mode="json"))
                        stack.enter_context(replaced_forward(layer, _engine_forward(layer, scale, scheme)))
                # Runs the block's attention or MLP (`parent`) on the arguments that were recorded of it.
                outputs = self._run_samples(mapping.parent)
            try:
                losses.append(mbq.loss(*sums(fp16_outputs, outputs), rho))
            except ValueError as error:
                raise UserError(f"{mapping.parent_name}: {error}") from error
        if not math.isfinite(min(losses)):
            raise UserError(f"{mapping.parent_name}: its output holds NaN or Inf; check the checkpoint and the samples")
        least = losses.index(min(losses))
        self._losses[mapping.smooth_name] = losses
        # Logged by the modifier when it ends.
        self._error_metrics.append(
            {
                "layer_name": mapping.smooth_name,
                "parent_name": mapping.parent_name,
                "initial_error": losses[0],
                "best_error": losses[least],
                "reduction": losses[least] / losses[0] if losses[0] else 1.0,
            }
        )
        self._found[mapping.smooth_name] = scales[least].cpu()
        return scales[least].cpu()


def sums(references: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, int]]:
    """Sum errors over samples `[1, tokens, channels]`: modality -> sum of |D|, and number of elements."""
    # llm-compressor stores each sample's loss mask in its session; ours holds modalities instead of 0 and 1.
    masks = active_session().state.loss_masks
    assert masks is not None  # `run_oneshot` gives every sample its mask
    total, count = torch.zeros(len(MODALITIES), dtype=torch.float64), torch.zeros(len(MODALITIES), dtype=torch.int64)
    for mask, reference, output in zip(masks, references, outputs, strict=True):
        error = (reference - output).float().abs()
        token = error.sum(-1).double().cpu()  # [1, tokens]
        for i in range(len(MODALITIES)):
            chosen = mask.cpu().view_as(token) == i + 1
            total[i] += token[chosen].sum()
            count[i] += int(chosen.sum()) * error.shape[-1]
    return dict(zip(MODALITIES, total.tolist(), strict=True)), dict(zip(MODALITIES, count.tolist(), strict=True))


def _engine_forward(layer: nn.Linear, scale: Tensor, scheme: Scheme) -> Callable[[Tensor], Tensor]:
    """Make a layer's `forward` as the engine computes it: `X / scale`, rounded if the scheme rounds activations, times `Q(W
    scale)`."""
    dtype, act = layer.weight.dtype, scheme.activations
    weight = layer.weight.float() * scale
    weight = fake_quantize(weight, *find_params(weight, scheme.weights, scale_dtype=dtype), scheme.weights)
    if act is None:
        weight = weight.to(dtype)
        return lambda input: nn.functional.linear((input / scale).to(dtype), weight, layer.bias)

    def forward(input: Tensor) -> Tensor:
        x = round_activations((input / scale).to(dtype), act)
        return nn.functional.linear(x, weight, None if layer.bias is None else layer.bias.float()).to(dtype)

    return forward


@torch.no_grad()
def search_blocks(
    vlm: VLM,
    blocks: Sequence[Sequence[Group]],
    batches: list[dict[str, Tensor]],
    method: QuantMethod,
    sensitivities: Mapping[tuple[int, str], Sensitivity],
) -> dict[tuple[int, str], Tensor]:
    """Search smoothing scales, (block, group) -> scale `[in]`, by the output errors of the float model's blocks.

    Args:
        batches: from `encode`.
        method: scheme `mbq` with `objective: mae`.
        sensitivities: (block, group) -> sensitivity.
    """
    groups = [group for block in blocks for group in block]
    smoothed = [group for group in groups if group.smooth]
    options = method.options
    assert isinstance(options, mbq.Options)
    rho = {group.linears[0]: sensitivities[group.layer, group.name].rho for group in smoothed}
    search = BlockSearch(mappings=mappings_of(groups), n_grid=options.grid, rho=rho)
    targets = [(method.of(group).scheme, [_exactly(name) for name in group.linears]) for group in groups]
    config = compressed_tensors.quantization_config([(scheme, names) for scheme, names in targets if scheme], ignore=[])
    # The modifier folds scales into its model; only the scales are needed.
    copied = replace(vlm, model=copy.deepcopy(vlm.model))
    recipe = [search, QuantizationModifier(config_groups=config["config_groups"])]
    run_oneshot(copied, batches, recipe, models.layer_class(vlm.model, vlm.spec))
    return {
        (group.layer, group.name): search._found[group.smooth] for group in smoothed if group.smooth in search._found
    }


def mappings_of(groups: Sequence[Group]) -> list[AWQMapping]:
    """The mappings of llm-compressor for the groups that can be smoothed."""
    pairs = [(group.smooth, (*group.linears, *group.kept)) for group in groups if group.smooth]
    return [AWQMapping(_exactly(op), [_exactly(name) for name in linears]) for op, linears in pairs]


def _exactly(name: str) -> str:
    return f"re:^{re.escape(name)}$"


def alike(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Give every batch the same keys, because the pipeline traces the model once, with the first batch.

    The shortest sample with an image or video is appended to samples without one, as ignored tokens: attention is causal, so
    they do not affect the text before them, and statistics exclude them.
    """
    donors = [batch for batch in batches if PIXELS & batch.keys()]
    if len({frozenset(donor) for donor in donors}) > 1:
        raise UserError(
            "this search needs the same inputs in all samples, but some have images and some videos; use only one of the two"
        )
    if len(donors) in (0, len(batches)):
        return batches
    donor = min(donors, key=lambda batch: batch["input_ids"].shape[1])
    length = donor["input_ids"].shape[1]

    def extend(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        tail = {**donor, "modality": torch.zeros_like(donor["modality"])}
        appended = {
            key: torch.cat([value, tail[key]], 1) for key, value in batch.items() if tail[key].shape == (1, length)
        }
        return tail | appended

    return [batch if PIXELS & batch.keys() else extend(batch) for batch in batches]


def loader(batches: list[dict[str, Tensor]]) -> DataLoader:
    """A data loader in llm-compressor's form for samples from `encode`: all with the same keys, modalities as `loss_mask`."""
    items = [{**{k: v for k, v in b.items() if k != "modality"}, "loss_mask": b["modality"]} for b in alike(batches)]
    return DataLoader(items, batch_size=1, collate_fn=lambda rows: rows[0])  # type: ignore[arg-type]


def run_oneshot(vlm: VLM, batches: list[dict[str, Tensor]], recipe: list[Modifier], layer_class: str) -> None:
    """Run the calibration set through llm-compressor's sequential pipeline.

    Args:
        batches: from `encode`: the processor's tensors plus `modality [1, tokens]`; one sample each.
        recipe: the modifiers to run.
        layer_class: class name of a decoder block.
    """
    oneshot(
        model=vlm.model,
        processor=vlm.processor,
        recipe=recipe,
        dataset=loader(batches),
        num_calibration_samples=len(batches),
        sequential_targets=[layer_class],
        use_loss_mask=True,
        pipeline="sequential",
    )
