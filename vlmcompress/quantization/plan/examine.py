"""Check whether a recipe works for a model on a machine in an engine, in seconds, from headers and tables.

`examine` checks everything instead of stopping at the first problem.
What vLLM runs on a machine is in `recipe.targets`, which engine loads which format in `export.readers`; of machines for other
engines only what stands here is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlmcompress import models
from vlmcompress.engines.vllm.served_model import Attention, describe
from vlmcompress.export import readers
from vlmcompress.export.manifest import MANIFEST
from vlmcompress.models.data import Preview
from vlmcompress.numerics import label
from vlmcompress.quantization.plan import make_plan
from vlmcompress.quantization.plan.calibration_data import encode_preview, preview_data
from vlmcompress.quantization.plan.kv_cache import kv_cache_check
from vlmcompress.quantization.plan.plan import Plan
from vlmcompress.recipe import Recipe, adapter, targets
from vlmcompress.recipe.targets import Target
from vlmcompress.reduction.hooks import resizing
from vlmcompress.utils import folders
from vlmcompress.utils.errors import UserError, did_you_mean
from vlmcompress.utils.messages import Check
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.text import size, smaller

NVIDIA = {"sglang": (8, 0), "lmdeploy": (0, 0), "tensorrt-llm": (0, 0)}  # engines for its GPUs -> least capability
MEMORY_SHARE = 0.92  # share of device memory that vLLM takes by default


def engine_of(recipe: Recipe) -> str:
    """The engine that a recipe is checked for, where none is named: the only one that reads the format, or the recipe's."""
    return FORMATS.constant(recipe.format, "ENGINE") or recipe.engine


@dataclass(frozen=True)
class Examined:
    """What speaks for and against a recipe; the plan, if the model can be read; a look at the calibration data, if any is."""

    findings: list[Check]
    plan: Plan | None = None
    preview: Preview | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the recipe."""
        return all(finding.ok for finding in self.findings)


def examine(recipe: Recipe, engine: str | None = None) -> Examined:
    """Find everything that speaks for or against a recipe whose target has not refused it yet.

    Args:
        recipe: a recipe resolved with `strict=False`, or one that its target does not refuse.
        engine: one of `readers.ENGINES`; None: see `engine_of`.
    """
    engine = engine or engine_of(recipe)
    if engine == "transformers":
        recipe = recipe.model_copy(update={"engine": engine})
    if engine not in readers.ENGINES:
        raise UserError(f"unknown engine '{engine}'{did_you_mean(engine, readers.ENGINES)}")
    target = targets.get_target(recipe.target) if recipe.target else None
    report = [Check("recipe", True, f"scheme {recipe.scheme} ({label(recipe.number_formats)})")]
    report += _kernels(recipe, target, engine)
    try:
        plan = make_plan(recipe, strict=False)
    except UserError as error:
        return Examined([*report, Check("model", False, str(error))])
    report.append(Check("model", True, f"family {plan.source.spec.family}, {size(plan.bytes_before)} of weights"))
    report += _format(plan, engine)
    report += _processor(plan, engine)
    report += _vocabulary(plan)
    lines = [*models.asides(recipe.model), *adapter.notes(recipe.model, recipe.adapter), *models.cast_text(plan.source)]
    lines += models.unused_text(plan.source)
    report += [Check("folder", True, line) for line in lines]
    report += _names(plan, engine)
    report += _reducer(plan, engine)
    report += _mtp(plan)
    if plan.problems:
        report += [Check("plan", False, problem) for problem in plan.problems]
    else:
        report.append(Check("plan", True, f"{plan.linear_layers} linear layers can be quantized"))
    report += _family(plan, target, engine)
    if target and engine == "vllm":
        report.append(kv_cache_check(recipe, plan.source, target, everywhere=all(plan.blocks)))
    if not plan.problems:
        report += _size(plan, target)
    preview, calibration = _calibration(plan)
    return Examined([*report, calibration, *_output(recipe)], plan, preview)


def _output(recipe: Recipe) -> list[Check]:
    """Why OUT can't be written; nothing where it can, or where none is named."""
    try:
        for overwrite in (True, False) if recipe.out else ():  # first whether it can be at all
            folders.require_out(recipe.model, recipe.out, overwrite=overwrite, mark=MANIFEST, look=True)  # type: ignore[arg-type]
    except UserError as error:
        return [Check("output", False, str(error))]
    return []


