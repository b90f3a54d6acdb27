"""The recipe and the flags of `vllm serve` that a plan comes to, each with its reason."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

from vlmcompress.common import hub
from vlmcompress.planning import kv_cache
from vlmcompress.planning.capacity import Capacity, Row
from vlmcompress.planning.weight_bytes import QUANTIZED


@dataclass(frozen=True)
class Flag:
    """A flag with its value, and why it is given."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        """Write the flag as in a shell."""
        return f"{self.name} {shlex.quote(self.value)}"


def command(found: Capacity, row: Row, model: str, out: str = "OUT") -> str | None:
    """The call of `vlmcompress quantize` that writes the format; None where there is nothing to write."""
    asked, name = found.request, row.weights.name
    if row.weights.key == QUANTIZED or found.model.source is None:
        return None
    kv = asked.kv_cache in ("fp8", "fp8_e4m3") and row.weights.scheme is not None
    if row.weights.scheme is None and not asked.reduce:
        return None
    parts = ["vlmcompress", "quantize", model, "-o", out, "--scheme", "none" if row.weights.scheme is None else name]
    parts += ["--target", asked.target_name] if asked.target_name else []
    parts += ["--kv-cache", "fp8"] if kv else []
    parts += ["--reduce", str(asked.reduce)] if asked.reduce else []
    return shlex.join(parts)


def flags(found: Capacity, row: Row) -> list[Flag]:
    """The flags of `vllm serve` for a format."""
    asked, load = found.request, found.loads[found.served]
    requests = math.floor(row.served[found.served].requests)
    pictures = asked.pictures
    given = []
    if asked.tp > 1:
        given.append(Flag("--tensor-parallel-size", str(asked.tp), "as asked"))
    context = found.model.decoder.context
    given.append(
        Flag(
            "--max-model-len",
            str(load.context),
            f"{load.visual:,} visual + {load.text:,} text + {load.out:,} output tokens"
            + (
                f"; the model's {context:,} would have to fit for one request"
                if context and context > load.context
                else ""
            ),
        )
    )
    most = max(1, min(requests, found.defaults.sequences))
    why = "more would not fit and be preempted" if most == requests else "vLLM's own limit; the cache holds more"
    given.append(Flag("--max-num-seqs", str(most), why))
    limit = f'{{"image":{len(pictures.images)},"video":{int(pictures.video is not None)}}}'
    given.append(Flag("--limit-mm-per-prompt", limit, "vLLM reserves memory for what a request may bring"))
    if asked.kv_cache != "auto":
        name = kv_cache.FLAGS.get(asked.kv_cache, asked.kv_cache)
        given.append(Flag("--kv-cache-dtype", name, "as asked"))
    if asked.speculative:
        method, tokens = asked.speculative
        given.append(
            Flag("--speculative-config", f'{{"method":"{method}","num_speculative_tokens":{tokens}}}', "as asked")
        )
    return given


def reason(found: Capacity, row: Row) -> str:
    """Why this format is recommended."""
    asked, weights = found.request, row.weights
    if weights.key == QUANTIZED:
        return "the checkpoint as it is"
    if found.model.source is None:
        return "the model as it is: its family is not one that quantize knows"
    base = next((other for other in found.rows if other.weights.scheme is None), row)
    schemes = asked.target.schemes if asked.target else {}
    names = (weights.name, *weights.others)
    why = "the smallest that fits"
    if asked.target and schemes.get(None) in names:
        why = f"what {asked.target.title} serves best"
    elif asked.target and schemes.get("memory") in names:
        why = f"what {asked.target.title} serves best where memory is short"
    if base is row or not base.fits:
        return f"{why}{'' if base is row else '; bf16 does not fit'}"
    gain = row.served[found.served].requests / base.served[found.served].requests
    return f"{why}; {gain:.2f} times the requests of bf16"


def shown_model(found: Capacity) -> str:
    """The model as people name it."""
    return hub.shown(found.model.path)
