"""Training data of a draft head: the target's hidden states and distributions over its own answers, a sample at a time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from vlmcompress import models
from vlmcompress.models import VLM
from vlmcompress.models.data.encode import VISION, Encoded, Inputs
from vlmcompress.models.devices import accelerator, float_products
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import calibration_inputs
from vlmcompress.training import distillation, eagle3, teacher_cache
from vlmcompress.training.eagle3 import DraftSample, DraftShape
from vlmcompress.utils.errors import UserError


def load_target(recipe: Recipe) -> VLM:
    """The target, on the accelerator if there is one; a quantized one computes with its dequantized weights."""
    path: Path = recipe.model
    config = models.read_config(path)
    if not config.get("quantization_config"):
        target = models.load(path, trust_remote_code=recipe.trust_remote_code)
    else:
        with models.quiet_transformers():
            model, loaded = models.open_model(path, dtype="auto", trust_remote_code=recipe.trust_remote_code)
        if lacking := sorted(map(str, {*loaded["missing_keys"], *loaded["mismatched_keys"]})):
            raise UserError(f"{path} lacks {len(lacking)} tensors that the model needs, such as {lacking[0]}")
        target = VLM(model.eval(), models.load_processor(path), models.spec_for(config), path)
    if device := accelerator():
        target.model.to(device)  # type: ignore[arg-type]
    target.model.requires_grad_(False)
    return target


class _Taps:
    """Hooks that record the hidden states at a target's taps, and the decoder's positions, for one sample at a time."""

    def __init__(self, target: VLM, taps: Sequence[int]):
        layers = models.decoder_layers(target.model, target.spec)
        blocks: list[nn.Module] = [target.model.get_submodule(name) for name in layers]
        text = target.model.get_submodule(target.spec.layers.rpartition(".")[0])
        self.taps, self.hidden, self.positions = taps, dict[int, Tensor](), None
        for tap in taps:
            if tap < len(blocks):
                blocks[tap].register_forward_pre_hook(functools.partial(self._before, tap), with_kwargs=True)
            else:
                blocks[-1].register_forward_hook(functools.partial(self._record, tap))
        text.register_forward_pre_hook(self._entered, with_kwargs=True)

    def _entered(self, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        self.positions = kwargs.get("position_ids")

    def _before(self, tap: int, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.hidden[tap] = args[0] if args else kwargs["hidden_states"]

    def _record(self, tap: int, _module: nn.Module, _args: tuple, output: Any) -> None:
        self.hidden[tap] = output[0] if isinstance(output, tuple) else output

    def joined(self) -> Tensor:
        """Hidden states of all taps, `[tokens, taps * hidden]`, float32."""
        return torch.cat([self.hidden[tap][0] for tap in self.taps], -1).float()

    def places(self, length: int) -> Tensor:
        """Positions `[tokens]`; for M-RoPE the temporal axis, which is what vLLM passes to a draft."""
        if self.positions is None:
            return torch.arange(length)
        positions = self.positions
        # transformers 5.17 passes [3, batch, n] to Qwen's decoder, or [4, batch, n] with the text's positions first; vLLM
        # 0.32's `v1/spec_decode` gives a draft one row.
        while positions.ndim > 2:
            positions = positions[1 if len(positions) == 4 else 0]
        return positions[0]


class DraftData:
    """Training data for a draft: a `DraftSample` for each answer of the target.

    Attributes:
        vocabulary: ids `[n]` of the tokens that the draft can predict, ascending: the `most` frequent ones in answers.
        shape: the draft's sizes.
    """

    def __init__(self, target: VLM, data: teacher_cache.TrainingData, recipe: Recipe, most: int):
        self.target = target
        head, embeddings = target.model.get_output_embeddings(), target.model.get_input_embeddings()
        self.head: Tensor = head.weight
        self.table: Tensor = embeddings.weight  # type: ignore[assignment]
        self.batches = Encoded(data.samples, target, max_length=recipe.calibrate.max_length)
        self.first = len(self.batches) - data.held_out
        self.vocabulary = self._vocabulary(most).to(self.head.device)
        self.shape = self._shape()
        self.taps = _Taps(target, self.shape.taps)
        carried = reducer_block.read_reducer(models.read_config(recipe.model))
        self.reducer = scorer_file.load_scorer(target.model.config, carried.reducer, recipe.model) if carried else None
        self.model = calibration_inputs.decoder(target).model if self.reducer else target.model
        self.indices = torch.full((len(self.head),), -1, device=self.head.device)
        self.indices[self.vocabulary] = torch.arange(len(self.vocabulary), device=self.head.device)

    def _shape(self) -> DraftShape:
        config = self.target.model.config.get_text_config()
        heads = config.num_attention_heads
        return DraftShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            taps=eagle3.default_taps(config.num_hidden_layers),
            vocabulary=len(self.vocabulary),
            eps=config.rms_norm_eps,
            theta=float(config.rope_parameters["rope_theta"]),
        )

    def create(self, seed: int) -> dict[str, Tensor]:
        """Initial values of the draft's tensors, float32, on the target's device, for training."""
        norm: Any = self.target.model.get_submodule(self.target.spec.layers.rpartition(".")[0]).norm
        weight = norm.weight.float() + self.target.spec.norm_offset
        tensors = eagle3.create(self.shape, seed, weight.cpu(), self.head[self.vocabulary].cpu())
        return {name: tensor.to(self.head.device).requires_grad_() for name, tensor in tensors.items()}

    def _vocabulary(self, most: int) -> Tensor:
        """Ids `[n]`, ascending, of the most frequent tokens in answers, filled up with the lowest ids."""
        counts = torch.zeros(len(self.head), dtype=torch.long)
        for index in range(self.first):
            batch = self.batches[index]
            cut, count = distillation.answer_tokens(batch)
            counts += batch["input_ids"][0, cut : cut + count].bincount(minlength=len(counts))
        chosen = counts.argsort(descending=True, stable=True)[:most]
        return chosen.sort().values

    @property
    def held_out(self) -> range:
        """The numbers of held-out samples."""
        return range(self.first, len(self.batches))

    @torch.no_grad()
    def sample(self, index: int) -> DraftSample | None:
        """A sample as the draft learns from it; None if its answer has only one token, which the target itself computes."""
        with float_products(self.target.model):
            batch = self.batches[index]
            if self.reducer:
                batch = calibration_inputs.reduced(self.target, [batch], self.reducer)[0]
            cut, count = distillation.answer_tokens(batch)
            if count < 2:
                return None
            inputs: Inputs = distillation.on_model_device(self.target, batch)
            columns = torch.arange(cut, cut - 1 + count, device=self.head.device)
            logits = self.model(**inputs, use_cache=False, logits_to_keep=columns).logits[0].float()
            ids = inputs["input_ids"][0]
            positions = self.taps.places(len(ids)).to(ids.device)
            # With plain RoPE and a reducer vLLM gives a draft an image's start, but no positions within it.
            if self.reducer and self.target.spec.images.positions == "1d":
                visual = batch["modality"][0].to(ids.device) == VISION
                start = positions.masked_fill(visual, -1).cummax(0).values + 1
                positions = torch.where(visual, start, positions)
            return DraftSample(
                embeds=embedding(ids[1:], self.table).float(),
                taps=self.taps.joined()[:-1],
                positions=positions[:-1],
                begin=cut - 1,
                logits=logits[:, self.vocabulary],
                spoken=self.indices[logits.argmax(-1)],
            )
