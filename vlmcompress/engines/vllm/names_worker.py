"""vLLM for `engines/worker.py`: the parameters into which vLLM loads each tensor of a checkpoint.

The model is built on torch's meta device, and the checkpoint's tensors, without contents, are loaded into it one by one. A
request is `{"id": name, "folder": path}`, its answer

    {"class": of the model, "places": {tensor: [parameter, ...]}, "lost": {tensor: error}, "missing": [parameter, ...]}

A tensor without places is one that vLLM deliberately skips, such as those of a tower's unused last layer. It skips any bias
that its layer has not (`AutoWeightsLoader`), as GPTQ's files have zeros there; one with other values is lost. A checkpoint
for which no model can be built gives `{"error": line}`. Imports only the standard library and vLLM's dependencies.
"""

from __future__ import annotations

import contextlib
import glob
import os
import traceback

PACKAGE = "vllm"
NO_BIAS = "its layer has no bias in vLLM"


def start(job: dict):
    """Return None as the engine, as only models are built, and a description. vLLM's layers need process groups."""
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.platforms import current_platform

    # As vLLM's worker does for `LLM` (`v1/worker/gpu_worker.py::init_worker_distributed_environment`): groups of one.
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{job['requests']}.group", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    return None, {"name": "vllm", "version": vllm.__version__, "device": current_platform.device_type}


def answers(_, requests, job: dict):
    """Yield the name of each folder with the places of its tensors."""
    for request in requests:
        try:
            yield request["id"], tensor_places(request["folder"])
        except Exception as error:
            traceback.print_exc()
            yield request["id"], {"error": line(error)}


def tensor_places(folder: str) -> dict:
    """Find the parameters into which vLLM loads each tensor of a folder."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(model=folder, enforce_eager=True).create_engine_config()
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    places: dict[str, list[str]] = {}
    lost: dict[str, str] = {}
    with set_current_vllm_config(config):
        with set_default_torch_dtype(dtype), torch.device("meta"):
            model = initialize_model(vllm_config=config)
        # One tensor per call, so that an error can be attributed; `load_weights` of all families accepts parts of a
        # checkpoint.
        biases = []
        for name, tensor, counts in tensors(folder):
            try:
                places[name] = sorted(takers(model, name, tensor))
            except Exception as error:
                lost[name] = line(error)
            else:
                biases += [name] if counts and not places[name] else []
    used = {name.rpartition(".")[0] for name, parameters in places.items() if parameters}
    lost |= dict.fromkeys((name for name in biases if name.rpartition(".")[0] in used), NO_BIAS)
    loaded = {parameter for parameters in places.values() for parameter in parameters}
    # vllm/model_executor/model_loader/default_loader.py::DefaultModelLoader.track_weights_loading adds optional parameters to
    # `loaded`, then raises for missing ones.
    with contextlib.suppress(ValueError):
        quantized = config.model_config.quantization is not None
        DefaultModelLoader(config.load_config).track_weights_loading(model, loaded, quantized=quantized)
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    return {"class": type(model).__name__, "places": places, "lost": lost, "missing": missing}


def takers(model, name: str, tensor):
    """The names of the parameters that load a tensor, which gets contents only if the loader needs them."""
    import torch

    try:
        return model.load_weights([(name, tensor)])
    except NotImplementedError:  # the loader needs contents, which meta tensors lack
        return model.load_weights([(name, torch.zeros_like(tensor, device="cpu"))])


def tensors(folder: str):
    """Name and shape of each stored tensor, as tensors without contents, and whether it is a bias that is not zero."""
    from safetensors import safe_open

    for file in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                tensor = stored.get_tensor(name)  # memory-mapped: only a bias's pages are read
                yield name, tensor.to("meta"), name.endswith(".bias") and bool(tensor.any())


def line(error: Exception) -> str:
    """The first sentence of an error; vLLM lists all of a model's parameters after it."""
    return " ".join(f"{type(error).__name__}: {error}".split()).split(" The available parameters")[0][:300]
