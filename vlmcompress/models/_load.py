"""Open a model folder: its config and headers (`Source`), the model without weights, or model and processor."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CompressedTensorsConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AutoHfQuantizer

from vlmcompress.common.messages import foreign_errors, reason
from vlmcompress.common.tensor_files import Entry, Spec
from vlmcompress.errors import UserError
from vlmcompress.models import _experts
from vlmcompress.models._checks import check_architecture, check_experts, check_processor, check_total, unknown
from vlmcompress.models._modules import decoder_blocks, draft_specs
from vlmcompress.models._names import COMPUTED, disk_names, tied_names, unfound, written_names
from vlmcompress.models._read import (
    all_specs,
    family_of,
    mixture,
    read_config,
    refuse_quantized,
    stored_tensors,
    tensor_headers,
)
from vlmcompress.models._spec import Group, ModelSpec
from vlmcompress.models._template import endless


@dataclass(frozen=True)
class VLM:
    """A loaded model. `processor` turns images and chat messages into model inputs."""

    model: PreTrainedModel
    processor: Any
    spec: ModelSpec
    path: Path


def spec_for(config: dict) -> ModelSpec:
    """The family of a config.json, by its `model_type`. Raises `UserError` for one of no family, or of two at once."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError("config.json has no model_type; give the folder of a Hugging Face checkpoint")
    spec = family_of(config)
    if spec is None:
        raise unknown(config, [name for spec in all_specs() for name in spec.model_types])
    check_architecture(config)
    check_experts(config, spec)
    return spec


def build_meta_model(path: str | Path, weights: bool = True, ours_only: bool = True) -> PreTrainedModel:
    """Build the model of `path` on the meta device: names and shapes, no weights read.

    Args:
        weights: False: the folder may lack weight files.
        ours_only: False: any model type that transformers has.
    """
    content, file = read_config(path, weights), Path(path) / "config.json"
    spec = spec_for(content) if ours_only else None
    if not ours_only and isinstance(content.get("model_type"), str) and content["model_type"] not in CONFIG_MAPPING:
        raise unknown(content, [name for spec in all_specs() for name in spec.model_types])
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            meta_model = AutoModelForImageTextToText.from_config(config)
        if spec:
            _experts.split(meta_model, spec)
    except Exception as error:  # any value in a config can be wrong, and each raises something of its own
        raise UserError(f"{file} is not a valid config ({reason(error)}); restore it from the source") from error
    if weights:
        parameters = sum(parameter.numel() for parameter in meta_model.parameters())
        check_total(parameters, tensor_headers(path).values(), bool(content.get("quantization_config")), file)
    return meta_model


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> VLM:
    """Load model and processor.

    Args:
        path: folder of a Hugging Face checkpoint.
        device: where the weights go.
        dtype: floating-point type of the weights; None keeps that of the checkpoint.
        trust_remote_code: run Python code that the folder brings along. Only then may its config have an `auto_map`.
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
    names = disk_names(meta_model, tensor_headers(path))
    check_shapes(path, meta_model, names)
    options = {"use_safetensors": True, "trust_remote_code": trust_remote_code}
    with quiet():
        try:
            model, info = open_model(path, meta_model, dtype=dtype or "auto", **options)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{path} does not load ({reason(error)}); download it again") from error
        processor = load_processor(path, trust_remote_code)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            first = sorted(map(str, info[what]))[0]
            raise UserError(f"{path}: {what.replace('_', ' ')} at load, first {first}; download it again")
    _check_finite(model, path)
    return VLM(model.eval().requires_grad_(False).to(device), processor, spec, path)


def open_model(
    path: str | Path, meta_model: PreTrainedModel | None = None, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`from_pretrained` of transformers with `output_loading_info`, but with the experts of a mixture one by one, and with
    packed embeddings.

    transformers 5.17 builds the experts of a mixture fused, which compressed-tensors cannot quantize, and reads no
    checkpoint of Qwen3-VL that has them one by one. So it opens the model without them, and they are put in.

    Args:
        path: folder of a checkpoint, plain or in compressed-tensors.
        meta_model: the model on the meta device, whose parts may be used in the result; None: it is made if needed.
        options: further arguments of `from_pretrained`.
    """
    config = read_config(path)
    spec = mixture(config)
    options |= {"output_loading_info": True, "local_files_only": True}
    kind: Any = AutoModelForImageTextToText
    if spec is None:
        with _packed_embeddings():
            model, info = kind.from_pretrained(path, **options)
        return model, info | {"missing_keys": _lacking(info)}
    meta_model, stored = meta_model or build_meta_model(path), stored_tensors(path)
    kind = _experts.without_experts(type(meta_model), spec)
    compressed(meta_model, config.get("quantization_config") or {})
    with quiet(), _packed_embeddings():  # it would report the experts as left over
        model, info = kind.from_pretrained(path, **options)
    inside = f".{spec.experts}."
    _experts.put_in(
        model, meta_model, {key: stored[disk] for key, disk in disk_names(meta_model, stored).items() if inside in key}
    )
    unexpected = [key for key in info["unexpected_keys"] if inside not in key]
    return model, info | {"missing_keys": _lacking(info), "unexpected_keys": unexpected}


