"""Load a model with its weights.

`load` checks a checkpoint from headers alone, opens it, loads its processor, and looks at the values. `open_model` is
transformers' `from_pretrained` with the tensors that `_read.stored_tensors` chooses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoProcessor, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from vlmcompress.models import _experts
from vlmcompress.models._names import COMPUTED, flattened
from vlmcompress.models._read import (
    family_of,
    mixture,
    read_config,
    read_json,
    require_unquantized,
    spec_for,
    stored_tensors,
)
from vlmcompress.models._requirements import require_processor_sizes
from vlmcompress.models._source import (
    VLM,
    build_meta_model,
    compressed,
    placed_names,
    quiet_transformers,
    require_equal_head,
    require_shapes,
)
from vlmcompress.models._types import FloatType
from vlmcompress.utils import tensor_files
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.messages import error_text, foreign_errors


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
    # What config and headers tell, before gigabytes are read
    path = Path(path)
    config = read_config(path)
    spec = spec_for(config)
    require_unquantized(path, config)
    if config.get("auto_map") and not trust_remote_code:
        raise UserError(
            f"{path}/config.json would run Python code from the folder (auto_map); trust it with --set trust_remote_code=true"
        )
    meta_model = build_meta_model(path)
    names, _ = placed_names(path, meta_model)
    require_shapes(path, meta_model, names)
    require_equal_head(path, meta_model, names)
    with quiet_transformers():
        try:
            model, info = open_model(path, meta_model, dtype=dtype, trust_remote_code=trust_remote_code)
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{path} does not load ({error_text(error)}); restore it from the source") from error
        processor = load_processor(path, trust_remote_code)
    # What only the weights tell
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(what):
            first = sorted(map(str, info[what]))[0]
            raise UserError(f"{path}: {what.replace('_', ' ')} at load, first {first}; download it again")
    _require_finite(model, path, names, check)
    return VLM(model.eval().requires_grad_(False).to(device), processor, spec, path)


def _require_finite(model: PreTrainedModel, path: Path, names: Mapping[str, str], every: bool) -> None:
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
    if (family := family_of(content)) and family.tower.mend:
        family.tower.mend(model)
    if spec and meta_model is not None:
        names = {key: disk for key, disk in placed_names(path, meta_model)[0].items() if inside in key}
        _experts.put_in(model, meta_model, {key: stored[disk] for key, disk in names.items()})
    return model, info | {
        # what is computed from config.json is missing in every checkpoint
        "missing_keys": {key for key in info["missing_keys"] if not key.endswith(COMPUTED)}
    }


def _class(path: Path, content: dict[str, Any], trust_remote_code: bool) -> tuple[PreTrainedConfig, Any]:
    """Config and class of a model: transformers' own, or those of the folder's Python code if that is trusted."""
    reference = (content.get("auto_map") or {}).get("AutoModelForImageTextToText") if trust_remote_code else None
    if reference:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=True)
        return config, get_class_from_dynamic_module(reference, str(path), local_files_only=True)
    config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    return config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


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


_LIMITS = ("max_length", "truncation", "truncation_strategy", "stride", "padding", "pad_to_multiple_of")
"""Settings of a tokenizer that shorten or lengthen what it encodes."""


def load_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the processor of the model in `path`, which neither truncates nor pads unless it is asked to.

    Raises:
        UserError: it cannot be loaded, takes no images, or has a setting that is out of bounds.
    """
    require_processor_sizes(Path(path))
    remedy = "; copy the tokenizer and processor files from the source"
    with foreign_errors(f"{path} has no usable processor", remedy):
        try:
            processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        except ImportError as error:
            needed = " ".join(str(error).split()).partition(" but ")[0]
            raise UserError(f"{path}: {needed}; install it with pip, torchvision in the build of your torch") from error
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
