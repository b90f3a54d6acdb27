"""Examine a finished checkpoint: whether every file is as written, and every reader finds every tensor it needs.

Nothing is trusted that can be computed: files are hashed, headers measured, and the model is built without weights exactly
as transformers builds it for this config, so that a tensor that would be silently re-initialized shows as missing.
Damage gives a failing check, not an exception.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from vlmcompress import models
from vlmcompress.export import card, launch_files, manifest, readers, tokenizers
from vlmcompress.export.formats import compressed_tensors
from vlmcompress.export.formats.compressed_tensors import FORMAT as COMPRESSED
from vlmcompress.export.layer_targets import misnamed, misread
from vlmcompress.export.stored import Stored
from vlmcompress.models import Group, ModelSpec
from vlmcompress.reduction import block as reducer_block
from vlmcompress.reduction import scorer_file, support
from vlmcompress.utils import identity, tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import Check, error_text
from vlmcompress.utils.registry import FORMATS
from vlmcompress.utils.tensor_headers import Entry
from vlmcompress.utils.text import size, smaller


def diagnose(path: Path, source: Path | None = None) -> list[Check]:
    """Examine the checkpoint in `path`.

    Args:
        path: folder that `vlmcompress quantize` wrote.
        source: the original, to compare sizes and identity with.

    Returns:
        A check of each kind, in order; one that depends on a failed one fails, too.

    Raises:
        UserError: `source` is not a folder.
    """
    if source is not None and not source.is_dir():
        raise UserError(f"--source {source} is not a folder; give the original's folder")
    subject = _Subject(Path(path), source)
    if subject.other and source is not None:
        raise UserError(f"{path} is for {subject.other.TITLE}, and not compared with --source; leave that out")
    checks: dict[str, Check] = {}
    with models.quiet_transformers():
        for name, (needs, examine) in (_OF_OTHERS if subject.other else _EXAMINATIONS).items():
            failed = [need for need in needs if not checks[need].ok]
            if failed:
                checks[name] = Check(name, False, f"not examined because of: {', '.join(failed)}")
                continue
            try:
                checks[name] = Check(name, True, examine(subject))
            except UserError as error:
                checks[name] = Check(name, False, str(error))
            except Exception as error:  # damage may cause any error in the libraries that read these files
                checks[name] = Check(name, False, f"{type(error).__name__}: {error_text(error)}")
    return list(checks.values())


class _Subject:
    """The checkpoint under examination; its parts are read once and shared by all examinations."""

    def __init__(self, path: Path, source: Path | None):
        self.path, self.source = path, source

    @functools.cached_property
    def other(self) -> Any:
        """A format whose weights are not examined; None if they are examined."""
        return next((FORMATS.get(name) for file, name in _OTHERS.items() if (self.path / file).is_file()), None)

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """All stored tensors."""
        return models.stored_tensors(self.path)

    @functools.cached_property
    def config(self) -> dict:
        """The content of config.json."""
        return models.read_config(self.path, weights=False)

    @functools.cached_property
    def quantization(self) -> dict:
        """The `quantization_config` block; one without groups if nothing is quantized."""
        return self.config.get("quantization_config") or {"format": "dense", "config_groups": {}, "ignore": []}

    @functools.cached_property
    def stored(self) -> Stored | None:
        """The layers of a checkpoint in another format than compressed-tensors, which transformers builds itself; else None."""
        if self.quantization.get("quant_method", COMPRESSED.METHOD) == COMPRESSED.METHOD:
            return None
        return Stored.of(self.path)

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """The spec of the model's family."""
        return models.spec_for(self.config)

    @functools.cached_property
    def meta_model(self) -> PreTrainedModel:
        """The unquantized model without weights."""
        return models.build_meta_model(self.path)

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Map memory names to names on disk, for every tensor of the model that transformers builds for this config."""
        if self.stored:
            return self.stored.names
        model = models.build_meta_model(self.path)
        models.compressed(model, self.quantization)
        return models.disk_names(model, self.entries)

    @functools.cached_property
    def linears(self) -> dict[str, nn.Module]:
        """Memory name -> linear layer of the unquantized model, and its token embedding if that is quantized."""
        return {
            name: module
            for name, module in models.matrices(self.meta_model).items()
            if isinstance(module, nn.Linear) or self._group(name)
        }

    @functools.cached_property
    def fused(self) -> list[Group]:
        """Groups of linear layers that an engine fuses."""
        every = (*models.resolve_groups(self.meta_model, self.spec), *models.vision_linears(self.meta_model, self.spec))
        return [group for group in every if group.fused]

    @functools.cached_property
    def groups(self) -> dict[str, str | None]:
        """Linear layer -> its config group or, in other formats, its scheme; None: not quantized."""
        return {name: self._group(name) for name in self.linears}

    def _group(self, name: str) -> str | None:
        if self.stored:
            return str(self.stored.schemes[name]) if name in self.stored else None
        return compressed_tensors.group_of(self.quantization, name)


def _manifest(subject: _Subject) -> str:
    content = manifest.read_manifest(subject.path)
    return f"schema {content['schema_version']}, written by vlmcompress {content['created_by'].get('vlmcompress')}"


def _files(subject: _Subject) -> str:
    recorded = manifest.read_manifest(subject.path)["files"]
    hashes = manifest.hash_files(subject.path)
    edited = card.CARD in hashes and hashes[card.CARD] != recorded.get(card.CARD)  # as a model card's owner does
    if edited:
        recorded = recorded | {card.CARD: hashes[card.CARD]}
    wrong = {
        "missing": sorted(recorded.keys() - hashes.keys()),
        "changed": sorted(name for name in recorded.keys() & hashes.keys() if recorded[name] != hashes[name]),
        "not in the manifest": sorted(hashes.keys() - recorded.keys()),
    }
    if any(wrong.values()):
        what = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise UserError(f"{what}; copy the folder again or quantize again")
    return f"{len(hashes) - edited} files have the recorded hashes" + f"; {card.CARD} was edited" * edited


def _weights(subject: _Subject) -> str:
    models.tensor_headers(subject.path)
    stored = sum(entry.spec.nbytes for entry in subject.entries.values())
    return f"{len(subject.entries)} tensors, {size(stored)}, in {len(models.shards(subject.path))} files"


def _config(subject: _Subject) -> str:
    if subject.stored:
        kinds = len(set(subject.stored.schemes.values()))
        return f"{subject.spec.family}, {subject.stored.format}, {kinds} scheme(s)"
    for key, group in subject.quantization["config_groups"].items():
        kind = COMPRESSED.storage(compressed_tensors.scheme_of(group))
        if kind != group["format"]:
            raise UserError(f"config group {key} says format {group['format']}, its numbers are stored as {kind}")
    return f"{subject.spec.family}, {subject.quantization['format']}, {len(subject.quantization['config_groups'])} group(s)"


def _reducer(subject: _Subject) -> str:
    carried = reducer_block.read_reducer(subject.config)
    if carried is None:
        return "none, all visual tokens are kept"
    vlm = models.VLM(subject.meta_model, None, subject.spec, subject.path)
    support.require_reducer(vlm, carried.reducer)
    scorer_file.load_scorer(vlm.model.config, carried.reducer, subject.path)
    reason = support.engine_problem(subject.config["architectures"][0], carried.reducer)
    where = f"for transformers only: {reason}" if reason else "served by the plugin of vLLM"
    return f"{carried.reducer.label}, {where}"


def _tensors(subject: _Subject) -> str:
    if subject.stored:  # `Stored` has checked names and shapes
        return f"{len(subject.entries)} tensors, none missing, none left over"
    names, state = subject.names, subject.meta_model.state_dict(keep_vars=True)
    for memory, disk in names.items():
        quantized = subject.groups.get(memory.rpartition(".")[0]) and not memory.endswith(".bias")
        if memory in state and not quantized and subject.entries[disk].spec.shape != tuple(state[memory].shape):
            shapes = f"{list(subject.entries[disk].spec.shape)} on disk, {list(state[memory].shape)} in the model"
            raise UserError(f"tensor '{disk}' has shape {shapes}")
    return f"{len(names)} tensors, none missing, none left over"


def _layers(subject: _Subject) -> str:
    quantized = {name: group for name, group in subject.groups.items() if group}
    for name, group in quantized.items() if not subject.stored else ():
        scheme = compressed_tensors.scheme_of(subject.quantization["config_groups"][group])
        rows, columns = subject.linears[name].get_parameter("weight").shape
        scales = subject.entries[subject.names[f"{name}.weight_scale"]].spec.dtype
        try:
            needed = COMPRESSED.specs(scheme, rows, columns, scales)
        except ValueError as error:
            raise UserError(f"layer {name}: {error}") from error
        for local, spec in needed.items():
            entry = subject.entries[subject.names[f"{name}.{local}"]]
            if entry.spec != spec:
                stored, right = (f"{tensor_spec.dtype} {list(tensor_spec.shape)}" for tensor_spec in (entry.spec, spec))
                raise UserError(f"tensor '{entry.name}' is {stored}, needed is {right}")
            if local == "weight_shape" and tensor_files.read_tensor(entry).tolist() != [rows, columns]:
                raise UserError(f"tensor '{entry.name}' does not say {[rows, columns]}")
    # Fused layers must share a global scale: of several, vLLM takes the largest.
    for fused in subject.fused:
        for scale in ("weight_global_scale", "input_global_scale"):
            names = [subject.names[key] for name in fused.linears if (key := f"{name}.{scale}") in subject.names]
            values = {name: float(tensor_files.read_tensor(subject.entries[name])) for name in names}
            if len(set(values.values())) > 1:
                text = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
                raise UserError(f"an engine fuses these layers and uses one {scale}: {text}; quantize again")
    return f"{len(quantized)} of {len(subject.linears)} linear layers quantized, all shapes fit"


def _fused(subject: _Subject) -> str:
    for group in subject.fused:
        if len({subject.groups[name] for name in group.linears}) > 1:
            schemes = ", ".join(f"{name}: {subject.groups[name] or 'unquantized'}" for name in group.linears)
            raise UserError(f"an engine runs these as one matrix, but they differ: {schemes}")
    return f"{len(subject.fused)} fused matrices, one scheme each"


def _names(subject: _Subject) -> str:
    if lost := models.unfound(subject.names, subject.spec, subject.entries):
        remedy = "write the original again with `vlmcompress quantize`, which corrects names"
        raise UserError(f"{models.unfound_text(lost)}; {remedy}")
    return f"{len(subject.names)} tensors have names that vLLM looks for"


def _engine(subject: _Subject) -> str:
    names = {memory.removesuffix("_packed"): disk.removesuffix("_packed") for memory, disk in subject.names.items()}
    groups = subject.groups | dict.fromkeys(models.routers(subject.meta_model, subject.spec))
    if subject.stored:
        wrong = misnamed(subject.stored.reader, subject.stored.block, groups, names, subject.spec)
    else:
        wrong = misread(subject.quantization, groups, names, subject.spec)
    if wrong:
        name, expected, got = wrong[0]
        raise UserError(f"{len(wrong)} layers would be misread, first '{name}': {expected}, read as {got}")
    quantized = sum(group is not None for group in subject.groups.values())
    if subject.stored and all(subject.stored.reader.quantizes(subject.stored.block, name) is None for name in groups):
        return f"tensors alone decide which {quantized} of {len(subject.groups)} layers are quantized"
    return f"memory, disk and vLLM agree by name on which {quantized} of {len(subject.groups)} layers are quantized, and how"


def _readers(subject: _Subject) -> str:
    """The engines that load the checkpoint; a problem if none does."""
    record = manifest.read_manifest(subject.path) if (subject.path / manifest.MANIFEST).is_file() else {}
    return readers.readers_summary(launch_files.launch_facts(subject.config, record, subject.path.name))


def _draft(subject: _Subject) -> str:
    """Check the checkpoint's draft head: whether it is complete, and excluded from quantization."""
    specs, spec = {name: entry.spec for name, entry in subject.entries.items()}, subject.spec
    problem = models.mtp_problem(spec, subject.config, specs) or models.missing_mtp(spec, subject.config, specs)
    if problem:
        raise UserError(problem)
    names = models.mtp_tensors(spec, specs)
    if spec.mtp is None or not names:
        return "no draft head"
    block, reader = subject.quantization, subject.stored.reader if subject.stored else COMPRESSED
    quantized = [name for name in models.mtp_modules(spec, specs) if reader.quantizes(block, name)]
    if quantized:
        why = f"would be read as quantized, first '{quantized[0]}', and engines would not start with speculation"
        raise UserError(f"{len(quantized)} layers of the draft head {why}; quantize again")
    literal = compressed_tensors.mtp_entries(spec.mtp.prefix)[0]
    searched = reader is COMPRESSED and not spec.mtp.joint
    if searched and block["config_groups"] and literal not in block["ignore"]:
        raise UserError(f"ignore has no '{literal}', which SGLang searches for literally; quantize again, or add it")
    carried = size(sum(specs[name].nbytes for name in names))
    return f"{', '.join(models.mtp_roots(spec, specs))}, an MTP head: {len(names)} tensors, {carried}, in 16 bits"


