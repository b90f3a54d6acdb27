"""Plan how to serve a model, from config.json alone: whether it fits, for how many requests, in which format."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmcompress.cli import _flags, _process
from vlmcompress.cli._flags import Parser
from vlmcompress.cli._outcome import BAD_INPUT, OK, Outcome
from vlmcompress.utils import hub
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.text import parse_bytes, parse_pixels, size, table

if TYPE_CHECKING:
    from vlmcompress.evaluation.capacity.capacity import Capacity

GROUP = "look first"
PLACE = 10
MOST = 10_000_000


def options(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with config.json (weights and processor are optional), or an id on the Hub",
    )
    parser.add_argument("--target", type=_flags.target_name, help="machine to serve on; see vlmcompress list targets")
    _flags.tensor_parallel(parser, "devices that share the model (tensor parallel)")
    parser.add_argument(
        "--image-size", aliases=["--image"], default="1024x1024", metavar="WxH", help="size of an image"
    )
    parser.add_argument(
        "--images-per-request", aliases=["--images"], type=int, metavar="N", help="default: 1, or 0 with --video"
    )
    parser.add_argument("--video", metavar="FRAMESxWxH", help="a video, by the frames that the model sees")
    parser.add_argument(
        "--text-tokens",
        aliases=["--text"],
        default=256,
        metavar="N",
        help="text tokens per request, chat template included",
    )
    parser.add_argument("--out-tokens", aliases=["--out"], default=256, metavar="N", help="tokens per answer")
    parser.add_argument(
        "--reduce", metavar="METHOD[:KEEP]", help="compare with a visual-token reducer, e.g. coverage:0.5"
    )
    _flags.vocabulary(parser)
    _flags.kv_cache(parser, "fp8, int8_per_token_head, ...; default: the model's", default="auto", metavar="TYPE")
    parser.add_argument(
        "--speculative",
        metavar="METHOD[:N]",
        help="count speculative decoding by mtp, ngram or suffix, N tokens at once",
    )
    parser.add_argument("--draft", metavar="DRAFT", help="count a draft head that `vlmcompress draft` trained")
    parser.add_argument("--memory", metavar="SIZE", help="memory per device, like 80GB; default: the target's")
    parser.add_argument("--reserve", metavar="SIZE", help="memory for activations and the like; default: an estimate")
    parser.add_argument(
        "--kv-cache-memory", metavar="SIZE", help="size of the KV cache; default: the rest of the memory"
    )


def run(args: argparse.Namespace) -> Outcome:
    """Plan the memory and throughput of serving. Exit code 2 if no format fits."""
    from vlmcompress import models

    fields = _request_fields(args)
    models.require_model_type(_flags.read_model_config(args.model, family=False))
    reducer = None
    if args.reduce:
        from vlmcompress.reduction.choice import parse_reducer

        reducer = parse_reducer(args.reduce)
    _process.import_transformers()
    from vlmcompress.engines.vllm.served_model import read_served_model
    from vlmcompress.evaluation.capacity import weight_bytes
    from vlmcompress.evaluation.capacity.capacity import CapacityRequest, plan_capacity
    from vlmcompress.export.draft_folder import Draft
    from vlmcompress.reduction.visual_count import Pictures

    if args.speculative:
        fields["speculative"] = weight_bytes.parse_speculation(args.speculative)
    if args.draft:
        fields["draft"] = Draft.of(Path(hub.local(args.draft)))
    request = CapacityRequest(Pictures(*fields.pop("pictures")), reduce=reducer, **fields)
    model = read_served_model(Path(hub.local(args.model, weights="headers")))
    capacity = plan_capacity(model, request)
    undecided = all(row.space is None for row in capacity.rows)  # the machine's memory is not known
    return OK if capacity.best or undecided else BAD_INPUT, as_data(capacity), plan_text(capacity)


def _request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a `CapacityRequest` but its reducer and what drafts, checked; `pictures` are images and video."""
    from vlmcompress.recipe import targets

    if args.draft and args.speculative:
        raise UserError("--draft and --speculative exclude each other; give one of them")

    counts = {"--tp": 1, "--text-tokens": 0, "--out-tokens": 1, "--images-per-request": 0}
    for flag, least in counts.items():
        value = getattr(args, flag[2:].replace("-", "_")) or 0
        if not least <= value <= MOST:
            raise UserError(f"{flag} {value} should be a whole number from {least} to {MOST:,}")
    image = parse_pixels(args.image_size, "--image-size", most=9_999_999)
    images = args.images_per_request if args.images_per_request is not None else int(args.video is None)
    if images > 10_000:
        raise UserError(f"--images-per-request {images} is more than a request can hold; give up to 10,000")
    video = None
    if args.video is not None:
        match = re.fullmatch(r"([1-9]\d{0,6})[x×X*]([1-9]\d{0,6})[x×X*]([1-9]\d{0,6})", args.video)
        if not match:
            raise UserError(f"--video {args.video[:40]} is not a size; write it FRAMESxWIDTHxHEIGHT, like 16x640x360")
        video = int(match[1]), int(match[2]), int(match[3])
    texts = {"--memory": args.memory, "--reserve": args.reserve, "--kv-cache-memory": args.kv_cache_memory}
    memory, reserve, space = (None if text is None else parse_bytes(text, flag) for flag, text in texts.items())
    return {
        "pictures": ((image,) * images, video),
        "text": args.text_tokens,
        "out": args.out_tokens,
        "target": targets.get_target(args.target) if args.target else None,
        "target_name": args.target,
        "tp": args.tp,
        "kv_cache": args.kv_cache,
        "memory": memory,
        "reserve": reserve,
        "space": space,
        "vocabulary": {key: value for key in ("head", "embeddings") if (value := getattr(args, key, None))},
    }


