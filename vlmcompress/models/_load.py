"""Open a model folder: its config and headers (`Source`), the model without weights, or model and processor."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CompressedTensorsConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer

from vlmcompress.models import _experts
from vlmcompress.models._checks import OTHER_CONFIG, check_processor
from vlmcompress.models._modules import decoder_blocks, draft_specs
from vlmcompress.models._names import (
    COMPUTED,
    disk_names,
    flattened,
    tied_names,
    unfound,
    unused_tensors,
    written_names,
)
from vlmcompress.models._read import (
    check_type,
    mixture,
    read_config,
    read_json,
    refuse_quantized,
    spec_for,
    stored_tensors,
    tensor_headers,
)
from vlmcompress.models._spec import Group, ModelSpec
from vlmcompress.models._types import Choice, FloatType
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text, foreign_errors
from vlmcompress.utils.model_folder import ADAPTER_WEIGHTS, INDEX
from vlmcompress.utils.tensor_headers import Entry, Spec, read_entries

_LIMITS = ("max_length", "truncation", "truncation_strategy", "stride", "padding", "pad_to_multiple_of")
"""Settings of a tokenizer that shorten or lengthen what it encodes."""


@dataclass(frozen=True)
class VLM:
    """A loaded model. `processor` turns images and chat messages into model inputs."""

    model: PreTrainedModel
    processor: Any
    spec: ModelSpec
    path: Path


def build_meta_model(path: str | Path, weights: bool = True, supported_only: bool = True) -> PreTrainedModel:
    """Build the model of `path` on the meta device: names and shapes, no weights read.

    Args:
        weights: whether weight files must exist.
        supported_only: whether the model type must have a family here; else any model type of transformers works.
    """
    content, file = read_config(path, weights), Path(path) / "config.json"
    spec = spec_for(content) if supported_only else None
    check_type(content)
    try:
        with quiet_transformers(), torch.device("meta"):
            meta_model = AutoModelForImageTextToText.from_config(
                CONFIG_MAPPING[content["model_type"]].from_dict(content)
            )
        if spec:
            _experts.split_experts(meta_model, spec)
    except Exception as error:  # a wrong value in a config can raise anything
        raise UserError(f"{file} is not a valid config ({error_text(error)}); restore it from the source") from error
    return meta_model


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
) -> VLM:
    """Load model and processor.

    Args:
        path: folder of a Hugging Face checkpoint.
        device: where the weights go.
        dtype: floating-point type of the weights; None: that of the checkpoint (`FloatType`).
        trust_remote_code: run Python code from the folder. Only then may its config have an `auto_map`.
        check: read all weights to refuse NaN and infinity; False: only those that are stored in another type, as the caller
            checks the others when it reads them.

    Raises:
        UserError: the checkpoint is missing, damaged or not supported.
    """
    path = Path(path)
    config = read_config(path)
    spec = spec_for(config)
    refuse_quantized(path, config)
    if config.get("auto_map") and not trust_remote_code:
        raise UserError(
            f"{path}/config.json would run Python code from the folder (auto_map); trust it with --set trust_remote_code=true"
        )
    meta_model = build_meta_model(path)
    names, _ = _names(path, meta_model)
    check_shapes(path, meta_model, names)
    _check_head(path, meta_model, names)
    with quiet_transformers():
        try:
            model, info = open_model(path, meta_model, dtype=dtype, trust_remote_code=trust_remote_code)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{path} does not load ({error_text(error)}); restore it from the source") from error
        processor = load_processor(path, trust_remote_code)
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            first = sorted(map(str, info[what]))[0]
            raise UserError(f"{path}: {what.replace('_', ' ')} at load, first {first}; download it again")
    _check_finite(model, path, names, check)
    return VLM(model.eval().requires_grad_(False).to(device), processor, spec, path)


def open_model(
    path: str | Path,
    meta_model: PreTrainedModel | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Call transformers' `from_pretrained` with the tensors of `stored_tensors`; returns the model and its loading info.

    Unlike `from_pretrained` alone this supports one module per expert of a mixture, and packed embeddings. transformers 5.17
    would select weight files by its own rules and apply adapters next to them (`maybe_load_adapters` in
    `integrations/peft.py`), so it gets the tensors. It fuses the experts of a mixture, which compressed-tensors cannot
    quantize, and cannot read checkpoints of Qwen3-VL with separate experts, so it opens the model without experts, and they
    are added afterwards.

    Args:
        path: folder of a checkpoint, plain or in compressed-tensors.
        meta_model: the model on the meta device, whose modules may be used in the result; None: built if needed.
        dtype: floating-point type of the weights, or its name; "auto" or None: that of the checkpoint (`FloatType`).
        trust_remote_code: run Python code from the folder.
        options: further arguments of `from_pretrained`.
    """
    path, content = Path(path), read_config(path)
    spec, stored = mixture(content), stored_tensors(path)
    # The class by `model_type`, as AutoModelForImageTextToText would choose it.
    config, kind = _class(path, content, trust_remote_code)
    if dtype in (None, "auto"):
        weights = [entry.spec for name, entry in stored.items() if "scale" not in name.rpartition(".")[2]]
        dtype = FloatType.of(content, weights).dtype
    settings = path / "generation_config.json"
    if settings.exists():
        read_json(settings, "generation settings")  # that are no object end transformers with an error of another kind
        with foreign_errors(f"{settings} is not usable", "; restore it from the source"):
            options["generation_config"] = GenerationConfig.from_pretrained(path, local_files_only=True)
    inside = f".{spec.experts}." if spec else ""
    plain = {name: entry for name, entry in stored.items() if not inside or inside not in name}
    if spec:
        meta_model = meta_model or build_meta_model(path)
        kind = _experts.without_experts(type(meta_model), spec)
        compressed(meta_model, content.get("quantization_config") or {})
    with contextlib.ExitStack() as opened:
        files = {file: opened.enter_context(safe_open(file, "pt")) for file in {entry.file for entry in plain.values()}}
        # Slices, which transformers reads one by one while filling the model, so the weights are in memory only once.
        tensors = {flattened(name): files[entry.file].get_slice(name) for name, entry in plain.items()}
        opened.enter_context(_packed_embeddings())
        if spec:
            opened.enter_context(quiet_transformers())  # it would report the experts as missing
        options |= {"config": config, "state_dict": tensors, "dtype": dtype, "output_loading_info": True}
        # No path: with one, transformers would look for weight files and adapters itself.
        model, info = kind.from_pretrained(None, **options)
    # where tools that build on transformers look for the files
    model.name_or_path = model.config.name_or_path = str(path)
    if spec and meta_model is not None:
        names = {key: disk for key, disk in _names(path, meta_model)[0].items() if inside in key}
        _experts.put_in(model, meta_model, {key: stored[disk] for key, disk in names.items()})
    return model, info | {"missing_keys": _lacking(info)}