def _kernels(recipe: Recipe, target: Target | None, engine: str) -> list[Check]:
    """Whether the engine computes in the number formats on the target."""
    report = []
    for part, scheme in {"decoder": recipe.number_formats, **recipe.parts}.items():
        key, name = targets.format_key(scheme), f"{engine}: {part}"
        if engine == "vllm" and target is None:
            report.append(Check(name, True, f"reads {key}; name a --target to learn the kernel"))
        elif target is None:
            continue
        elif engine == "vllm":
            reason = target.format_problem(key)
            report.append(Check(name, reason is None, reason or f"{target.kernel(key)} kernel on {target.title}"))
        elif engine in NVIDIA:
            title, capability = readers.ENGINES[engine].title, target.capability
            if capability is None or capability < NVIDIA[engine]:
                since = " from A100 on" if NVIDIA[engine] > (0, 0) else ""
                report.append(Check(name, False, f"{title} wants an NVIDIA GPU{since}; use --engine vllm"))
            elif key.startswith("w8a8-fp") and capability < (8, 9):
                problem = f"{target.title} has no FP8 arithmetic; choose another --target"
                weight_only = f"{title} runs FP8 weight-only on {target.title}; use int8"
                report.append(Check(name, False, weight_only if engine == "sglang" else problem))
    return report


def _format(plan: Plan, engine: str) -> list[Check]:
    """Whether the engine loads the checkpoint that would be written; nothing where it can't be, which the plan says."""
    try:
        block = plan.recipe.exporter.configs(plan.layers).get("config.json")
    except UserError:
        return []
    config = {key: value for key, value in plan.source.config.items() if key != "quantization_config"}
    facts = readers.gather_facts(
        config | ({"quantization_config": block} if block else {}), "OUT", experts=models.mixture(config) is not None
    )
    verdict, name = readers.engine_support(engine, facts), f"{engine}: format"
    if verdict.reason:
        remedy = (
            "choose another --scheme or --format, or --engine vllm" if engine != "vllm" else "choose another --format"
        )
        return [Check(name, False, f"{verdict.reason}; {remedy}")]
    needs = f" with {', '.join(verdict.needs)}" if verdict.needs else ""
    source = ", by its source; not run" if verdict.evidence.startswith("read") else ""
    loader = "; by vlmcompress.models.open_model" if verdict.loader else ""
    notes = "".join(f"; {note}" for note in verdict.notes)
    return [Check(name, True, f"{verdict.title} loads {plan.recipe.format}{needs}{source}{loader}{notes}")]


def _family(plan: Plan, target: Target | None, engine: str) -> list[Check]:
    """Whether the engine serves the family on the target."""
    if engine != "vllm" or target is None:
        return []
    if target.is_cpu and plan.source.spec.engine.vllm_cpu:
        return [Check("vllm: family", False, plan.source.spec.engine.vllm_cpu)]
    blocks = describe(plan.source.meta_model).blocks
    heads = {block.head_dim for block in blocks if isinstance(block, Attention)}
    if target.head_sizes and (refused := heads - target.head_sizes):
        sizes = ", ".join(map(str, sorted(target.head_sizes)))
        text = f"{target.title} has no attention for heads of {max(refused)}, only {sizes}"
        return [Check("vllm: family", False, text)]
    return [Check("vllm: family", True, f"{plan.source.spec.family} runs on {target.title}")]


def _names(plan: Plan, engine: str) -> list[Check]:
    """Whether vLLM finds the model's tensors, and what is done where it does not."""
    if plan.source.unfound:
        lost = models.unfound_text(plan.source.unfound)
        return [Check("names", True, f"{lost}; so it can't load the source, but it loads what quantize writes")]
    return [Check("names", True, "vLLM finds every tensor by its name")] if engine == "vllm" else []


