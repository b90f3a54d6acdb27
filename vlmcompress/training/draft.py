"""Train a draft head (`eagle3`) for one checkpoint: quantized, after the reducer that it carries, or plain.

The target answers the samples' questions itself, greedily, as a draft has to predict these answers; answers in the data are
not used. Then the draft learns from the target's hidden states and distributions over these answers, sample by sample. The
target does not change. The draft is evaluated on held-out samples with other images; the state with the lowest divergence
there is written, in the layout that vLLM loads.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmcompress import models
from vlmcompress.engines import Answer, Engine, EngineSettings, Request
from vlmcompress.export import draft_folder, launch_files, manifest
from vlmcompress.export.launch import vllm
from vlmcompress.models import VLM
from vlmcompress.models.data import Sample
from vlmcompress.quantization.plan.calibration_data import data_source
from vlmcompress.recipe import Recipe
from vlmcompress.reduction.hooks import attach_carried
from vlmcompress.training import distillation, eagle3, teacher_cache
from vlmcompress.training.draft_data import DraftData, load_target
from vlmcompress.training.train_loop import LoopSettings, TrainLog, mean_loss, require_flags, train
from vlmcompress.utils import distributed, folders, hub, identity, json_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.progress import Progress, phase, phase_seconds, silent, timed_phases
from vlmcompress.utils.work_folder import WorkFolder, locked_folder


@dataclass(frozen=True)
class DraftTraining:
    """How a draft is trained: the command's flags. Raises UserError for an invalid value.

    Attributes:
        steps, batch, lr, every: see `train_loop.LoopSettings`.
        answer_tokens: most tokens of an answer by the target.
        vocabulary: most distinct tokens that the draft can predict.
    """

    steps: int = 1000
    batch: int = 8
    lr: float = 1e-3
    every: int = 50
    answer_tokens: int = 128
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        require_flags(self, "steps", "batch", "every", "answer_tokens", "vocabulary")


def draft(
    recipe: Recipe,
    training: DraftTraining,
    *,
    engine: Engine | None = None,
    restart: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a draft for the checkpoint `recipe.model` and write it to the folder `recipe.out`; return the content of its facts
    file.

    Args:
        recipe: resolved recipe of scheme `none`; its model, data and seed are used.
        training: how it is trained.
        engine: answers the samples' questions; None: transformers, one by one.
        restart: discard the finished work of an interrupted run, which is reused otherwise.
        overwrite: replace an existing `out` that vlmcompress wrote.
        progress: called with (label, done, total).

    Raises:
        UserError: bad input, a target that vLLM cannot speculate on, or training without improvement; nothing is written then.
    """
    out = recipe.output
    draft_folder.require_draft_target(models.read_config(recipe.model))
    # Flags and config.json fit; from here on finished work is kept, and the same command continues it.
    claim = locked_folder(recipe.model, out, overwrite=overwrite, mark=draft_folder.FACTS, restart=restart)
    with timed_phases(), claim as work:
        source = data_source(recipe, recipe.model, "draft")
        assert source is not None
        with phase("loading"):
            samples = [
                replace(sample, answer=None) for sample in teacher_cache.read_samples(source, recipe, reduced=False)
            ]
            particulars = {"--engine": engine.name if engine else "hf"}
            settings = teacher_cache.training_settings("draft", recipe, training, samples, particulars)
        with distributed.process_group():
            work.begin(settings)
            target, data = _answered(recipe, samples, source, engine, work, training.answer_tokens, progress)
            with phase("training"), torch.inference_mode(False):
                draft_data = DraftData(target, data, recipe, training.vocabulary)
                _require_answers(draft_data, source)
                log, best = _train(draft_data, training, recipe.seed, work, progress)
                best = {name: tensor.to(target.model.dtype) for name, tensor in best.items()}  # the dtype on disk
        facts = _facts(recipe, training, data, log, draft_data, best)
        if distributed.is_main():
            with folders.new_folder(out) as folder:
                write_draft(folder, draft_data, best, facts)
            work.remove()
        return facts | {"timing": phase_seconds()}


