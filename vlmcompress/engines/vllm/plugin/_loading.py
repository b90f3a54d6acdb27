"""Check the config of a reduced checkpoint when vLLM loads it, and make the model use M-RoPE's interface.

Kept tokens keep their unreduced positions. vLLM numbers positions consecutively unless a model uses M-RoPE; then it gets three
rows of positions from the model. A family with plain RoPE declares that it uses M-RoPE, returns three equal rows and passes
one of them to its language model, whose RoPE does not change.

vLLM adjusts the config of some architectures by name (for Qwen3.5 the dtype of the recurrent state, which the checkpoint
specifies). The same is done for the reduced name.

`ResumableProcessor` and `ResumableModel` preserve the images of requests that vLLM preempts and resumes. If the prefix cache
covers an image, vLLM 0.32 sends workers only those of its fields that stay on the CPU (`strip_covered_mm_data`). If the
request is later preempted and its blocks are evicted, the image has to be encoded after all, and the runner (the CPU's and the
first one for GPUs) has only the fields sent at first: the engine ends with "Encoder cache miss", also without a reducer. So
here every field stays on the CPU, and the model moves the pixels itself.

`Unsupported` replaces a family's class in a vLLM that is too old or lacks something that the plugin depends on (`_contract`);
loading a reduced checkpoint then reports what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from vlmcompress.engines.vllm.plugin._contract import TESTED, broken, numbers, tested
from vlmcompress.utils.errors import UserError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class Loading:
    """vLLM's hook on configs of an architecture (`MODELS_CONFIG_MAP`).

    Attributes:
        original: vLLM's own hook for the original architecture, if there is one.
        problem: why checkpoints of the architecture cannot be served in this vLLM; None if they can.
    """

    original: Any = None
    problem: str | None = None

    # vllm/config/model.py::ModelConfig._try_verify_and_update_model_config calls this before anything is loaded: the first
    # place to refuse a checkpoint in one line.
    def verify_and_update_model_config(self, model_config: ModelConfig) -> None:
        """Raise ValueError, which ends the engine's start with one line, unless the checkpoint can be served."""
        import vllm
        from vllm.logger import init_logger
        from vllm.transformers_utils.config import uses_mrope

        from vlmcompress.engines.vllm.plugin._served_reducer import ServedReducer

        if self.problem:
            raise ValueError(self.problem)
        if numbers(vllm.__version__) not in TESTED:
            init_logger("vllm.vlmcompress").warning_once(
                "vlmcompress was tested with vLLM %s, and this is %s. All that its plugin reaches into is there; "
                "compare answers by `vlmcompress doctor %s --engine vllm`.",
                tested(),
                vllm.__version__,
                model_config.model,
            )
        config: Any = model_config.hf_config
        try:
            ServedReducer.of(config)
        except UserError as error:
            raise ValueError(f"{model_config.model}: {error}") from None
        # vllm/transformers_utils/config.py::uses_mrope looks for this key in the config, its text config and RoPE's parameters.
        if not uses_mrope(config):
            config.mrope_section = [1, 1, 1]
        if self.original is not None:
            self.original.verify_and_update_model_config(model_config)

    # vllm/config/vllm.py::VllmConfig.try_verify_and_update_config looks up hooks by architecture, so the original's would be
    # skipped.
    def verify_and_update_config(self, vllm_config: VllmConfig) -> None:
        """Apply vLLM's hook for the original architecture to the complete config."""
        if self.original is not None:
            self.original.verify_and_update_config(vllm_config)


def sent(data: Any, device: torch.device) -> Tensor:
    """Copy a tensor in main memory, or numbers, to a device asynchronously, through pinned memory."""
    from vllm.utils.platform_utils import is_pin_memory_available

    tensor = torch.as_tensor(data)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if is_pin_memory_available() else tensor).to(device, non_blocking=True)


PIXELS = "pixel_"  # prefix of the names of the encoder's input fields


class ResumableProcessor:
    """Mixin of a multimodal processor, put before vLLM's class: every field stays on the CPU."""

    # vllm/multimodal/utils.py::strip_covered_mm_data keeps fields with `keep_on_cpu`. Can go when vLLM resends the whole image
    # for a resumed request.
    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        parent: Any = super()
        fields = parent._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs)
        return {
            name: dataclasses.replace(config, field=dataclasses.replace(config.field, keep_on_cpu=True))
            for name, config in fields.items()
        }


class ResumableModel:
    """Mixin of a model, put before vLLM's class: moves the pixels to the device itself."""

    # vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._execute_mm_encoder moves only fields without `keep_on_cpu` to the
    # device, so the model has to move these.
    def embed_multimodal(self, **kwargs: Any) -> Any:
        """Encode as the model does, with the pixels moved to its device."""
        parent: Any = super()
        device = next(self.parameters()).device  # type: ignore[attr-defined]
        pixels = {name: value for name, value in kwargs.items() if name.startswith(PIXELS)}
        moved = tree_map_only(torch.Tensor, lambda part: sent(part, device), pixels)
        return parent.embed_multimodal(**kwargs | moved)


def problem(family: str) -> str | None:
    """Why the imported vLLM does not serve reduced checkpoints of a family; None if it does."""
    import vllm

    reason = f"this is vLLM {vllm.__version__}"
    if not () < numbers(vllm.__version__) < TESTED[0]:
        missing = broken("", family)
        if missing is None:
            return None
        reason = f"in vLLM {vllm.__version__} {missing}"
    return (
        f"this vlmcompress serves reduced checkpoints in vLLM {tested()}; {reason}: install one of those, "
        "or another vlmcompress"
    )


class Unsupported(nn.Module):
    """A class with the method names of a language model that raises an error when it is instantiated."""

    # vllm/model_executor/models/registry.py::_ModelRegistry inspects the class without instantiating it, and classifies one
    # with these methods as a language model.
    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        (name,) = vllm_config.model_config.hf_config.architectures
        raise ValueError(MODELS_CONFIG_MAP[name].problem)  # type: ignore[attr-defined]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError


def embedded(language_model: Any, ids: Tensor) -> Tensor:
    """Embed words `ids [n]` that are not tokens of the current step, without LoRA adapters: `[n, d]`.

    vLLM's layer with adapters assumes that its input are the step's tokens, each with its request's adapter.
    """
    model = language_model.model
    # vllm/lora/layers/vocab_parallel_embedding.py::VocabParallelEmbeddingWithLoRA.forward indexes adapters by the step's
    # tokens.
    table = model.embed_tokens
    model.embed_tokens = getattr(table, "base_layer", table)
    try:
        rows: Tensor = language_model.embed_input_ids(ids)
    finally:
        model.embed_tokens = table
    return rows