def plan_text(capacity: Capacity) -> str:
    """The plan as text: the request, the memory, the formats, and the commands to run."""
    from vlmcompress.evaluation.capacity import advice
    from vlmcompress.evaluation.capacity.capacity import capacity_verdict

    request = capacity.request
    where = request.target.title if request.target else "any machine"
    devices = f" x {request.tp}" if request.tp > 1 else ""
    head = f"{capacity.model_name} on {where}{devices}"
    rows = [("a request", "visual", "text", "output", "context", "cache it fills", "in whole blocks")]
    for name, load in capacity.loads.items():
        counts = (f"{count:,}" for count in (load.visual, load.text, load.out, load.context))
        rows.append((name, *counts, size(load.filled), size(load.bytes)))  # type: ignore[arg-type]
    lines = [head, "", table(rows), "", _memory_text(capacity), "", _formats_text(capacity)]
    # Formats that do not run are named with their reasons, or a reader would look for them in the table.
    refused = [
        f"  not {row.weights.name} ({row.weights.label}): {row.weights.problem}"
        for row in capacity.rows
        if row.weights.problem
    ]
    lines += ["", *refused] if refused else []
    lines += ["", f"Verdict: {capacity_verdict(capacity)}"]
    if best := capacity.best:
        lines[-1] += f" ({advice.recommendation(capacity, best)})"
        written = advice.command(capacity, best)
        flags = advice.serve_flags(capacity, best)
        lines += [f"  {written}"] if written else []
        folder = "OUT" if written else capacity.model_name
        lines.append(f"  {advice.serve_command(capacity, best, folder, flags)}")
        lines += [table([(flag.name, flag.reason) for flag in flags], indent="    ")]
    lines += [f"  note: {note}" for note in capacity.notes]
    return "\n".join(lines)


