"""Compare results of the GPU with those of a CPU: each quantizer, statistic and reducer, on equal inputs.

Sums differ in their order, so that a code may fall on the other side of a boundary and a token that is as good as another may
take its place. So codes are held against the CPU's by the error that they make, which is what counts: within 2%. Statistics are
to be as close to those in float64 as the CPU's are, and reducers are to keep 95% of the CPU's tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu.bare import made, measure
from gpu.part import Failed, Place, last_lines

CPU = torch.device("cpu")
ERRORS, TOKENS, CLOSE = 0.02, 0.95, 1e-5


def run(place: Place, what: str) -> dict[str, Any]:
    """Compare all `quantizers`, `statistics` or `reducers`. Raises `Failed` if some differ by more than the tolerance."""
    rows = {"quantizers": quantizers, "statistics": statistics, "reducers": reducers}[what](place.tiny)
    return checked(rows, rows)


def each(names: list[str], row: Callable[[str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A row per name, with the error if it raises."""
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            rows[name] = row(name)
        except Exception as error:
            rows[name] = {"wrong": last_lines(f"{type(error).__name__}: {error}", 1)[0]}
    return rows


def checked(rows: dict[str, dict[str, Any]], result: dict[str, Any]) -> dict[str, Any]:
    """The result; raises `Failed` with it if a row has a problem."""
    if wrong := [f"{name}: {row['wrong']}" for name, row in rows.items() if "wrong" in row]:
        raise Failed("\n".join(wrong), result)
    return result