def _answered(
    recipe: Recipe,
    samples: Sequence[Sample],
    source: str | Path,
    engine: Engine | None,
    work: WorkFolder,
    most: int,
    progress: Progress,
) -> tuple[VLM, teacher_cache.TrainingData]:
    """Load the target and have it answer the samples with at most `most` tokens; see `draft`."""
    if engine is not None:
        with phase("answers"), distributed.shared_errors():
            if distributed.is_main():
                write_answers(engine, recipe.model, samples, work, most, progress)
    with phase("loading"), distributed.shared_errors():
        target = load_target(recipe)
    # A draft guesses what the served checkpoint says, so the target answers with the reducer that it carries.
    with phase("answers"), attach_carried(target.model, target.processor, recipe.model) or contextlib.nullcontext():
        return target, teacher_cache.answered(target, samples, source, work, progress, most)


def _require_answers(draft_data: DraftData, source: str | Path) -> None:
    """Raise UserError if the training or the held-out samples have no answer of two tokens or more."""
    counts = [distillation.answer_tokens(batch)[1] for batch in draft_data.batches]
    for part in (counts[: draft_data.first], counts[draft_data.first :]):
        if max(part, default=0) < 2:
            raise UserError(
                f"{source}: the model answers these questions with one token each, which leaves a draft "
                "nothing to guess; give questions with longer answers"
            )


def _train(
    draft_data: DraftData, training: DraftTraining, seed: int, work: WorkFolder, progress: Progress
) -> tuple[TrainLog, dict[str, Tensor]]:
    """Train; return the log and the best values. Raises UserError if no measurement beats the initial values."""
    tensors = draft_data.create(seed)

    def loss(index: int) -> Tensor | None:
        sample = draft_data.sample(index)
        return None if sample is None else eagle3.loss(eagle3.guesses(tensors, draft_data.shape, sample), sample)

    log, best = train(
        tensors,
        draft_data.first,
        LoopSettings.of(training, seed, label="training the draft"),
        loss=loss,
        held_out=lambda: mean_loss(loss, draft_data.held_out),
        work=work,
        progress=progress,
    )
    if not best:
        raise UserError(
            f"the draft learned nothing: {log.ended or 'no measurement was better than before training'}; "
            "give more data with longer answers, or a lower --lr"
        )
    return log, best


def acceptance(draft_data: DraftData, tensors: Mapping[str, Tensor]) -> list[float]:
    """For each step, the share of held-out guesses that are correct up to and including that step."""
    sums = torch.zeros(1 + eagle3.STEPS, dtype=torch.float64)
    with torch.no_grad():
        for index in distributed.shard(draft_data.held_out):
            sample = draft_data.sample(index)
            if sample is not None:
                sums += eagle3.accepted(eagle3.guesses(tensors, draft_data.shape, sample), sample).cpu()
    rows, *right = distributed.all_sum(sums).tolist()
    return [count / max(rows, 1) for count in right]