def _types(subject: _Subject) -> str:
    """Check that the floating tensors of a quantized checkpoint have one type, as transformers does not cast all of them."""
    if "quantization_config" not in subject.config:
        return "not quantized, so every reader casts to one type"
    memory, packed = {disk: name for name, disk in subject.names.items()}, set[str]()
    for layer in subject.stored.layers.values() if subject.stored else ():  # other formats define their types
        packed |= {entry.name for entry in layer.entries.values()}
    plain = {name: entry.spec for name, entry in subject.entries.items() if name not in packed}
    scales = {name: spec for name, spec in plain.items() if name.endswith("_scale")}
    weights = [spec for name, spec in plain.items() if name not in scales]
    kind = models.FloatType.of(subject.config, weights, spec=subject.spec, model=subject.meta_model)
    other = [name for name, spec in plain.items() if kind.spec(memory.get(name, name), spec) != spec]
    if wrong := [name for name in other if name not in scales or plain[name].dtype != "F32"]:
        dtype = str(tensor_files.DTYPES[plain[wrong[0]].dtype]).removeprefix("torch.")
        raise UserError(
            f"{len(wrong)} tensors are not in {kind.name}, the model's type, first '{wrong[0]}' in {dtype}: transformers "
            "does not cast tensors of a quantized checkpoint, and fails; vlmcompress export writes all in one type"
        )
    wide = [name for name in other if not name.endswith("_global_scale")]
    return f"{kind.name}" + (f", but {len(wide)} scales in float32, which only vLLM supports" if wide else "")


