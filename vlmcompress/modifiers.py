"""vlmcompress's own methods as modifiers for llm-compressor's recipes.

    import vlmcompress.modifiers as ours                    # also makes the names known to YAML recipes

    oneshot(
        model,
        processor=processor,
        recipe=[ours.MBQModifier(), QuantizationModifier(targets="Linear", scheme="W4A16_ASYM", ignore=[...])],
        dataset=ours.dataloader(model, processor, "calib.jsonl", samples=128),
        num_calibration_samples=128,
        use_loss_mask=True,
    )

Both modifiers need to know what each token is: every sample, one a batch, has a `loss_mask [1, tokens]` with 0 for
ignored tokens, 1 for text, 2 for vision and 3 for a token that predicts one of the answer's. `dataloader` makes such
samples. Weights that depend on gradients are measured when the recipe is initialized, by one backward pass per sample
(`calibration.gradient_pass`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from llmcompressor.core import active_session
from llmcompressor.modifiers.factory import ModifierFactory
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from pydantic import PrivateAttr, field_validator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vlmcompress import models
from vlmcompress.calibration.block_search import BlockSearch, loader, mappings_of
from vlmcompress.calibration.gradient_pass import gradients
from vlmcompress.data import encode, load_samples
from vlmcompress.errors import UserError
from vlmcompress.models import VLM, decoder_blocks
from vlmcompress.statistics.balance import BY_GRADIENT, MODALITIES, Sensitivity, check_balance, shares
from vlmcompress.statistics.gradients import sensitivities

_MASK = "samples need a `loss_mask` of modalities and oneshot use_loss_mask=True; see vlmcompress.modifiers.dataloader"


class MBQModifier(BlockSearch):
    """MBQ (arXiv 2412.19509) as published: smooths the decoder for the modifier after it, which quantizes to nearest.

    Attributes:
        objective: "mae" or "mse", see `quantizers.mbq`.
        rho: weight of visual tokens: a number; linear layer or `re:` pattern -> number; None: MBQ's ratio of gradients.
        mappings: layers to smooth; None: those that the model's family allows in the decoder, none in the vision tower.
        n_grid: number of candidates that are tried for each scale.
    """

    stock: bool = True

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        vlm = _vlm(state.model)
        groups = [group for block in decoder_blocks(vlm.model, vlm.spec) for group in block]
        if self.mappings is None:
            self.mappings = mappings_of(groups)
        if self.rho is None:
            sensitivities = _sensitivities(vlm, state)
            balances = {
                (name, sensitivities[group.layer, group.name].rho) for group in groups for name in group.linears
            }
            self.rho = {name: rho for name, rho in sorted(balances) if rho is not None}
        return super().on_initialize(state, **kwargs)


class BalancedGPTQModifier(GPTQModifier):
    """GPTQ with the tokens' shares in the Hessian set by a balance: `H = sum_m w_m X_m^T X_m`.

    Attributes:
        balance: "off", "ratio", "auto", "mbq" or {text, vision, answer} weights, see `vlmcompress.statistics.balance`.
    """

    balance: Any = "auto"

    _sensitivity: dict[str, Sensitivity] = PrivateAttr(default_factory=dict)  # linear layer -> its sensitivity
    _weights: dict[nn.Module, Tensor] = PrivateAttr(default_factory=dict)  # module -> weights of the mask values 0 to 3
    _count: dict[str, int] = PrivateAttr(default_factory=dict)

    @field_validator("balance")
    @classmethod
    def _known(cls, balance: Any) -> Any:
        return check_balance(balance)

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:
        if any(isinstance(other, AWQModifier) for other in active_session().lifecycle.recipe.modifiers):
            raise UserError("GPTQ would see inputs from before they are smoothed; run oneshot twice, smoothing first")
        if self.balance in BY_GRADIENT:
            vlm = _vlm(state.model)
            sensitivities = _sensitivities(vlm, state)
            groups = [group for block in decoder_blocks(vlm.model, vlm.spec) for group in block]
            self._sensitivity = {
                name: sensitivities[group.layer, group.name] for group in groups for name in group.linears
            }
        return super().on_initialize(state, **kwargs)

    def calibrate_module(self, module: nn.Module, args: tuple[Tensor, ...], _output: Any) -> None:
        """Add a sample to the Hessian, its rows scaled by the square root of their modality's weight."""
        state, x = active_session().state, args[0]
        if not state.loss_masks:
            raise UserError(_MASK)
        mask = state.loss_masks[state.current_batch_idx]
        if mask.shape == x.shape[:-1]:  # not so in vision towers and for tokens sent to experts
            weights = self._weights_of(module)[mask.long().cpu()].to(x.device)
            args = (x.float() * weights.sqrt()[..., None], *args[1:])
        super().calibrate_module(module, args, _output)

    def on_finalize(self, state: Any, **kwargs: Any) -> bool:
        self._weights.clear()
        self._count.clear()
        return super().on_finalize(state, **kwargs)

    def _weights_of(self, module: nn.Module) -> Tensor:
        if not self._count:
            codes = torch.cat([mask.flatten().cpu() for mask in active_session().state.loss_masks or ()]).tolist()
            self._count = {name: codes.count(code) for code, name in enumerate(MODALITIES, start=1)}
        if module not in self._weights:
            try:
                modality_weights = shares(self.balance, self._count, self._sensitivity.get(self._module_names[module]))
            except ValueError as error:
                raise UserError(f"{self._module_names[module]}: {error}") from error
            total = sum(self._count.values())
            weights = {m: 1.0 for m in MODALITIES}
            if modality_weights is not None:
                weights = {m: share * total / self._count[m] for m, share in modality_weights.items()}
            self._weights[module] = torch.tensor([0.0, *(weights.get(m, 0.0) for m in MODALITIES)])
        return self._weights[module]


def dataloader(
    model: Any, processor: Any, data: str | Path, *, samples: int = 128, seed: int = 0, max_length: int | None = None
) -> DataLoader:
    """Make calibration samples for `oneshot`, with the modality of each token as `loss_mask`.

    Args:
        data: folder of images, .jsonl, .parquet or data set folder.
        samples: how many of them; fewer if there are fewer, so pass `num_calibration_samples=len(...)` of the result.
        max_length: refuse samples of more tokens; None: the model's context.
    """
    chosen = load_samples(str(data), samples=samples, seed=seed)
    return loader(encode(chosen, _vlm(model, processor), max_length=max_length))


def _vlm(model: Any, processor: Any = None) -> VLM:
    spec = models.spec_for(model.config.to_dict())
    return VLM(model, processor, spec, Path(model.config.name_or_path or "."))


def _sensitivities(vlm: VLM, state: Any) -> dict[tuple[int, str], Sensitivity]:
    """Run the backward pass over the samples that `oneshot` was given, for balances that weigh by gradients."""
    batches = []
    for batch in state.data.calib or ():
        if "loss_mask" not in batch or len(batch["loss_mask"]) != 1:
            raise UserError(f"gradients are measured sample by sample: one a batch, and {_MASK}")
        batches.append({key: value for key, value in batch.items() if key != "loss_mask"})
        batches[-1]["modality"] = batch["loss_mask"]
    names = [{group.name: group.linears for group in groups} for groups in decoder_blocks(vlm.model, vlm.spec)]
    return sensitivities(gradients(vlm, batches), names)


for _modifier in (MBQModifier, BalancedGPTQModifier):
    ModifierFactory.register(_modifier.__name__, _modifier)
