"""Train a draft head (EAGLE-3, `runs.eagle3`) for one checkpoint: quantized, behind the reducer that it carries, or plain.

The target answers the samples' questions itself, greedily, as that is what a draft has to guess; answers of the data are not
used. Then its hidden states and its distributions over these answers teach the draft, sample by sample. Nothing of the target
changes. Held-out samples, which show other images, judge the draft; the state with the lowest divergence there is written, in
the layout of the `speculators` library, which vLLM loads.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import embedding

from vlmcompress import models
from vlmcompress.calibration import behind_reducer, distillation
from vlmcompress.calibration.devices import accelerator
from vlmcompress.checkpoint import draft_folder, reducer_block
from vlmcompress.common import distributed, folders, hub, identity
from vlmcompress.common.progress import Progress, phase, phase_seconds, silent, timed_phases
from vlmcompress.data import Sample, data_hash
from vlmcompress.data.encode import Encoded, Inputs
from vlmcompress.errors import UserError
from vlmcompress.hf_hooks import attach_carried, scorer_file
from vlmcompress.models import VLM
from vlmcompress.planning.calibration_data import data_source
from vlmcompress.recipe import Recipe
from vlmcompress.runs import eagle3, teacher_cache
from vlmcompress.runs.eagle3 import DraftShape, Lesson
from vlmcompress.runs.recovery_files import RecoveryFiles, model_facts, run_settings
from vlmcompress.runs.train_loop import Settings, TrainLog, check_flags, train


@dataclass(frozen=True)
class DraftTraining:
    """How a draft is trained: the flags of the verb. UserError for a value that is not right.

    Attributes:
        steps, batch, lr, every: of the loop (`train_loop.Settings`).
        answer_tokens: most tokens of an answer that the target writes.
        vocabulary: most tokens that the draft can guess.
    """

    steps: int = 1000
    batch: int = 8
    lr: float = 1e-3
    every: int = 50
    answer_tokens: int = 128
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        check_flags(self, "steps", "batch", "every", "answer_tokens", "vocabulary")

    @property
    def samples(self) -> int:
        """As many samples as are seen once each, with those that are held out."""
        return teacher_cache.samples_for(self.steps * self.batch)


def draft(
    recipe: Recipe,
    training: DraftTraining,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a draft for the checkpoint `recipe.model` and write it to the folder `recipe.out`; return the facts beside it.

    Args:
        recipe: resolved recipe of scheme `none`; its model, data and seed are used.
        training: how it is trained.
        resume: go on after an interrupted run with the same settings.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    Raises:
        UserError: bad input, a target that vLLM can't speculate on, or training that came to nothing; nothing was written.
    """
    out = recipe.out
    assert out is not None, "a draft has a folder"
    draft_folder.check_target(models.read_config(recipe.model))
    with timed_phases(), folders.claimed_folder(recipe.model, out, overwrite=overwrite, mark=draft_folder.FACTS):
        source = data_source(recipe, recipe.model, "draft")
        assert source is not None
        with phase("loading"):
            samples = [replace(sample, answer=None) for sample in teacher_cache.read(source, recipe)]
            settings = run_settings(recipe, training, _particulars(recipe, samples))
        with distributed.process_group():
            with phase("loading"), distributed.shared_errors():
                files = RecoveryFiles(out, settings, resume)
                target = _target(recipe)
            with phase("answers"), _reduced(target, recipe.model):
                most = training.answer_tokens
                data = teacher_cache.answered(target, samples, source, files, progress, most)
            with phase("training"), torch.inference_mode(False):
                run = _Training(target, data, recipe, training, files)
                log, best = run.train(progress)
        facts = _facts(recipe, training, data, log, run, best)
        if distributed.is_main():
            with folders.new_folder(out) as folder:
                _write(folder, run, best, facts)
            files.remove()
        return facts | {"timing": phase_seconds()}


def _particulars(recipe: Recipe, samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "calibrate.max_length": recipe.calibrate.max_length,
        "samples with the hash": data_hash(samples),
        "a model with the files": model_facts(recipe.model),
    }


def _target(recipe: Recipe) -> VLM:
    """The target, on the accelerator if there is one; a quantized one computes with its dequantized weights."""
    path, config = recipe.model, models.read_config(recipe.model)
    if not config.get("quantization_config"):
        target = models.load(path, trust_remote_code=recipe.trust_remote_code)
    else:
        with models.quiet():
            model, loaded = models.open_model(path, dtype="auto", trust_remote_code=recipe.trust_remote_code)
        if lacking := sorted(map(str, {*loaded["missing_keys"], *loaded["mismatched_keys"]})):
            raise UserError(f"{path} lacks {len(lacking)} tensors that the model needs, such as {lacking[0]}")
        target = VLM(model.eval(), models.load_processor(path), models.spec_for(config), path)
    if device := accelerator():
        target.model.to(device)  # type: ignore[arg-type]
    target.model.requires_grad_(False)
    return target