def _processor(plan: Plan, engine: str) -> list[Check]:
    """Whether tokenizer and image processor load, whether vLLM counts as many tokens of an image as the processor makes, and
    whether images may be far larger than the model's card recommends."""
    folder, spec, config = plan.recipe.inputs_folder, plan.source.spec, plan.source.meta_model.config
    groups = (
        ("tokenizer.json", "tokenizer.model", "vocab.json"),
        ("processor_config.json", "preprocessor_config.json"),
    )
    missing = [" or ".join(names) for names in groups if not any((folder / name).is_file() for name in names)]
    if missing:
        return [Check("processor", False, f"{folder} has no {' and no '.join(missing)}; copy it from the source")]
    try:
        with models.quiet_transformers():
            processor = models.load_processor(folder)
    except UserError as error:
        return [Check("processor", False, str(error))]
    report = [Check("processor", True, "tokenizer and image processor are there")]
    if plan.recipe.resize or spec.images.sizes is None:
        return report
    now = resizing.image_settings(spec, processor)[-1]
    for where, part, name, value in resizing.config_entries(now, config):
        if engine == "vllm" and (read := getattr(part, name)) != value:
            text = (
                f"config.json has {name} {read} in {where}, which vLLM counts by, and the processor makes up to {value} tokens "
                "of an image: vLLM drops some, or dies; set both to the same, as --reduce resize:tokens=N does"
            )
            report.append(Check("image size", False, text))
    note = resizing.ceiling_note(spec, processor)
    return [*report, Check("image size", True, note)] if note else report


def _vocabulary(plan: Plan) -> list[Check]:
    """Whether the embedding has a row for each token; what an adapter changes of that is among the plan's problems."""
    rows = models.rows_of(plan.source.meta_model)
    if plan.recipe.adapter or not (beyond := models.unembedded(plan.recipe.inputs_folder, rows)):
        return []
    return [Check("tokenizer", False, f"{beyond}; add rows (resize_token_embeddings), or remove these tokens")]


def _reducer(plan: Plan, engine: str) -> list[Check]:
    """Findings about a reducer, without reasons against it, which are among the plan's problems."""
    if plan.visual_tokens is None or plan.problems:
        return []
    title = f"{engine}: visual tokens"
    if plan.recipe.reduce and engine not in ("vllm", "transformers"):
        problem: str | None = f"{engine} does not know the reducer of a checkpoint; use --engine vllm"
        if names := [name for name in FORMATS if FORMATS.constant(name, "ENGINE") == engine]:
            problem = FORMATS.get(names[0]).reducer_problem(plan.source.spec.family, plan.recipe.reduce.plain())
        if problem:
            return [Check(title, False, problem)]
    return [Check(title, True, plan.visual_tokens.text)]


def _mtp(plan: Plan) -> list[Check]:
    """What becomes of a head that drafts tokens; why it can't be carried is among the plan's problems."""
    source = plan.source
    if lost := models.missing_mtp(source.spec, source.config, source.stored):
        return [Check("speculation", True, f"{lost}; what quantize writes says 0")]
    names = models.mtp_tensors(source.spec, source.stored)
    if not names or models.mtp_problem(source.spec, source.config, source.stored):
        return []
    whole = size(sum(source.stored[name].nbytes for name in names))
    title = f"{', '.join(models.mtp_roots(source.spec, source.stored))}, a head that drafts tokens"
    return [Check("speculation", True, f"{title}, is carried as it is: {len(names)} tensors, {whole}")]


def _size(plan: Plan, target: Target | None) -> list[Check]:
    """Whether the weights get smaller, and fit on the target."""
    before, after = plan.bytes_before, plan.bytes_after
    if (plan.recipe.reduce or plan.recipe.resize) and after == before:
        report = [Check("size", True, f"{size(after)}, as the weights stay as they are")]
    elif after < before:
        report = [Check("size", True, f"{size(before)} -> {size(after)} ({smaller(before, after)})")]
    else:
        report = [Check("size", False, f"{size(after)} is not smaller than {size(before)}; choose another scheme")]
    if target and target.memory:
        room = MEMORY_SHARE * target.memory * 1e9 - after
        problem = f"{size(after)} do not fit on {target.title}; use a scheme of fewer bits"
        left = f"{size(room)} left on {target.title} for the KV cache and activations"
        report.append(Check("memory", room > 0, left if room > 0 else problem))
    return report


def _calibration(plan: Plan) -> tuple[Preview | None, Check]:
    """A look at the calibration data, and whether the run could read them."""
    preview = None
    try:
        preview = preview_data(plan)
        sample = encode_preview(plan, preview) if preview else ""
    except UserError as error:
        return preview, Check("calibration", False, str(error))
    data = plan.recipe.calibrate.data
    if preview:
        source = data or "the images bundled with the demo model"
        detail = f"{preview.count} samples of {source}; {preview.text}, {sample}"
    elif data and plan.reads_data:
        detail = f"{data}, which was not looked at"
    else:
        detail = "not needed"
    return preview, Check("calibration", True, detail)