def _memory_text(capacity: Capacity) -> str:
    from vlmcompress.quantization.plan.examine import MEMORY_SHARE

    per = " of a device" if capacity.request.tp > 1 else ""
    state = f", {size(capacity.state_bytes)} a request" if capacity.state_bytes else ""
    rows = [("cache", f"{capacity.token_bytes:,} bytes a token{per}{state}")]
    if drafting := capacity.speculation:
        head = f"{size(drafting.bytes)} of weights and {capacity.head_token_bytes:,} bytes a token"
        states = f"{drafting.tokens} more state{'s' * (drafting.tokens > 1)} a request"
        costs = [*([head] if drafting.bytes else []), *([states] if capacity.state_bytes else [])]
        takes = " and ".join(costs) or "nothing"
        rows.append(("speculation", f"{drafting} takes {takes}, included here"))
    if capacity.request.space is not None:
        return table([*rows, ("for the cache", f"{size(capacity.request.space)}, as asked")])
    if capacity.memory:
        rows.append(
            (
                "memory",
                f"{size(MEMORY_SHARE * capacity.memory)} for vLLM ({MEMORY_SHARE} of {size(capacity.memory)}{per})",
            )
        )
    kind = "as asked" if capacity.request.reserve is not None else "an estimate; vLLM measures it"
    rows.append(("reserve", f"{size(capacity.reserve)} ({kind}) and {size(capacity.encoder)} of encoder cache"))
    return table(rows)


def _formats_text(capacity: Capacity) -> str:
    """The table of formats."""
    names = list(capacity.loads)
    head = ["format", "", "weights of a device" if capacity.request.tp > 1 else "weights", "for the cache"]
    head += [f"requests ({name})" if len(names) > 1 else "requests" for name in names]
    head += ["measured speed"] if capacity.speeds else []
    rows = [(*head, "also by")]
    for row in capacity.rows:
        if row.weights.problem is not None:
            continue
        cells = [row.weights.name, row.weights.label if row.weights.label != row.weights.name else "", size(row.device)]
        cells.append("?" if row.space is None else size(row.space) if row.space > 0 else "none")
        cells += [f"{int(row.requests[name]):,}" if name in row.requests else "?" for name in names]
        if capacity.speeds:
            speed = capacity.speeds.get(row.weights.key)
            cells.append("" if speed is None else f"{speed:g} times")
        rows.append((*cells, ", ".join(row.weights.others)))
    about = "\n  measured speed: requests a second of 12 clients, of bf16's (docs/results.md, Speed of serving)"
    return table(rows) + about * bool(capacity.speeds)


def as_data(capacity: Capacity) -> dict[str, Any]:
    """The plan as data for `--json`, in bytes."""
    from vlmcompress.evaluation.capacity import advice
    from vlmcompress.evaluation.capacity.capacity import capacity_verdict
    from vlmcompress.quantization.plan.examine import MEMORY_SHARE

    request, best, drafting = capacity.request, capacity.best, capacity.speculation
    formats = [
        {
            "name": row.weights.name,
            "others": list(row.weights.others),
            "label": row.weights.label,
            "format": row.weights.key,
            "refused": row.weights.problem,
            "weights": row.weights.stored,
            "options": dict(row.weights.options),
            "device_weights": row.device,
            "cache_space": row.space,
            "fits": row.fits,
            "measured_speed": capacity.speeds.get(row.weights.key),
            "requests": dict(row.requests),
        }
        for row in capacity.rows
    ]
    flags = advice.serve_flags(capacity, best) if best else []
    return {
        "ok": best is not None,
        "verdict": capacity_verdict(capacity),
        "model": capacity.model_name,
        "target": request.target_name,
        "tp": request.tp,
        "kv_cache": request.kv_cache,
        "reduce": str(request.reduce) if request.reduce else None,
        "speculative": drafting
        and {
            "method": drafting.method,
            "tokens": drafting.tokens,
            "weights": drafting.bytes,
            "token_bytes": capacity.head_token_bytes,
        },
        "memory": {
            "device": capacity.memory,
            "utilization": MEMORY_SHARE,
            "reserve": capacity.reserve,
            "encoder_cache": capacity.encoder,
            "token_bytes": capacity.token_bytes,
            "state_bytes": capacity.state_bytes,
            "block_bytes": capacity.pool.block_bytes,
            "groups": [dataclasses.asdict(group) for group in capacity.pool.groups],
        },
        "loads": {name: {**dataclasses.asdict(load), "context": load.context} for name, load in capacity.loads.items()},
        "formats": formats,
        "recommended": best.weights.name if best else None,
        "reason": advice.recommendation(capacity, best) if best else None,
        "quantize": advice.command(capacity, best) if best else None,
        "serve": [dataclasses.asdict(flag) for flag in flags],
        "notes": list(capacity.notes),
    }
