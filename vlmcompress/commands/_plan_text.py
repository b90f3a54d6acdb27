"""A plan of serving as text for people and as data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vlmcompress.common.text import figures, size, table

if TYPE_CHECKING:
    from vlmcompress.capacity.plan import Capacity, Load, Row


def plan_text(found: Capacity) -> str:
    """The request, the memory, the formats, and what to do."""
    from vlmcompress.capacity import advice
    from vlmcompress.capacity.plan import verdict

    asked = found.request
    where = asked.target.title if asked.target else "any machine"
    devices = f" x {asked.tp}" if asked.tp > 1 else ""
    lines = [
        f"{advice.shown_model(found)} on {where}{devices}",
        "",
        _loads(found),
        "",
        _memory(found),
        "",
        _rows(found),
    ]
    refused = [
        f"  not {row.weights.name} ({row.weights.label}): {row.weights.refused}"
        for row in found.rows
        if row.weights.refused
    ]
    lines += ["", *refused] if refused else []
    lines += ["", f"Verdict: {verdict(found)}"]
    if best := found.best:
        lines[-1] += f" ({advice.reason(found, best)})"
        written = advice.command(found, best, advice.shown_model(found))
        flags = advice.flags(found, best)
        lines += [f"  {written}"] if written else []
        lines.append(f"  vllm serve {'OUT' if written else advice.shown_model(found)} {' '.join(map(str, flags))}")
        lines += [table([(flag.name, flag.reason) for flag in flags], indent="    ")]
    lines += [f"  note: {note}" for note in found.notes]
    return "\n".join(lines)


def _loads(found: Capacity) -> str:
    rows: list[tuple[str, ...]] = [
        ("a request", "visual", "text", "output", "context", "cache it fills", "in whole blocks")
    ]
    for name, load in found.loads.items():
        rows.append(
            (
                name,
                *(f"{n:,}" for n in (load.visual, load.text, load.out, load.context)),
                size(load.filled),
                size(load.bytes),
            )
        )
    return table(rows)


def _memory(found: Capacity) -> str:
    from vlmcompress.planning.check import MEMORY_SHARE

    per = " of a device" if found.request.tp > 1 else ""
    rows = [
        (
            "cache",
            f"{found.token_bytes:,} bytes a token{per}"
            + (f", {size(found.state_bytes)} a request" if found.state_bytes else ""),
        )
    ]
    if drafting := found.speculation:
        head = (
            f"{size(drafting.bytes)} of weights and {found.head_token_bytes:,} bytes a token" if drafting.blocks else ""
        )
        more = f"{drafting.tokens} more state{'s' * (drafting.tokens > 1)} a request"
        states = more if found.state_bytes else ""
        takes = " and ".join(part for part in (head, states) if part) or "nothing"
        rows.append(("speculation", f"{drafting} takes {takes}, counted here; bounds are without it"))
    if found.request.space is not None:
        return table([*rows, ("for the cache", f"{size(found.request.space)}, as asked")])
    if found.memory:
        rows.append(
            ("memory", f"{size(MEMORY_SHARE * found.memory)} for vLLM ({MEMORY_SHARE} of {size(found.memory)}{per})")
        )
    kind = "as asked" if found.request.reserve is not None else "an estimate; vLLM measures it"
    rows.append(("reserve", f"{size(found.reserve)} ({kind}) and {size(found.encoder)} of encoder cache"))
    return table(rows)


def _rows(found: Capacity) -> str:
    """The table of formats; columns of bounds only where the machine's rates are known."""
    names = list(found.loads)
    bounds = any(one.prefill or one.step for row in found.rows for one in row.served.values())
    head = ["format", "", "weights of a device" if found.request.tp > 1 else "weights", "for the cache"]
    head += [f"requests ({name})" if len(names) > 1 else "requests" for name in names]
    head += ["bounds: prefill", "tokens/s of one", "of all"] if bounds else []
    rows = [(*head, "also by")]
    rows += [_row(found, row, names, bounds) for row in found.rows if row.weights.refused is None]
    about, target = "", found.request.target
    if not (target and target.bandwidth and target.rates):
        about = "\n  bounds of time: unknown without a target's bandwidth and arithmetic"
    elif bounds:
        about = "\n  bound: no engine is faster than bandwidth and arithmetic allow; expect a part of it"
    return table(rows) + about