def _class(path: Path, content: dict[str, Any], trust_remote_code: bool) -> tuple[PreTrainedConfig, Any]:
    """Config and class of a model: transformers' own, or those of the folder's Python code if that is trusted."""
    reference = (content.get("auto_map") or {}).get("AutoModelForImageTextToText") if trust_remote_code else None
    if reference:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=True)
        return config, get_class_from_dynamic_module(reference, str(path), local_files_only=True)
    config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    return config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def _lacking(info: Mapping[str, Any]) -> set[str]:
    """Tensors that are missing in a checkpoint, except those computed from config.json."""
    return {key for key in info["missing_keys"] if not key.endswith(COMPUTED)}


@contextlib.contextmanager
def _packed_embeddings() -> Iterator[None]:
    """Let transformers 5.17 initialize an embedding without `weight`, as it already does for linear layers."""
    # transformers/modeling_utils.py::PreTrainedModel._init_weights reads `weight` of every embedding; a quantized one has
    # `weight_packed` instead. Can go when transformers checks for the attribute.
    plain = PreTrainedModel._init_weights

    def initialize(self: PreTrainedModel, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding) or hasattr(module, "weight"):
            plain(self, module)

    PreTrainedModel._init_weights = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._init_weights = plain  # type: ignore[method-assign]


def compressed(meta_model: PreTrainedModel, block: Mapping[str, Any]) -> None:
    """Give a meta model (shapes only) the layers that transformers builds for a `quantization_config` of compressed-tensors."""
    if not block.get("config_groups") and not block.get("kv_cache_scheme"):
        return
    # transformers' quantizer replaces modules by those of compressed-tensors, as `from_pretrained` does for such a checkpoint.
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        quantizer = AutoHfQuantizer.from_config(CompressedTensorsConfig.from_dict(dict(block)), pre_quantized=True)
        quantizer.validate_environment()
        quantizer.preprocess_model(meta_model)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and log messages."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Within the context standard error is closed: a Rust panic, which becomes an exception here, prints its stack there."""
    sys.stderr.flush()
    descriptor, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(descriptor, 2)
        os.close(descriptor)