def _values(subject: _Subject) -> str:
    for name, tensor in tensor_files.map_tensors(subject.entries).items():
        where = f"'{name}' in {subject.entries[name].file.name}"
        if not tensor_files.all_finite(tensor):
            raise UserError(f"tensor {where} holds NaN or infinity")
        if name.endswith("_scale") and tensor.is_floating_point() and not (tensor.float() > 0).all():
            raise UserError(f"scale {where} is not positive")
    return "all numbers finite, all scales positive"


def _size(subject: _Subject) -> str:
    recorded = manifest.read_manifest(subject.path)
    before, after = recorded["size"]["weights_before"], sum(e.spec.nbytes for e in subject.entries.values())
    if subject.source is not None:
        original = identity.source_identity(subject.source)
        if any(recorded["model"].get(key) != original[key] for key in ("config_sha256", "headers_sha256")):
            raise UserError(f"{subject.source} is not the source of this checkpoint")
    if after >= before and "quantization_config" in subject.config:
        raise UserError(f"weights take {after} bytes, not less than the original's {before}")
    if after == before:
        return f"{size(after)}, as they were"
    return f"{size(before)} -> {size(after)} ({smaller(before, after)})"


def _processor(subject: _Subject) -> str:
    processor = models.load_processor(subject.path)
    if not getattr(processor, "chat_template", None) and not getattr(processor.tokenizer, "chat_template", None):
        raise UserError(f"{subject.path} has no chat template; copy chat_template.jinja from the original")
    return type(processor).__name__


