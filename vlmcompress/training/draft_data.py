"""Training data of a draft head: the target's hidden states and distributions over its own answers, a sample at a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from vlmcompress import models
from vlmcompress.export.draft_images import DraftImages, mean_feature
from vlmcompress.models import VLM
from vlmcompress.models.data.encode import VISION, Encoded, Inputs
from vlmcompress.models.devices import accelerator, float_products
from vlmcompress.recipe import Recipe
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file
from vlmcompress.reduction.hooks import calibration_inputs
from vlmcompress.training import distillation, eagle3, medusa, teacher_cache
from vlmcompress.training.eagle3 import DraftSample, DraftShape
from vlmcompress.training.medusa import MedusaShape
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
    """Hooks that record the hidden states at a target's taps, and the decoder's inputs, for one sample at a time."""

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
        self.positions, self.embeds = kwargs.get("position_ids"), kwargs["inputs_embeds"]

    def _before(self, tap: int, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.hidden[tap] = args[0] if args else kwargs["hidden_states"]

    def _record(self, tap: int, _module: nn.Module, _args: tuple, output: Any) -> None:
        self.hidden[tap] = output[0] if isinstance(output, tuple) else output

    def joined(self) -> Tensor:
        """Hidden states of all taps, `[tokens, taps * hidden]`, float32; width 0 without taps."""
        if not self.taps:
            return self.embeds.new_zeros(self.embeds.shape[1], 0).float()
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
    """Training data for a draft of kind `kind`: a `DraftSample` for each answer of the target.

    Args:
        kind: `eagle3` or `medusa`.
        images: what the draft sees of images.
        vocabulary: ids `[n]` of the tokens that it can predict, ascending; or their largest number, to choose them from
            answers.
    """

    def __init__(
        self,
        target: VLM,
        data: teacher_cache.TrainingData,
        recipe: Recipe,
        kind: str,
        images: DraftImages,
        vocabulary: Tensor | int,
    ):
        self.target, self.kind, self.images = target, kind, images
        head, embeddings = target.model.get_output_embeddings(), target.model.get_input_embeddings()
        self.head: Tensor = head.weight
        self.table: Tensor = embeddings.weight  # type: ignore[assignment]
        self.batches = Encoded(data.samples, target, max_length=recipe.calibrate.max_length)
        self.first = len(self.batches) - data.held_out
        ids = self._vocabulary(vocabulary) if isinstance(vocabulary, int) else vocabulary
        self.vocabulary = ids.to(self.head.device)
        self.shape = self._shape()
        self.taps = _Taps(target, self.shape.taps)
        head.register_forward_pre_hook(self._read)
        carried = reducer_block.read_reducer(models.read_config(recipe.model))
        self.reducer = scorer_file.load_scorer(target.model.config, carried.reducer, recipe.model) if carried else None
        self.model = calibration_inputs.decoder(target).model if self.reducer else target.model
        self.indices = torch.full((len(self.head),), -1, device=self.head.device)
        self.indices[self.vocabulary] = torch.arange(len(self.vocabulary), device=self.head.device)

    def _shape(self) -> DraftShape | MedusaShape:
        config = self.target.model.config.get_text_config()
        if self.kind == "medusa":
            return MedusaShape(config.hidden_size, len(self.vocabulary))
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
            vector=self.images.vector,
        )

    def _read(self, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.last = args[0][0]

    def create(self, seed: int) -> dict[str, Tensor]:
        """Initial values of the draft's tensors, float32, on the target's device."""
        rows = self.head[self.vocabulary].cpu()
        if isinstance(self.shape, MedusaShape):
            tensors = medusa.create(self.shape, rows)
        else:
            norm: Any = self.target.model.get_submodule(self.target.spec.layers.rpartition(".")[0]).norm
            weight = norm.weight.float() + self.target.spec.norm_offset
            tensors = eagle3.create(self.shape, seed, weight.cpu(), rows)
        return {name: tensor.to(self.head.device) for name, tensor in tensors.items()}

    def guesses(self, tensors: Mapping[str, Tensor], sample: DraftSample) -> list[Tensor]:
        """The draft's logits at the answer positions, for each of its guesses (`eagle3.guesses`)."""
        if isinstance(self.shape, MedusaShape):
            return medusa.guesses(tensors, sample)
        return eagle3.guesses(tensors, self.shape, sample)

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
            device = self.head.device
            columns = torch.arange(cut - eagle3.STEPS, cut - 1 + count, device=device)
            # One pass gives everything: hooks record the taps and, through `logits_to_keep`, the head's inputs from STEPS rows
            # before.
            logits = self.model(**inputs, use_cache=False, logits_to_keep=columns).logits[0, eagle3.STEPS :].float()
            context = self._context(inputs["input_ids"][0], batch["modality"][0])
            return DraftSample(
                **context,
                begin=len(context["embeds"]) - (len(batch["modality"][0]) - cut),
                logits=logits[:, self.vocabulary],
                spoken=self.indices[logits.argmax(-1)],
                last=self.last.float(),
            )

    def _context(self, ids: Tensor, modality: Tensor) -> dict[str, Any]:
        """The rows of the draft's context for the sample that the target has just run (see `DraftSample`)."""
        embeds = embedding(ids, self.table).float()[1:].clone()
        taps, positions = self.taps.joined()[:-1], self.taps.places(len(ids)).to(ids.device)[:-1].clone()
        images = runs(modality == VISION)
        if self.reducer and self.target.spec.images.positions == "1d":
            for start, end in images:  # vLLM gives a draft an image's start, but no positions within it
                positions[start:end] = positions[start - 1] + 1
        if self.images.plain:
            return {"embeds": embeds, "taps": taps, "positions": positions}
        features = [self.taps.embeds[0, start:end].float() for start, end in images]
        if self.images.rows == "all":
            for (start, end), rows in zip(images, features, strict=True):
                embeds[start:end] = rows
        context = {"embeds": embeds, "taps": taps, "positions": positions}
        if self.images.vector:
            zero = embeds.new_zeros(embeds.shape[1])
            context["image"] = mean_feature(torch.cat(features)) if features else zero
        return context


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """Start and end of each run of True in `mask [n]`."""
    edges = torch.cat([mask.new_zeros(1), mask, mask.new_zeros(1)]).int().diff()
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True))
