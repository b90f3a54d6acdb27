"""A checkpoint before a weight is read: its config and headers (`Source`), and its model without weights."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, CompressedTensorsConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.quantizers.auto import AutoHfQuantizer

from vlmcompress.models import _experts
from vlmcompress.models._modules import decoder_blocks, mtp_specs
from vlmcompress.models._names import disk_names, tied_names, unfound, unused_tensors, written_names
from vlmcompress.models._read import read_config, require_model_type, spec_for, stored_tensors, tensor_headers
from vlmcompress.models._requirements import OTHER_CONFIG
from vlmcompress.models._spec import Group, ModelSpec
from vlmcompress.models._types import Choice, FloatType
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text
from vlmcompress.utils.model_folder import ADAPTER_WEIGHTS, INDEX
from vlmcompress.utils.tensor_headers import Entry, Spec, read_entries


@dataclass(frozen=True)
class VLM:
    """A loaded model.

    Attributes:
        processor: turns images and chat messages into model inputs.
        spec: the model's family.
        path: the folder that messages and records name: the recipe's model, also for one derived from it.
    """

    model: PreTrainedModel
    processor: Any
    spec: ModelSpec
    path: Path


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


def build_meta_model(path: str | Path, weights: bool = True, supported_only: bool = True) -> PreTrainedModel:
    """Build the model of `path` on the meta device: names and shapes, no weights read.

    Args:
        weights: whether weight files must exist.
        supported_only: whether the model type must have a family here; else any model type of transformers works.
    """
    content, file = read_config(path, weights), Path(path) / "config.json"
    spec = spec_for(content) if supported_only else None
    require_model_type(content)
    try:
        with quiet_transformers(), torch.device("meta"):
            config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
            with no_init_weights():
                meta_model = AutoModelForImageTextToText.from_config(config)
            meta_model.tie_weights()
        if spec:
            _experts.split_experts(meta_model, spec)
    except Exception as error:  # a wrong value in a config can raise anything
        raise UserError(f"{file} is not a valid config ({error_text(error)}); restore it from the source") from error
    return meta_model


def compressed(meta_model: PreTrainedModel, block: Mapping[str, Any]) -> None:
    """Give a meta model (shapes only) the layers that transformers builds for a `quantization_config` of compressed-tensors."""
    if not block.get("config_groups") and not block.get("kv_cache_scheme"):
        return
    # transformers' quantizer replaces modules by those of compressed-tensors, as `from_pretrained` does for such a checkpoint.
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
        quantizer = AutoHfQuantizer.from_config(CompressedTensorsConfig.from_dict(dict(block)), pre_quantized=True)
        quantizer.validate_environment()
        quantizer.preprocess_model(meta_model)


def placed_names(path: Path, meta_model: PreTrainedModel) -> tuple[dict[str, str], set[str]]:
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


def require_shapes(path: Path, meta_model: PreTrainedModel, names: dict[str, str]) -> None:
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


def require_equal_head(path: Path, meta_model: PreTrainedModel, names: Mapping[str, str]) -> None:
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
        names, unused = placed_names(path, model)
        require_equal_head(path, model, names)
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
        return Source(path, config, spec, model, stored | mtp_specs(spec, config, model), names, headers=False)

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
