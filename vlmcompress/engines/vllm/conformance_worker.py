"""vLLM for `engines/worker.py`: one engine after another in one process, each asked by a plan. Judges nothing.

A job has `engines`, a list of

    {"name", "model": folder, "config": {...}, "options": {of vllm.LLM}, "rounds": [round, ...]}

where `config` is written to the folder as its config.json, and a round is

    {"name", "ask": [id of a request, ...], "sampling": {of SamplingParams; "json": a schema}, ...}
    alone     one request after the other; default: all at once
    reset     caches to empty before, of "prefix" and "encoder"
    stream    the text is reported in the pieces in which it came
    abort     ids of requests to abort after so many `steps` of the engine

The result of each engine is `{"about": {...}, "rounds": {name: {id: record}}}`, or `{"error": line}`. The record of id `""`
is of a whole round. The engine runs in this process (no multiprocessing) and without compilation, so that its model can be
watched.

A job without `engines` asks where vLLM's own loading puts each tensor of a checkpoint: its model is built without memory (on
torch's meta device) and given the checkpoint's tensors, without their contents, one by one. A request is `{"id": name,
"folder": path}`, its answer

    {"class": of the model, "places": {tensor: [parameter, ...]}, "lost": {tensor: error}, "missing": [parameter, ...]}

A tensor whose places are none is one that vLLM knows and leaves out, such as those of a tower's unused last layer. A checkpoint
of which no model can be built gives `{"error": line}`.

Imports only the standard library and what vLLM brings along.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import json
import os
import re
import traceback
from typing import Any

PACKAGE = "vllm"
LOGPROBS = 5


def start(job: dict):
    """Return no engine, as each is loaded later, and a description."""
    import vllm
    from vllm.platforms import current_platform

    if "engines" not in job:
        start_group(f"file://{job['requests']}.group")
    return None, {"name": "vllm", "version": vllm.__version__, "device": current_platform.device_type}


def answers(_, requests, job: dict):
    """Yield the name of each engine with the results of its rounds, or of each folder with what vLLM makes of its tensors."""
    if "engines" in job:
        conversations = {request["id"]: request["messages"] for request in requests}
        for plan in job["engines"]:
            yield plan["name"], run(plan, conversations, job["media"])
        return
    for request in requests:
        try:
            yield request["id"], tensor_places(request["folder"])
        except Exception as error:
            traceback.print_exc()
            yield request["id"], {"error": line(error)}


def run(plan: dict, conversations: dict, media: str) -> dict:
    """Run one engine from its start to its end."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    options = {"allowed_local_media_path": media, "enforce_eager": True, "disable_log_stats": True, **plan["options"]}
    options = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}} | options
    if current_platform.is_cpu():
        options.setdefault("block_size", 32)  # by default 128, which is longer than many prompts: none would be cached
        options |= able(plan["config"], options)
    llm = None
    try:
        with open(os.path.join(plan["model"], "config.json"), "w", encoding="utf-8") as file:
            json.dump(plan["config"], file)
        llm = vllm.LLM(plan["model"], max_logprobs=LOGPROBS, **options)
        watched = Watched(llm)
        rounds = {each["name"]: Round(llm, watched, each).run(conversations) for each in plan["rounds"]}
        return {"about": about(llm), "rounds": rounds}
    except Exception as error:
        traceback.print_exc()
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def able(config: dict, options: dict) -> dict:
    """What differs from `options` where vLLM's CPU build can't do as they say: in decoders with Gated DeltaNets.

    Their kernel computes in bfloat16 only, and Triton, which that build lacks, copies their states for the prefix cache.
    """
    from vllm.triton_utils import HAS_TRITON

    text = config.get("text_config") or config
    if "linear_attention" not in (text.get("layer_types") or ()):
        return {}
    dtype = "auto" if options["dtype"] == "float32" else options["dtype"]
    return {"dtype": dtype} | ({} if HAS_TRITON else {"enable_prefix_caching": False})