def _facts(
    recipe: Recipe,
    training: DraftTraining,
    data: teacher_cache.TrainingData,
    log: TrainLog,
    draft_data: DraftData,
    best: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The content of the file next to the draft."""
    device = draft_data.head.device
    shares = acceptance(draft_data, {name: tensor.to(device).float() for name, tensor in best.items()})
    return {
        "method": "eagle3",
        "target": identity.source_identity(recipe.model) | {"content_sha256": manifest.checkpoint_hash(recipe.model)},
        "reduce": draft_data.reducer.plain() if draft_data.reducer else None,
        "taps": list(draft_data.shape.taps),
        "vocabulary": draft_data.shape.vocabulary,
        "parameters": sum(tensor.numel() for tensor in best.values()),
        "training": asdict(training) | {"seed": recipe.seed},
        "samples": {"source": Path(data.source).name, **data.counts},
        "held_out_kl": {"before": log.first, "after": log.best},
        "acceptance": {"by_position": shares, "length": 1 + sum(shares)},
        "steps": log.step,
        "best_step": log.best_step,
        "ended": log.ended,
    }


def write_answers(
    engine: Engine, model: Path, samples: Sequence[Sample], work: WorkFolder, most: int, progress: Progress
) -> None:
    """Have `engine` answer the samples without an answer in `work`, greedily, with at most `most` tokens.

    Raises UserError if the engine cannot start or refuses a question; answers so far are kept.
    """
    answers = teacher_cache.answers_in(work)
    lacking = [sample for sample in samples if sample.id not in answers]
    if not lacking:
        return

    def keep(answer: Answer) -> None:
        answers[answer.id] = answer.text.strip()
        if len(answers) % teacher_cache.PART == 0:
            teacher_cache.keep_answers(work, answers)

    try:
        with folders.temporary_folder("images") as folder:
            requests = [Request(sample.id, list(_messages(sample, folder)), most) for sample in lacking]
            options: dict[str, Any] = {"label": "writing answers", "progress": progress, "on_answer": keep}
            engine.answer(model, requests, media=folder, settings=EngineSettings(max_tokens=most), **options)
    finally:
        teacher_cache.keep_answers(work, answers)


def _messages(sample: Sample, folder: Path) -> Iterator[dict[str, Any]]:
    """The sample's turns in OpenAI's format, with its images and videos as files in `folder`."""
    images, videos = iter(sample.images), iter(sample.videos)
    for turn in sample.prompt():
        parts = []
        for part in turn["content"]:
            if part["type"] == "image":
                image = next(images)
                file = folder / f"{hashlib.sha256(image.tobytes() + repr(image.size).encode()).hexdigest()[:32]}.png"
                if not file.exists():
                    image.save(file)
                part = {"type": "image_url", "image_url": {"url": file.as_uri()}}
            elif part["type"] == "video":
                part = {"type": "video_url", "video_url": {"url": next(videos).save(folder).as_uri()}}
            parts.append(part)
        yield {"role": turn["role"], "content": parts}


def write_draft(folder: Path, draft_data: DraftData, best: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write the draft's files into an empty folder."""
    tensors = {name: tensor.contiguous() for name, tensor in best.items()}
    total, ids = len(draft_data.head), draft_data.vocabulary.cpu()
    # vLLM's tables from the draft's vocabulary to the target's: the first holds differences of ids.
    if len(ids) < total:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(total, dtype=torch.bool).index_fill_(0, ids, True)
    folders.save_tensors(folder / draft_folder.WEIGHTS, tensors, {"format": "pt"})
    target = draft_data.target.path
    record = json_files.read(target / manifest.MANIFEST) if (target / manifest.MANIFEST).is_file() else {}
    served = launch_files.launch_facts(models.read_config(target), record, facts["target"].get("name") or target.name)
    texts = vllm.drafted(served, eagle3.STEPS)
    texts = {f"{launch_files.FOLDER}/{place}": text for place, text in texts.items()}
    draft_folder.write_draft(folder, _config(draft_data), facts, texts)


def _config(draft_data: DraftData) -> dict[str, Any]:
    """The config.json of a draft, in the form of the `speculators` library."""
    shape, target = draft_data.shape, draft_data.target.model.config
    dtype = str(draft_data.target.model.dtype).removeprefix("torch.")
    layer = {
        "model_type": "llama",
        "vocab_size": len(draft_data.head),
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
        "num_aux_hidden_states": len(shape.taps),  # vLLM assumes three if this is missing
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
            "verifier": {
                "name_or_path": hub.display_path(draft_data.target.path),
                "architectures": list(target.architectures or []),
            },
        },
        "draft_vocab_size": shape.vocabulary,
        "target_hidden_size": shape.hidden,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "transformer_layer_config": layer,
        "dtype": dtype,
    }