def load_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the processor of the model in `path`, which neither truncates nor pads unless it is asked to.

    Raises:
        UserError: it cannot be loaded, takes no images, or has a setting that is out of bounds.
    """
    check_processor(Path(path))
    remedy = "; copy the tokenizer and processor files from the source"
    with foreign_errors(f"{path} has no usable processor", remedy), _stderr_closed():
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    if not hasattr(processor, "image_processor"):
        raise UserError(f"{path} has a tokenizer but no image processor; copy preprocessor_config.json from the source")
    if not isinstance(getattr(processor, "image_token", ""), str):
        raise UserError(f"{path}: the processor's image_token is no text; copy the processor's files from the source")
    # Tools that calibrate leave their truncation in tokenizer.json, and transformers 5.17 takes it for the processor's own
    # (`_merge_kwargs` in `processing_utils.py` reads the tokenizer's `init_kwargs`): prompts would lose their end.
    for key in _LIMITS:
        processor.tokenizer.init_kwargs.pop(key, None)
    if (backend := getattr(processor.tokenizer, "backend_tokenizer", None)) is not None:
        backend.no_truncation()
        backend.no_padding()
    return processor


def check_shapes(path: Path, meta_model: PreTrainedModel, names: dict[str, str]) -> None:
    """Raise `UserError` where a tensor's shape on disk is not the model's, or its type not of numbers with a fraction; no
    weight is read."""
    headers = tensor_headers(path)
    state = meta_model.state_dict(keep_vars=True)
    for memory, disk in names.items():
        shape = tuple(headers[disk]["shape"])
        if shape != tuple(state[memory].shape):
            raise UserError(
                f"tensor '{disk}' in {path / headers[disk]['file']} has shape {list(shape)}, config.json asks for "
                f"{list(state[memory].shape)}; {OTHER_CONFIG}"
            )
        if state[memory].is_floating_point() and not tensor_files.DTYPES[headers[disk]["dtype"]].is_floating_point:
            raise UserError(
                f"tensor '{disk}' in {path / headers[disk]['file']} is stored as {headers[disk]['dtype']}, and the model's is "
                "of numbers with a fraction; download it again"
            )


def _names(path: Path, meta_model: PreTrainedModel) -> tuple[dict[str, str], set[str]]:
    """`disk_names` of a folder, and its `unused_tensors`. Raises `UserError`, also for a tensor in a weight file that the index
    does not name."""
    headers = tensor_headers(path)
    try:
        return disk_names(meta_model, headers), set()
    except UserError:
        unused = unused_tensors(meta_model, headers)
    try:
        return disk_names(meta_model, headers, unused), unused
    except UserError:
        used = {ADAPTER_WEIGHTS, *(entry["file"] for entry in headers.values())}
        others = [file for file in sorted(path.glob("*.safetensors")) if file.name not in used]
        unnamed = {entry.name: file.name for file in others for entry in read_entries(file)}
        try:
            disk_names(meta_model, {**headers, **unnamed}, unused)
        except UserError:
            unnamed = {}
        if not unnamed:
            raise
    first, file = next(iter(unnamed.items()))
    raise UserError(
        f"{path / INDEX} does not name {len(unnamed)} tensors of the model, first '{first}' in {file}; add them to its "
        "weight_map"
    )


def _check_head(path: Path, meta_model: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Raise `UserError` for a tied parameter that is also stored, with different values: transformers 5 uses them
    (`tie_weights` in `modeling_utils.py`), vLLM ignores them."""
    config = read_config(path)
    text = config.get("text_config")
    for name, other in tied_names(meta_model).items():
        if name not in names or other not in names:
            continue
        stored = stored_tensors(path)
        values, shared = (tensor_files.map_tensors({key: stored[names[key]]})[key] for key in (name, other))
        if not torch.equal(values, shared.to(values)):
            tie = "tie_word_embeddings"
            said = any(tie in part for part in (config, text) if isinstance(part, Mapping))
            raise UserError(
                f"{path}: config.json {'has' if said else 'lacks'} {tie}, {'' if said else 'which is true by default, '}but "
                f"'{names[name]}' is not '{names[other]}': transformers would take it and vLLM would not; set {tie} to false, "
                f"at the top and in text_config, or remove the tensor"
            )


def _check_finite(model: PreTrainedModel, path: Path, names: Mapping[str, str], every: bool) -> None:
    """Raise `UserError` for NaN and infinity, unless `every` in converted tensors alone."""
    entries = stored_tensors(path)
    for name, tensor in model.state_dict().items():
        stored = entries.get(names.get(name, ""))
        if not every and stored and tensor_files.DTYPES[stored.spec.dtype] == tensor.dtype:
            continue
        if tensor_files.all_finite(tensor):
            continue
        if stored and tensor_files.all_finite(tensor_files.read_tensor(stored)):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{path}: tensor '{name}' has numbers too large for {kind}; use --dtype bfloat16 or float32"
            )
        raise UserError(
            f"{path}: tensor '{name}' holds NaN or infinity; take a checkpoint from before, or download this one again"
        )