def _lacking(info: Mapping[str, Any]) -> set[str]:
    """Tensors that a checkpoint lacks, without those that config.json says."""
    return {key for key in info["missing_keys"] if not key.endswith(COMPUTED)}


@contextlib.contextmanager
def _packed_embeddings() -> Iterator[None]:
    """Let transformers 5.17 initialize an embedding that has no `weight`, as of linear layers it does."""
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
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        quantizer = AutoHfQuantizer.from_config(CompressedTensorsConfig.from_dict(dict(block)), pre_quantized=True)
        quantizer.validate_environment()
        quantizer.preprocess_model(meta_model)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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


def load_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the processor of the model in `path`. UserError when it cannot be loaded or takes no images."""
    check_processor(Path(path))
    remedy = "; copy the tokenizer and processor files from the source"
    with foreign_errors(f"{path} has no usable processor", remedy):
        processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    if not hasattr(processor, "image_processor"):
        raise UserError(f"{path} has a tokenizer but no image processor; copy preprocessor_config.json from the source")
    if not isinstance(getattr(processor, "image_token", ""), str):
        raise UserError(f"{path}: the processor's image_token is no text; copy the processor's files from the source")
    check_template(processor, path)
    return processor


def check_template(processor: Any, path: str | Path) -> None:
    """Raise `UserError` for a chat template that exceeds its bounds on a short conversation (`_template.endless`)."""
    for owner in (processor, getattr(processor, "tokenizer", None)):
        templates = getattr(owner, "chat_template", None)
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            if isinstance(template, str) and (why := endless(template)):
                raise UserError(f"the chat template of {path} is not usable: {why}; restore it from the source")


def check_shapes(path: Path, meta_model: PreTrainedModel, names: dict[str, str]) -> None:
    """Raise `UserError` where a tensor's shape on disk is not the model's; no weight is read."""
    headers = tensor_headers(path)
    state = meta_model.state_dict(keep_vars=True)
    for memory, disk in names.items():
        shape = tuple(headers[disk]["shape"])
        if shape != tuple(state[memory].shape):
            raise UserError(
                f"tensor '{disk}' in {path / headers[disk]['file']} has shape {list(shape)}, config.json asks for "
                f"{list(state[memory].shape)}; config and weights do not belong together"
            )


def _check_finite(model: PreTrainedModel, path: Path) -> None:
    """Raise `UserError` for NaN and infinity. The sum of a tensor is not finite if an entry is not (or if it overflows)."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float32)):
            continue
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: tensor '{name}' holds NaN or infinity; download the checkpoint again")


@dataclass(frozen=True)
class Source:
    """A checkpoint by its config.json and the headers of its weight files. Made once, with `Source.of`, and passed on.

    Attributes:
        path: the checkpoint's folder.
        config: the content of config.json.
        spec: the model's family.
        meta_model: the model on the meta device, shapes only.
        stored: tensor name on disk -> type and shape.
        names: memory name of a parameter -> its name on disk.
        headers: whether there are weight files; without, `stored` is what config.json asks for.
        copies: name of a tensor that is not on disk -> that of the tensor whose value it has.
    """

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    meta_model: PreTrainedModel
    stored: dict[str, Spec]
    names: dict[str, str]
    headers: bool = True
    copies: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(path: Path) -> Source:
        """Open the checkpoint in a folder. Raises `UserError` for one that is unusable, damaged or of an unknown family."""
        config = read_config(path)
        spec = spec_for(config)
        model, headers = build_meta_model(path), tensor_headers(path)
        stored = {name: Spec(header["dtype"], tuple(header["shape"])) for name, header in headers.items()}
        return Source(path, config, spec, model, stored, disk_names(model, headers))

    @staticmethod
    def outline(path: Path) -> Source:
        """A checkpoint of which only config.json is there: every tensor of the model, in the config's type, by memory name."""
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
        """Tensor name on disk -> where its bytes are."""
        on_disk = stored_tensors(self.path)
        return {name: replace(on_disk[self.copies.get(name, name)], name=name) for name in self.stored}

    @cached_property
    def written(self) -> dict[str, str]:
        """Memory name of a parameter -> its name in a checkpoint made from this one, by which every engine finds it."""
        return written_names(self.names, self.spec)

    @cached_property
    def unfound(self) -> dict[str, str | None]:
        """Name on disk of a tensor that vLLM does not find -> the name it is written under; None: it is left out."""
        return unfound(self.names, self.spec, self.stored)

    @property
    def vlm(self) -> VLM:
        """The model as a `VLM` without weights and processor, for code that needs modules and shapes alone."""
        return VLM(self.meta_model, None, self.spec, self.path)

    def shapes(self, group: Group) -> list[tuple[int, int]]:
        """`(out, in)` of each linear layer of a group."""
        weights = [self.meta_model.get_parameter(f"{name}.weight") for name in group.linears]
        return [(weight.shape[0], weight.shape[1]) for weight in weights]

    def weights(self, group: Group) -> list[Spec]:
        """Type and shape on disk of each weight of a group."""
        return [self.stored[self.names[f"{name}.weight"]] for name in group.linears]