def _reduced(target: VLM, path: Path) -> contextlib.AbstractContextManager[Any]:
    """The target behind the reducer that its checkpoint carries, if any."""
    return attach_carried(target.model, target.processor, path) or contextlib.nullcontext()


class _Taps:
    """Hooks that note the hidden states at a target's taps and the positions of its tokens, for one sample at a time."""

    def __init__(self, target: VLM, taps: Sequence[int]):
        layers = models.decoder_layers(target.model, target.spec)
        blocks: list[nn.Module] = [target.model.get_submodule(name) for name in layers]
        text = target.model.get_submodule(target.spec.layers.rpartition(".")[0])
        self.taps, self.hidden, self.positions = taps, dict[int, Tensor](), None
        for tap in taps:
            if tap < len(blocks):
                blocks[tap].register_forward_pre_hook(functools.partial(self._before, tap), with_kwargs=True)
            else:
                blocks[-1].register_forward_hook(functools.partial(self._behind, tap))
        text.register_forward_pre_hook(self._entered, with_kwargs=True)

    def _entered(self, _module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
        self.positions = kwargs.get("position_ids")

    def _before(self, tap: int, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self.hidden[tap] = args[0] if args else kwargs["hidden_states"]

    def _behind(self, tap: int, _module: nn.Module, _args: tuple, output: Any) -> None:
        self.hidden[tap] = output[0] if isinstance(output, tuple) else output

    def joined(self) -> Tensor:
        """`[tokens, taps * hidden]`, float32."""
        return torch.cat([self.hidden[tap][0] for tap in self.taps], -1).float()

    def places(self, length: int) -> Tensor:
        """`[tokens]` positions; of M-RoPE (axes, or text positions and axes, first) the temporal axis, as vLLM passes on."""
        if self.positions is None:
            return torch.arange(length)
        positions = self.positions
        while positions.ndim > 2:
            positions = positions[1 if len(positions) == 4 else 0]
        return positions[0]


class _Training:
    """A run: the target with its taps, and the draft's tensors."""

    def __init__(
        self, target: VLM, data: teacher_cache.Data, recipe: Recipe, training: DraftTraining, files: RecoveryFiles
    ):
        self.target, self.training, self.files, self.seed = target, training, files, recipe.seed
        config = target.model.config.get_text_config()
        head, embeddings = target.model.get_output_embeddings(), target.model.get_input_embeddings()
        self.head: Tensor = head.weight
        self.table: Tensor = embeddings.weight  # type: ignore[assignment]
        self.batches = Encoded(data.samples, target, max_length=recipe.calibrate.max_length)
        self.first = len(self.batches) - data.held_out
        self.vocabulary = self._vocabulary(training.vocabulary)
        heads = config.num_attention_heads
        self.shape = DraftShape(
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
        self.taps = _Taps(target, self.shape.taps)
        carried = reducer_block.read(models.read_config(recipe.model))
        self.reducer = scorer_file.known(target.model.config, carried.reducer, recipe.model) if carried else None
        self.model = behind_reducer.decoder(target).model if self.reducer else target.model
        self.indices = torch.full((len(self.head),), -1, device=self.head.device)
        self.indices[self.vocabulary] = torch.arange(len(self.vocabulary), device=self.head.device)

    def _vocabulary(self, most: int) -> Tensor:
        """`[n]` ids, ascending, of the tokens that answers hold most often; then those of the lowest ids."""
        counts = torch.zeros(len(self.head), dtype=torch.long)
        for index in range(self.first):
            batch = self.batches[index]
            cut, count = distillation.answer_tokens(batch)
            counts += batch["input_ids"][0, cut : cut + count].bincount(minlength=len(counts))
        chosen = counts.argsort(descending=True, stable=True)[:most]
        return chosen.sort().values.to(self.head.device)

    def train(self, progress: Progress) -> tuple[TrainLog, dict[str, Tensor]]:
        """Train; return how it went, and the best values. Raises UserError where nothing is better than the first ones."""
        norm: Any = self.target.model.get_submodule(self.target.spec.layers.rpartition(".")[0]).norm
        weight = norm.weight.float() + self.target.spec.norm_offset
        tensors = eagle3.create(self.shape, self.seed, weight.cpu(), self.head[self.vocabulary].cpu())
        device = self.head.device
        tensors = {name: tensor.to(device).requires_grad_() for name, tensor in tensors.items()}

        def backward(index: int, factor: float) -> float:
            with torch.enable_grad():
                value = self._loss(tensors, index)
                if value is None:
                    return 0.0
                (value * factor).backward()
            return float(value.detach())

        def held_out() -> float:
            with torch.no_grad():
                values = [self._loss(tensors, index) for index in distributed.shard(self._held_out())]
            sums = [float(value) for value in values if value is not None]
            total = distributed.all_sum(torch.tensor([sum(sums), len(sums)], dtype=torch.float64))
            return float(total[0] / total[1].clamp_min(1))

        options = self.training
        settings = Settings(options.steps, options.batch, options.lr, options.every, self.seed)
        callbacks: dict[str, Any] = {"backward": backward, "held_out": held_out, "changed": lambda step: None}
        log, best = train(
            tensors, self.first, settings, **callbacks, store=self.files, progress=progress, label="training the draft"
        )
        if not best:
            raise UserError(
                f"the draft learnt nothing: {log.ended or 'no measurement was better than before training'}; "
                "give more data with longer answers, or a lower --lr"
            )
        return log, best

    def _held_out(self) -> range:
        return range(self.first, len(self.batches))

    def _loss(self, tensors: Mapping[str, Tensor], index: int) -> Tensor | None:
        """The divergence of a sample's guesses; None where its answer is too short to guess in."""
        lesson = self.lesson(index)
        return None if lesson is None else eagle3.loss(eagle3.guesses(tensors, self.shape, lesson), lesson)

    def acceptance(self, tensors: Mapping[str, Tensor]) -> list[float]:
        """For each step the share of the held-out rows of guesses that are right up to there."""
        sums = torch.zeros(1 + eagle3.STEPS, dtype=torch.float64)
        with torch.no_grad():
            for index in distributed.shard(self._held_out()):
                lesson = self.lesson(index)
                if lesson is not None:
                    sums += eagle3.accepted(eagle3.guesses(tensors, self.shape, lesson), lesson).cpu()
        rows, *right = distributed.all_sum(sums).tolist()
        return [count / max(rows, 1) for count in right]

    @torch.no_grad()
    def lesson(self, index: int) -> Lesson | None:
        """What a sample teaches; None where its answer has one token, which the target says itself."""
        batch = self.batches[index]
        if self.reducer:
            batch = behind_reducer.reduced(self.target, [batch], self.reducer)[0]
        cut, count = distillation.answer_tokens(batch)
        if count < 2:
            return None
        inputs: Inputs = distillation.placed(self.target, batch)
        columns = torch.arange(cut, cut - 1 + count, device=self.head.device)
        logits = self.model(**inputs, use_cache=False, logits_to_keep=columns).logits[0].float()
        ids = inputs["input_ids"][0]
        return Lesson(
            embeds=embedding(ids, self.table).float(),
            taps=self.taps.joined(),
            positions=self.taps.places(len(ids)).to(ids.device),
            logits=logits[:, self.vocabulary],
            first=cut,
            spoken=self.indices[logits.argmax(-1)],
        )


def _facts(
    recipe: Recipe,
    training: DraftTraining,
    data: teacher_cache.Data,
    log: TrainLog,
    run: _Training,
    best: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The content of the file beside the draft."""
    device = run.head.device
    shares = run.acceptance({name: tensor.to(device) for name, tensor in best.items()})
    return {
        "method": "eagle3",
        "target": identity.source_identity(recipe.model) | {"content_sha256": identity.model_hash(recipe.model)},
        "reduce": run.reducer.plain() if run.reducer else None,
        "taps": list(run.shape.taps),
        "vocabulary": run.shape.vocabulary,
        "parameters": sum(tensor.numel() for tensor in best.values()),
        "training": asdict(training) | {"seed": recipe.seed},
        "samples": {
            "source": str(data.source),
            "trained_on": len(data.samples) - data.held_out,
            "held_out": data.held_out,
        },
        "held_out_kl": {"before": log.first, "after": log.best},
        "acceptance": {"by_position": shares, "length": 1 + sum(shares)},
        "steps": log.step,
        "best_step": log.best_step,
        "ended": log.ended,
    }


def _config(run: _Training) -> dict[str, Any]:
    """The config.json of the draft, in the form of the `speculators` library."""
    shape, target, dtype = run.shape, run.target.model.config, str(run.target.model.dtype).removeprefix("torch.")
    layer = {
        "model_type": "llama",
        "vocab_size": len(run.head),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": target.get_text_config().max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(shape.taps),  # vLLM takes three for granted where this is missing
        "dtype": dtype,
    }
    return {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": eagle3.STEPS}],
            "verifier": {"name_or_path": hub.shown(run.target.path), "architectures": list(target.architectures or [])},
        },
        "draft_vocab_size": shape.vocabulary,
        "target_hidden_size": shape.hidden,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "transformer_layer_config": layer,
        "dtype": dtype,
    }


def _write(folder: Path, run: _Training, best: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the draft's files into an empty folder."""
    dtype = run.target.model.dtype
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in best.items()}
    total = len(run.head)
    if run.shape.vocabulary < total:
        ids = run.vocabulary.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(total, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    draft_folder.write(folder, _config(run), facts)