@dataclass(frozen=True)
class Source:
    """A checkpoint's config.json and the headers of its weight files. Create it once, with `Source.of`, and pass it on.

    Attributes:
        path: the checkpoint's folder.
        config: the content of config.json.
        spec: the model's family.
        meta_model: the model on the meta device, shapes only.
        stored: tensor name on disk -> type and shape.
        names: memory name of a parameter -> its name on disk.
        headers: whether `stored` is what the weight files hold; otherwise it is what they would hold.
        copies: name of a tensor that is not on disk -> that of the tensor whose value it has.
        choice: the type of floating tensors that is asked for (`FloatType.of`).
        unused: names on disk of tensors that the model's class does not have (`unused_tensors`), which are left out.
    """

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    meta_model: PreTrainedModel
    stored: dict[str, Spec]
    names: dict[str, str]
    headers: bool = True
    copies: Mapping[str, str] = field(default_factory=dict)
    choice: Choice = "auto"
    unused: Collection[str] = ()

    @staticmethod
    def of(path: Path) -> Source:
        """Open the checkpoint in a folder. Raises `UserError` for one that is unusable, damaged or of an unknown family."""
        config = read_config(path)
        spec = spec_for(config)
        model, headers = build_meta_model(path), tensor_headers(path)
        names, unused = _names(path, model)
        _check_head(path, model, names)
        kept = {name: header for name, header in headers.items() if name not in unused}
        stored = {name: Spec(header["dtype"], tuple(header["shape"])) for name, header in kept.items()}
        return Source(path, config, spec, model, stored, names, unused=unused)

    @staticmethod
    def outline(path: Path) -> Source:
        """A source for a folder with only config.json: every tensor of the model, in the config's dtype, by memory name."""
        config = read_config(path, weights=False)
        spec = spec_for(config)
        model = build_meta_model(path, weights=False)
        tied = tied_names(model)
        stored = {name: Spec.of(tensor) for name, tensor in model.state_dict().items() if name not in tied}
        names = {name: name for name in stored}
        return Source(path, config, spec, model, stored | draft_specs(spec, config, model), names, headers=False)

    @cached_property
    def blocks(self) -> list[list[Group]]:
        """The groups of linear layers of each decoder block."""
        return decoder_blocks(self.meta_model, self.spec)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Tensor name on disk -> location of its bytes."""
        on_disk = stored_tensors(self.path)
        return {name: replace(on_disk[self.copies.get(name, name)], name=name) for name in self.stored}

    @cached_property
    def float_type(self) -> FloatType:
        """The type of the model's floating tensors in memory and in written checkpoints."""
        return FloatType.of(self.config, self.stored.values(), self.choice, self.spec, self.meta_model)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Tensor name on disk -> type and shape in which it is written if it is not quantized."""
        memory = {disk: name for name, disk in self.names.items()}
        return {name: self.float_type.spec(memory.get(name, name), spec) for name, spec in self.stored.items()}

    @cached_property
    def written(self) -> dict[str, str]:
        """Memory name of a parameter -> its name in written checkpoints, which every engine finds."""
        return written_names(self.names, self.spec)

    @cached_property
    def unfound(self) -> dict[str, str | None]:
        """Name on disk of a tensor that vLLM does not find -> its name in written checkpoints; None: it is left out."""
        return unfound(self.names, self.spec, self.stored)

    @property
    def vlm(self) -> VLM:
        """The model as a `VLM` without weights and processor, for code that only needs modules and shapes."""
        return VLM(self.meta_model, None, self.spec, self.path)

    def shapes(self, group: Group) -> list[tuple[int, int]]:
        """`(out, in)` of each linear layer of a group."""
        weights = [self.meta_model.get_parameter(f"{name}.weight") for name in group.linears]
        return [(weight.shape[0], weight.shape[1]) for weight in weights]

    def weights(self, group: Group) -> list[Spec]:
        """Type and shape on disk of each weight of a group."""
        return [self.stored[self.names[f"{name}.weight"]] for name in group.linears]


def unused_text(source: Source) -> list[str]:
    """At most one message, about stored tensors that are left out."""
    if not source.unused:
        return []
    what = f"{len(source.unused)} tensors are of no part of {type(source.meta_model).__name__}, first '{min(source.unused)}'"
    return [f"{what}; they are left out, and engines may refuse the original for them"]


def cast_text(source: Source) -> list[str]:
    """At most one message, about stored tensors that are written in another type or stay in float32."""
    name = source.float_type.name
    changed = [source.stored[key].dtype for key, spec in source.specs.items() if spec.dtype != source.stored[key].dtype]
    if changed and source.choice == "auto":
        kinds = " and ".join(sorted({str(tensor_files.DTYPES[dtype]).removeprefix("torch.") for dtype in changed}))
        return [
            f"{len(changed)} tensors are stored in {kinds} and written in {name}, the model's type (--dtype: another)"
        ]
    if name == "float32" and source.choice == "auto":
        return ["the model is in float32, and so is what is not quantized: --dtype bfloat16 halves that"]
    return []
