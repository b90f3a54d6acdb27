"""The recipe and the flags of `vllm serve` that a plan recommends, each with its reason."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from vlmcompress.evaluation.capacity import cache_pool
from vlmcompress.evaluation.capacity.capacity import Capacity, FormatRow
from vlmcompress.evaluation.capacity.weight_bytes import QUANTIZED
from vlmcompress.quantization.plan import kv_cache


@dataclass(frozen=True)
class Flag:
    """A flag with its value and the reason for it."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        """The flag in shell syntax."""
        return f"{self.name} {shlex.quote(self.value)}"


def command(capacity: Capacity, row: FormatRow) -> str | None:
    """The command `vlmcompress quantize ...` that writes the format; None if there is nothing to write."""
    request, name = capacity.request, row.weights.name
    if row.weights.key == QUANTIZED or capacity.model.source is None:
        return None
    kv = request.kv_cache in ("fp8", "fp8_e4m3") and row.weights.scheme is not None
    if row.weights.scheme is None and not request.reduce:
        return None
    parts = ["vlmcompress", "quantize", capacity.model_name, "-o", "OUT"]
    parts += ["--scheme", "none" if row.weights.scheme is None else name]
    parts += [part for key, value in row.weights.options.items() for part in ("--set", f"options.{key}={value}")]
    parts += ["--tp", str(request.tp)] if request.tp > 1 and row.weights.scheme else []
    parts += ["--target", request.target_name] if request.target_name else []
    vocabulary = request.vocabulary if row.weights.scheme else {}
    parts += [part for key, value in vocabulary.items() for part in (f"--{key}", value)]
    parts += ["--kv-cache", "fp8"] if kv else []
    parts += ["--reduce", str(request.reduce)] if request.reduce else []
    return shlex.join(parts)


def serve_flags(capacity: Capacity, row: FormatRow) -> list[Flag]:
    """The flags of `vllm serve` for a format."""
    request, load = capacity.request, capacity.loads[capacity.served]
    requests = math.floor(row.requests[capacity.served])
    pictures = request.pictures
    flags = []
    if request.tp > 1:
        flags.append(Flag("--tensor-parallel-size", str(request.tp), "as asked"))
        if capacity.model.tower_problem(request.tp):
            flags.append(Flag("--mm-encoder-tp-mode", "data", "the vision tower cannot be split over so many"))
    why = f"{load.visual:,} visual + {load.text:,} text + {load.out:,} output tokens"
    if (context := capacity.model.decoder.context) and context > load.context:
        why += f"; the model's {context:,} would have to fit for one request"
    flags.append(Flag("--max-model-len", str(load.context), why))
    most = max(1, min(requests, capacity.defaults.sequences))
    why = "more would not fit and be preempted" if most == requests else "vLLM's own limit; the cache holds more"
    flags.append(Flag("--max-num-seqs", str(most), why))
    limit = f'{{"image":{len(pictures.images)},"video":{int(pictures.video is not None)}}}'
    flags.append(Flag("--limit-mm-per-prompt", limit, "vLLM reserves memory for what a request may bring"))
    if request.kv_cache != "auto":
        name = kv_cache.FLAGS.get(request.kv_cache, request.kv_cache)
        flags.append(Flag("--kv-cache-dtype", name, "as asked"))
    if request.draft:
        setting = json.dumps({**request.draft.speculative_config(), "model": str(request.draft.folder)})
        flags.append(Flag("--speculative-config", setting, "as asked"))
    elif request.speculative:
        method, tokens = request.speculative
        flags.append(
            Flag("--speculative-config", f'{{"method":"{method}","num_speculative_tokens":{tokens}}}', "as asked")
        )
    return flags


def recommendation(capacity: Capacity, row: FormatRow) -> str:
    """Why this format is recommended."""
    request, weights = capacity.request, row.weights
    if weights.key == QUANTIZED:
        return "the checkpoint as it is"
    if capacity.model.source is None:
        return "the model as it is: its family is not one that quantize knows"
    size = weights.options.get("group_size")
    regrouped = f"; groups of {size}, as {request.tp} devices tear larger ones" if size else ""
    base = next((other for other in capacity.rows if other.weights.scheme is None), row)
    schemes = request.target.schemes if request.target else {}
    names = (weights.name, *weights.others)
    why = "the smallest that fits"
    if request.target and weights.key in capacity.speeds:
        speed = capacity.speeds[weights.key]
        why = f"the fastest measured on {request.target.title} that fits: {speed:g} times the requests a second of bf16"
    elif request.target and schemes.get(None) in names:
        why = f"the default of {request.target.title}, by its kernels"
    elif request.target and schemes.get("memory") in names:
        why = f"the default of {request.target.title} where memory is short"
    if base is row or not base.fits:
        return f"{why}{'' if base is row else '; bf16 does not fit'}{regrouped}"
    gain = row.requests[capacity.served] / base.requests[capacity.served]
    return f"{why}; {gain:.2f} times as many at once as bf16{regrouped}"


def serve_command(capacity: Capacity, row: FormatRow, served: str, flags: Sequence[Flag]) -> str:
    """The command that serves the format in the folder `served`; on a CPU with the space of the cache, in GiB."""
    variable = ""
    if (target := capacity.request.target) and target.is_cpu:
        needed = capacity.defaults.sequences * capacity.loads[capacity.served].bytes + capacity.pool.block_bytes
        variable = f"VLLM_CPU_KVCACHE_SPACE={max(1, min(row.space or 0, needed + cache_pool.GIB) // cache_pool.GIB)} "
    return f"{variable}vllm serve {served} {' '.join(map(str, flags))}"