def _tokenizer(subject: _Subject) -> str:
    engine = subject.other.TITLE
    tokens = tokenizers.compare_tokenizers(subject.other, subject.path, {})
    if tokens.problem:
        raise UserError(tokens.problem)
    if not tokens.texts:
        return f"not compared, as {engine} is not installed"
    return tokens.warning or f"{engine} reads {tokens.texts} texts as the model does"


def _further(subject: _Subject) -> str:
    return f"not examined, {subject.other.TITLE} alone reads them; run it: vlmcompress eval --engine {subject.other.ENGINE}"


_OTHERS = {"model.gguf": "gguf", "openvino_language_model.xml": "openvino"}
_EXAMINATIONS: dict[str, tuple[tuple[str, ...], Callable[[_Subject], str]]] = {
    "manifest": ((), _manifest),
    "files": (("manifest",), _files),
    "weights": ((), _weights),
    "config": ((), _config),
    "reducer": (("weights", "config"), _reducer),
    "tensors": (("weights", "config"), _tensors),
    "layers": (("tensors",), _layers),
    "types": (("tensors",), _types),
    "fused": (("weights", "config"), _fused),
    "names": (("tensors",), _names),
    "engine": (("tensors",), _engine),
    "readers": (("weights", "config", "reducer"), _readers),
    "draft": (("weights", "config"), _draft),
    "values": (("weights",), _values),
    "size": (("manifest", "weights"), _size),
    "processor": ((), _processor),
}
_OF_OTHERS: dict[str, tuple[tuple[str, ...], Callable[[_Subject], str]]] = {
    "manifest": ((), _manifest),
    "files": (("manifest",), _files),
    "processor": ((), _processor),
    "tokenizer": (("processor",), _tokenizer),
    "weights": ((), _further),
}