def about(llm) -> dict:
    """Describe the engine's budgets, and the requests left in it when all are answered."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget

    config = llm.llm_engine.vllm_config
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "step_tokens": config.scheduler_config.max_num_batched_tokens,
        "image_tokens": MultiModalBudget(config, MULTIMODAL_REGISTRY).mm_max_toks_per_item["image"],
        "unfinished": llm.llm_engine.get_num_unfinished_requests(),
        "kv_usage": scheduler.kv_cache_manager.usage,
    }


class Watched:
    """Counts the images that the encoder gets, and keeps the positions that the language model gets."""

    def __init__(self, llm):
        self.encoded = 0
        self.positions: list[Any] = []
        llm.apply_model(self._hook)

    def _hook(self, model) -> None:
        embed = model.embed_multimodal

        def counted(*args, **kwargs):
            rows = embed(*args, **kwargs)
            self.encoded += len(rows)
            return rows

        model.embed_multimodal = counted
        layers = (module for name, module in model.named_modules() if re.search(r"model\.layers\.\d+$", name))
        *_, last = layers
        last.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module, args, kwargs) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[0]
        self.positions.append(positions.expand(3, -1).cpu().clone())

    def take(self) -> dict:
        """Return the number of images encoded and the positions `[3, tokens]` given since the last call."""
        import torch

        positions = torch.cat([torch.zeros(3, 0).long(), *self.positions], 1).tolist()
        record = {"encoded": self.encoded, "positions": positions}
        self.encoded, self.positions = 0, []
        return record


class Round:
    """One pass over some of the requests."""

    def __init__(self, llm, watched: Watched, plan: dict):
        self.llm, self.engine, self.watched, self.plan = llm, llm.llm_engine, watched, plan

    def run(self, conversations: dict) -> dict[str, Any]:
        """Run the round; return a record for each request, and under `""` one of the whole round."""
        for cache in self.plan.get("reset", ()):
            {"prefix": self.llm.reset_prefix_cache, "encoder": self.engine.reset_encoder_cache}[cache]()
        self.watched.take()
        subset = {name: conversations[name] for name in self.plan["ask"]}
        if not self.plan.get("alone"):
            return self._ask(subset) | {"": {"encoded": self.watched.take()["encoded"]}}
        records: dict[str, Any] = {}
        for name, messages in subset.items():
            records[name] = self._ask({name: messages})[name] | self.watched.take()
        return records

    def _ask(self, conversations: dict) -> dict[str, Any]:
        records: dict[str, Any] = {}
        for name, messages in conversations.items():
            (prompt,) = self.llm._preprocess_chat([messages])
            hashes = (prompt.get("mm_hashes") or {}).get("image", [])
            records[name] = {"prompt": list(prompt["prompt_token_ids"]), "media": list(hashes), "pieces": []}
            self.engine.add_request(name, prompt, self._sampling())
        steps = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self._note(records[output.request_id], output)
            steps += 1
            if steps == self.plan.get("steps"):
                self.engine.abort_request(list(self.plan["abort"]))
        return records

    def _sampling(self):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        options = {"temperature": 0.0, "logprobs": LOGPROBS, **self.plan.get("sampling", {})}
        if schema := options.pop("json", None):
            options["structured_outputs"] = StructuredOutputsParams(json=schema)
        kind = RequestOutputKind.DELTA if self.plan.get("stream") else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**options, output_kind=kind)

    def _note(self, record: dict, output) -> None:
        """Add the output of a step of the engine to a request's record."""
        if self.plan.get("stream"):
            record["pieces"].append(output.outputs[0].text)
        if output.finished:
            best = output.outputs[0].logprobs or []
            record |= {
                "cached": output.num_cached_tokens or 0,
                "tokens": [list(answer.token_ids) for answer in output.outputs],
                "text": [answer.text for answer in output.outputs],
                "finish": [answer.finish_reason for answer in output.outputs],
                "best": [[[token, value.logprob] for token, value in step.items()] for step in best],
            }


def start_group(address: str) -> None:
    """Start process groups of one; vLLM's layers ask them for their rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, address, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def tensor_places(folder: str) -> dict:
    """Where vLLM's own loading puts each tensor of a folder."""
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
        for name, tensor in tensors(folder):
            try:
                places[name] = sorted(takers(model, name, tensor))
            except Exception as error:
                lost[name] = line(error)
    loaded = {parameter for parameters in places.values() for parameter in parameters}
    with contextlib.suppress(ValueError):  # it adds what a checkpoint need not have, then complains about the rest
        quantized = config.model_config.quantization is not None
        DefaultModelLoader(config.load_config).track_weights_loading(model, loaded, quantized=quantized)
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    return {"class": type(model).__name__, "places": places, "lost": lost, "missing": missing}


def takers(model, name: str, tensor):
    """The parameters that take a tensor. Some are made on the engine's device whatever is asked for: they need contents."""
    import torch

    try:
        return model.load_weights([(name, tensor)])
    except NotImplementedError:  # contents of tensors that have none
        return model.load_weights([(name, torch.zeros_like(tensor, device="cpu"))])


def tensors(folder: str):
    """Name and shape of each stored tensor, as tensors without contents."""
    from safetensors import safe_open

    for file in sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors"))):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                yield name, stored.get_tensor(name).to("meta")  # mapped from the file, of which no page is read


def line(error: Exception) -> str:
    """The first sentence of an error; vLLM lists all of a model's parameters behind it."""
    return " ".join(f"{type(error).__name__}: {error}".split()).split(" The available parameters")[0][:300]