def _row(found: Capacity, row: Row, names: list[str], bounds: bool) -> tuple[str, ...]:
    cells = [row.weights.name, row.weights.label if row.weights.label != row.weights.name else "", size(row.device)]
    cells.append("?" if row.space is None else size(row.space) if row.space > 0 else "none")
    cells += [f"{int(row.served[name].requests):,}" if name in row.served else "?" for name in names]
    one = row.served.get(found.served)
    if bounds:
        cells.append(f"{figures(1000 * one.prefill)} ms" if one and one.prefill else "")
        cells.append(figures(1 / one.step) if one and one.step else "")
        many = max(1, min(int(one.requests), found.defaults.sequences)) if one else 1
        cells.append(f"{figures(many / one.full_step)} ({many})" if one and one.full_step else "")
    return (*cells, ", ".join(row.weights.others))


def sizes_text(rows: list[dict[str, Any]], found: Capacity) -> str:
    """The table over image sizes."""
    names = list(rows[0]["loads"])
    head = ["image"]
    for name in names:
        head += [f"visual ({name})", "cache a request", "requests"]
    lines = [tuple(head)]
    for row in rows:
        cells = [row["size"]]
        for name in names:
            load = row["loads"].get(name)
            cells += (
                [f"{load['visual']:,}", size(load["bytes"]), f"{int(load['requests']):,}"] if load else ["", "", ""]
            )
        lines.append(tuple(cells))
    title = (
        f"Requests at once in {found.best.weights.name}, by size of the image" if found.best else "By size of the image"
    )
    return f"{title}\n{table(lines)}"


def as_data(found: Capacity) -> dict[str, Any]:
    """Everything, as JSON data; bytes and seconds."""
    from vlmcompress.capacity import advice
    from vlmcompress.capacity.plan import verdict
    from vlmcompress.planning.check import MEMORY_SHARE

    asked, best = found.request, found.best
    flags = advice.flags(found, best) if best else []
    return {
        "ok": best is not None,
        "verdict": verdict(found),
        "model": advice.shown_model(found),
        "target": asked.target_name,
        "tp": asked.tp,
        "kv_cache": asked.kv_cache,
        "reduce": str(asked.reduce) if asked.reduce else None,
        "speculative": _speculation(found),
        "memory": {
            "device": found.memory,
            "utilization": MEMORY_SHARE,
            "reserve": found.reserve,
            "encoder_cache": found.encoder,
            "token_bytes": found.token_bytes,
            "state_bytes": found.state_bytes,
            "block_bytes": found.pool.block_bytes,
            "groups": [dataclasses.asdict(group) for group in found.pool.groups],
        },
        "loads": {name: _load(load) for name, load in found.loads.items()},
        "formats": [_format(row) for row in found.rows],
        "recommended": best.weights.name if best else None,
        "reason": advice.reason(found, best) if best else None,
        "quantize": advice.command(found, best, advice.shown_model(found)) if best else None,
        "serve": [dataclasses.asdict(flag) for flag in flags],
        "notes": list(found.notes),
    }


def _speculation(found: Capacity) -> dict[str, Any] | None:
    if found.speculation is None:
        return None
    about = found.speculation
    return {
        "method": about.method,
        "tokens": about.tokens,
        "weights": about.bytes,
        "token_bytes": found.head_token_bytes,
    }


def _load(load: Load) -> dict[str, Any]:
    return {**dataclasses.asdict(load), "context": load.context}


def _format(row: Row) -> dict[str, Any]:
    about = row.weights
    return {
        "name": about.name,
        "others": list(about.others),
        "label": about.label,
        "format": about.key,
        "refused": about.refused,
        "weights": about.stored,
        "device_weights": row.device,
        "cache_space": row.space,
        "fits": row.fits,
        "served": {
            name: {
                "requests": one.requests,
                "prefill_seconds_bound": one.prefill,
                "step_seconds_bound": one.step,
                "full_step_seconds_bound": one.full_step,
            }
            for name, one in row.served.items()
        },
    }