def quantizers(tiny: bool) -> dict[str, dict[str, Any]]:
    """Each scheme on a group of two layers: equal codes, the errors of their outputs, and the smoothing scales."""
    from vlmcompress.numerics.statistics.inputs import STATISTICS
    from vlmcompress.quantization.schemes import REGISTRY

    width = 256 if tiny else 1024
    x, mask = made.inputs(width, 4 * width, CPU)
    weights = [made.weight(rows, width, CPU, rows) for rows in (width // 2, width // 4)]
    devices = {"cpu": CPU, "gpu": measure.device()}
    stats = {key: made.statistics(x.to(device), mask, STATISTICS) for key, device in devices.items()}

    def row(name: str) -> dict[str, Any]:
        quantized = {key: solved(name, [w.to(device) for w in weights], stats[key]) for key, device in devices.items()}
        scales = [s for s, _ in quantized.values() if s is not None]
        figures: dict[str, Any] = {"codes": [], "error_cpu": [], "error_gpu": []}
        for cpu, gpu, weight in zip(quantized["cpu"][1], quantized["gpu"][1], weights, strict=True):
            figures["codes"].append(round((cpu.q.float() == gpu.q.cpu().float()).double().mean().item(), 5))
            for key, q in (("error_cpu", cpu), ("error_gpu", gpu)):
                scale = quantized[key.removeprefix("error_")][0]
                figures[key].append(output_error(x, q.dequantize(torch.float32).cpu(), weight, scale))
        if scales:
            figures["scales_apart"] = apart(scales[1].cpu(), scales[0])
        ratios = [gpu / cpu for cpu, gpu in zip(figures["error_cpu"], figures["error_gpu"], strict=True)]
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        return figures | ({} if abs(worst - 1) <= ERRORS else {"wrong": f"its error is {worst:.4f} times the CPU's"})

    names = [name for name in REGISTRY.names() if (m := REGISTRY.get(name)).scheme(m.OPTIONS()) is not None]
    return each(names, row)


def solved(name: str, weights: list[Tensor], stats: Any) -> tuple[Tensor | None, list[Any]]:
    """Smooth and quantize a group: the scale, on which the weights were multiplied, and the quantized weights."""
    from vlmcompress.quantization.schemes import REGISTRY, smooth, solve

    method = REGISTRY.get(name)
    options = method.OPTIONS()
    smoothing = smooth(method, weights, stats, options)
    if (scale := smoothing.scale) is not None:
        weights, stats = [w.float() * scale for w in weights], stats.rescaled(scale)
    return scale, solve(method, weights, stats, options, torch.bfloat16, smoothing.factorization).weights


def output_error(x: Tensor, quantized: Tensor, weight: Tensor, scale: Tensor | None) -> float:
    """Relative squared error of a layer's output, in float64 from the inputs themselves."""
    change = quantized.double() / (1 if scale is None else scale.cpu().double()) - weight.double()
    return float((x.double() @ change.T).square().sum() / (x.double() @ weight.double().T).square().sum())


def statistics(tiny: bool) -> dict[str, dict[str, Any]]:
    """Each statistic, relative to the same in float64: from the GPU, and from the CPU."""
    from vlmcompress.numerics.rotation import Rotation
    from vlmcompress.numerics.statistics import kv_range
    from vlmcompress.numerics.statistics.inputs import STATISTICS, quadratic

    width = 128 if tiny else 2048
    x, mask = made.inputs(width, 3 * width, CPU)
    weight, wide = made.weight(width, width, CPU).float(), x.double()
    heads = x.view(1, len(x), 4, width // 4).transpose(1, 2)  # [1, heads, tokens, channels]

    vision = wide[mask == 2]
    oracle = {
        "gram": vision.T @ vision,
        "cross": vision.T @ (x * 1.01 - x)[mask == 2].double(),
        "absmean": wide.abs().mean(0),
        "absmax": wide.abs().amax(0),
        "error": (wide @ weight.double().T).square().sum().sqrt(),
        "kv_ranges": torch.stack([wide[mask == code].abs().amax() for code in made.SHARES]),
        "rotation": wide @ Rotation("hadamard", width, 0).matrix(),
    }

    def computed(device: torch.device) -> dict[str, Tensor]:
        stats, ranges = made.statistics(x.to(device), mask, STATISTICS), kv_range.KVRange()
        ranges.update(0, heads.to(device), mask[None])
        return {
            "gram": stats.gram({"vision": 1.0}),
            "absmean": stats.absmean(),
            "absmax": stats.absmax(),
            "error": quadratic(weight.to(device), stats.gram()).sum().sqrt(),
            "kv_ranges": ranges.ranges[0, :, 0],
            "rotation": Rotation("hadamard", width, 0).rows(x.to(device).float()),
        }

    values = {key: computed(device) for key, device in (("cpu", CPU), ("gpu", measure.device()))}

    def row(name: str) -> dict[str, Any]:
        errors = {key: apart(by_name[name].cpu(), oracle[name]) for key, by_name in values.items()}
        limit = max(CLOSE, 4 * errors["cpu"])
        return errors | ({} if errors["gpu"] <= limit else {"wrong": f"{errors['gpu']:.2g} apart, over {limit:.2g}"})

    return each([*oracle], row)


def reducers(tiny: bool) -> dict[str, dict[str, Any]]:
    """Each reducer on the signals of an image: the share of the CPU's tokens that the GPU keeps as well."""
    from vlmcompress.reduction.methods import REGISTRY

    grid, width = ((1, 8, 8), 64) if tiny else ((1, 32, 40), 3584)
    images = {key: made.signals(grid, width, CPU) for key in ("cpu", "gpu")}
    images["gpu"] = moved(images["gpu"], measure.device())

    def row(name: str) -> dict[str, Any]:
        reducer = made.reducer(name, width)
        kept = {key: made.reduced(reducer, image).anchor.cpu() for key, image in images.items()}
        both = torch.isin(kept["cpu"], kept["gpu"]).sum().item()
        share = both / max(len(kept["cpu"]), len(kept["gpu"]))
        figures = {"kept": len(kept["cpu"]), "equal": round(share, 4)}
        return figures | ({} if share >= TOKENS else {"wrong": f"{share:.0%} of the CPU's tokens are kept"})

    return each(REGISTRY.names(), row)


def moved(image: Any, device: torch.device) -> Any:
    """The signals of an image on a device."""
    values = {field.name: getattr(image, field.name) for field in dataclasses.fields(image)}
    tensors = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(image, **tensors)


def apart(value: Tensor, oracle: Tensor) -> float:
    """Relative difference of two tensors, by their norms."""
    return float((value.double() - oracle.double()).norm() / oracle.double().norm().clamp_min(1e-30))
