"""The number of visual features that a model computes for its inputs, and the processor settings for as many placeholders.

The processor computes the number from its own settings, which have to agree with config.json but are saved separately. Where
they differ, most models of transformers 5.17 raise ("Image features and image tokens do not match"); Idefics3 silently uses
too few features, or shifts them.

The number of features is asked of the model's own code, with the blocks of the vision tower left out: these do not change how
many rows there are. Of the rest (patch embedding, merger, projector) each matrix computes one row: whole products take 5 s for
an image of 1024x768 in Qwen2.5-VL-7B. The errors that the code raises for images that it cannot take come as well. No weights
are needed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmcompress.models._modules import tower_blocks

if TYPE_CHECKING:
    from vlmcompress.models._source import VLM
    from vlmcompress.models._spec import ModelSpec

_CALLS = {"get_image_features": "pixel_values", "get_video_features": "pixel_values_videos"}


@torch.no_grad()
def visual_features(vlm: VLM, inputs: Mapping[str, Tensor]) -> int:
    """The number of features with which the model replaces placeholders.

    Args:
        vlm: a loaded model, or one on the meta device.
        inputs: the processor's output for a conversation.

    Raises:
        Exception: anything that the model's code raises for images that it cannot process.
    """
    meta = vlm.model.device.type == "meta"
    model: Any = outlined(vlm.model, vlm.spec) if meta else vlm.model
    device = "cpu" if meta else model.device
    features = 0
    with _shapes_alone(model, vlm.spec):
        for call, pixels in _CALLS.items():
            arguments = {
                name: value.to(device, model.dtype if value.is_floating_point() else value.dtype)
                for name, value in visual_inputs(vlm, inputs, call).items()
            }
            if not arguments:
                continue
            returned = getattr(model.model, call)(**arguments)
            output = vlm.spec.images.features(returned) if vlm.spec.images.features else returned.pooler_output
            features += sum(
                rows.shape[:-1].numel() for rows in (output if isinstance(output, list | tuple) else [output])
            )
            if (
                call == "get_video_features" and vlm.spec.images.newlines
            ):  # LLaVA-OneVision's `forward` adds one to each video
                features += len(inputs[pixels])
    return features


def visual_inputs(vlm: VLM, inputs: Mapping[str, Tensor], call: str) -> dict[str, Tensor]:
    """The inputs that determine a model's visual features, as arguments of the method `call` of transformers' model."""
    core: Any = vlm.model.model
    if _CALLS[call] not in inputs or not hasattr(core, call):
        return {}
    first, *others = inspect.signature(
        getattr(core, call)
    ).parameters  # LLaVA-OneVision's method for videos names its argument `pixel_values`
    return {first: inputs[_CALLS[call]], **{name: inputs[name] for name in others if name in inputs}}


def visual_shape(vlm: VLM, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """A key that is equal only for inputs with equally many features: shapes of pixels, and values of sizes."""
    return tuple(
        (name, *value.shape, b"" if value.is_floating_point() else value.numpy(force=True).tobytes())
        for call in _CALLS
        for name, value in visual_inputs(vlm, inputs, call).items()
    )


@contextlib.contextmanager
def _shapes_alone(model: nn.Module, spec: ModelSpec) -> Iterator[None]:
    """Within the context tower and projector have outputs of the right shapes alone: the tower's blocks hand on what they get,
    and matrices give zeros."""
    forwards: dict[Any, Callable[..., Tensor]] = dict.fromkeys(tower_blocks(model, spec), _unchanged)
    for path in (*spec.vision, *spec.projector):
        for module in model.get_submodule(path).modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
                forwards[module] = functools.partial(_zeros, module, module.forward)
    before = {module: vars(module).get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _unchanged(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _zeros(module: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Zeros in the shape of a module's output. The first row, or image, is computed, to raise for inputs of a wrong shape."""
    rows = inputs.flatten(0, -2) if isinstance(module, nn.Linear) else inputs
    first = forward(rows[:1])
    return first.new_zeros((len(rows), *first.shape[1:])).unflatten(0, inputs.shape[: inputs.dim() - rows.dim() + 1])


def outlined(model: nn.Module, spec: ModelSpec) -> Any:
    """A copy of a model on the meta device with zeros in the parts that `visual_features` runs; it shares the rest."""
    outer, core = copy.copy(model), copy.copy(model.get_submodule("model"))
    parts = {path.split(".")[1] for path in (*spec.vision, *spec.projector)}
    core._modules = {name: copy.deepcopy(child) if name in parts else child for name, child in core._modules.items()}
    core._parameters, outer._modules = dict(core._parameters), {**outer._modules, "model": core}
    blocks = {module for block in tower_blocks(outer, spec) for module in block.modules()}
    run = [module for name in sorted(parts) for module in core.get_submodule(name).modules() if module not in blocks]
    for module in (core, *run):  # the core has direct parameters, such as `image_newline`
        for key, value in module._parameters.items():
            if value is not None:
                module._parameters[key] = nn.Parameter(torch.zeros(value.shape, dtype=value.dtype), requires_grad=False)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return outer


def wrong_settings(vlm: VLM) -> str | None:
    """The settings to change in the processor's files to match config.json, as a message; None: nothing differs."""
    files: dict[str, list[str]] = {}
    for key, value in (vlm.spec.images.placeholders(vlm.model.config) if vlm.spec.images.placeholders else {}).items():
        owner, _, name = key.rpartition(".")
        settings = getattr(vlm.processor, owner, None) if owner else vlm.processor
        if (present := getattr(settings, name, None)) != value:
            now = f"is {json.dumps(present, default=str)}" if present is not None else "is missing"
            files.setdefault(_file(vlm.path, key), []).append(f"{name} to {json.dumps(value)} (it {now})")
    return "; ".join(f"in {file} set {', '.join(lines)}" for file, lines in files.items()) or None


def _file(folder: Path, key: str) -> str:
    """The processor file in which a setting is read."""
    names = ("processor_config.json", "preprocessor_config.json")
    whole, images = ((folder / name).is_file() for name in names)
    if not key.startswith("image_processor."):
        return names[0] if whole else f"{names[0]} (a new file)"
    return names[1] if images or not whole else f"{names[0]}, below image_processor,"
